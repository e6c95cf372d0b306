"""`onewave tiles fuse`, `place`, `sync`, `reuse` and `chimera`: ideas of related work, worked out on our graphs.

docs/related.md has an example of each with what it prints.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onewave.base.errors import InvalidArgumentError
from onewave.cli import options
from onewave.cli.tiles import options as given
from onewave.cli.tiles import tables

if TYPE_CHECKING:
    from onewave.tiles.graph.graph import TileGraph

MAX_CHAIN_SIDE = 65_536
MAX_CHAIN_TASKS = 200_000

OnChip = Annotated[str, typer.Option("--cache", help="On-chip memory, as 4MB or 228KiB.")]


def fuse_command(
    program: given.Program,
    sizes: given.Sizes = None,
    tile: given.Tile = None,
    cache: OnChip = "4MB",
    policy: given.Policy = "belady",
    dtype: given.Dtype = "bf16",
    splits: given.Splits = 1,
    fused: given.Fused = False,
    causal: given.Causal = False,
    kv_heads: given.KvHeads = None,
    as_json: options.Json = False,
) -> None:
    """Which operators to fuse so that the fewest bytes move.

    A group of operators is one launch; what only it reads stays on chip as far as that holds it. Exact for up to 12
    operators, each group in the best of a few orders.
    """
    from onewave.tiles.graph.programs import parse_bytes
    from onewave.tiles.related.fusion import plan_fusion

    policy = {"opt": "belady"}.get(policy.lower(), policy.lower())
    if policy not in ("belady", "lru", "fifo"):
        raise InvalidArgumentError("policy", got=repr(policy[:40]), allowed="lru, fifo, belady")
    graph = _graph(program, sizes, tile, dtype, splits, fused, causal, kv_heads)
    plan = plan_fusion(graph, parse_bytes(cache), policy)
    facts: dict[str, Any] = {
        "program": _title(program, sizes),
        "cache": parse_bytes(cache),
        "moved_bytes": plan.moved,
        "unfused_bytes": plan.unfused,
        "all_fused_bytes": plan.fused,
        "compulsory_bytes": plan.compulsory,
        "tried": plan.tried,
        "groups": [
            {
                "operators": list(group.operators),
                "order": group.traffic.order,
                "loads_bytes": group.traffic.loads,
                "stores_bytes": group.traffic.stores,
            }
            for group in plan.groups
        ],
    }
    if as_json:
        print(json.dumps(facts))
        return
    head = tables.table(f"{facts['program']}, {cache} on chip", "", "")
    for label, name in (("best groups", "moved"), ("each alone", "unfused"), ("all in one", "all_fused")):
        head.add_row(label, tables.amount(facts[f"{name}_bytes"]))
    head.add_row("compulsory", tables.amount(plan.compulsory))
    groups = tables.table("groups", "operators", "order", "loads", "stores")
    for group in plan.groups:
        moved = (tables.amount(group.traffic.loads), tables.amount(group.traffic.stores))
        groups.add_row(" + ".join(group.operators), group.traffic.order, *moved)
    tables.show(head, groups)


def place_command(
    program: given.Program,
    sizes: given.Sizes = None,
    tile: given.Tile = None,
    level: Annotated[
        list[str] | None, typer.Option("--level", help="NAME=SIZE[:private], from the workers outwards. Repeatable.")
    ] = None,
    workers: given.Workers = 132,
    dtype: given.Dtype = "bf16",
    splits: given.Splits = 1,
    fused: given.Fused = False,
    causal: given.Causal = False,
    kv_heads: given.KvHeads = None,
    as_json: options.Json = False,
) -> None:
    """On which level each intermediate should live.

    As near to the workers as it fits. Workers take whole row blocks. Levels from the workers outwards; by default
    --level smem=228KiB:private --level L2=50MB. Searches all placements and a few interleavings for the fewest bytes in
    memory, then in the next level.
    """
    from onewave.tiles.related.placement import place_intermediates

    graph = _graph(program, sizes, tile, dtype, splits, fused, causal, kv_heads)
    found = place_intermediates(graph, _levels(level or ["smem=228KiB:private", "L2=50MB"]), workers)
    facts = {"program": _title(program, sizes), **asdict(found)}
    facts |= {"traffic_bytes": facts.pop("traffic"), "unplaced_bytes": facts.pop("unplaced"), "rest_bytes": found.rest}
    del facts["rest"]
    if as_json:
        print(json.dumps(facts))
        return
    table = tables.table(f"{facts['program']}, order {found.order}", "intermediate", "level", "written + read", "peak")
    for placed in found.tensors:
        sizes_of = (tables.amount(placed.accessed), tables.amount(placed.peak))
        table.add_row(placed.tensor, placed.level, *sizes_of)
    levels = tables.table("traffic of intermediates", "level", "bytes")
    for name, moved in found.traffic.items():
        levels.add_row(name, tables.amount(moved))
    levels.add_row("all of it, unplaced", tables.amount(found.unplaced))
    tables.show(table, levels)


def sync_command(
    program: given.Program,
    sizes: given.Sizes = None,
    tile: given.Tile = None,
    workers: given.Workers = 132,
    mapping: Annotated[
        str, typer.Option("--map", help="Tasks to workers: follow (their producers), deal (in turn), row, column.")
    ] = "follow",
    dtype: given.Dtype = "bf16",
    splits: given.Splits = 1,
    fused: given.Fused = False,
    causal: given.Causal = False,
    kv_heads: given.KvHeads = None,
    context: given.Context = 4096,
    batch: given.Batch = 1,
    as_json: options.Json = False,
) -> None:
    """Where one launch needs a grid-wide sync, and where none.

    Two operators need one between them only if a task depends on another worker's; the fewest that order all such
    dependencies are printed.
    """
    from onewave.tiles.related.sync_points import grid_syncs

    graph = _graph(program, sizes, tile, dtype, splits, fused, causal, kv_heads, context, batch, workers)
    plan = grid_syncs(graph, workers, mapping)
    facts: dict[str, Any] = {
        "program": _title(program, sizes),
        "mapping": mapping,
        "workers": workers,
        "stages": list(plan.stages),
        "boundaries": plan.boundaries,
        "syncs": len(plan.barriers),
        "before": [plan.stages[stage] for stage in plan.barriers],
        "inside": list(plan.inside),
        "busy": plan.busy,
        "pairs": [asdict(pair) for pair in plan.pairs],
    }
    if as_json:
        print(json.dumps(facts))
        return
    head = tables.table(f"{facts['program']}, {workers} workers, map {mapping}", "", "")
    head.add_row("operators, boundaries", f"{len(plan.stages)}, {plan.boundaries}")
    head.add_row("grid syncs needed", str(len(plan.barriers)))
    head.add_row("before", ", ".join(facts["before"][:12]) + (", ..." if len(plan.barriers) > 12 else "") or "-")
    if plan.inside:
        head.add_row("flags needed inside", ", ".join(plan.inside[:12]))
    head.add_row("worker slots with a task", tables.percent(plan.busy))
    pairs = tables.table("dependencies", "from", "to", "pairs of tasks", "across workers")
    for pair in plan.pairs[:40]:
        pairs.add_row(pair.producer, pair.consumer, f"{pair.pairs:,}", f"{pair.crossing:,}")
    if len(plan.pairs) > 40:
        pairs.add_row(f"{len(plan.pairs) - 40} more", "", "", "")
    tables.show(head, pairs)


def reuse_command(
    program: given.Program,
    sizes: given.Sizes = None,
    tile: given.Tile = None,
    order: given.Order = None,
    workers: given.Workers = 132,
    dtype: given.Dtype = "bf16",
    splits: given.Splits = 1,
    fused: given.Fused = False,
    causal: given.Causal = False,
    kv_heads: given.KvHeads = None,
    context: given.Context = 4096,
    batch: given.Batch = 1,
    as_json: options.Json = False,
) -> None:
    """How often each tensor's bytes are used again.

    And what bandwidth the rest asks for. spatial: by other tasks of the same wave; temporal: since the wave before;
    later: after a pause. live peak: the most bytes of intermediates alive at once.
    """
    from onewave.tiles.related.reuse import reuse_report
    from onewave.tiles.sim.machine import Machine

    graph = _graph(program, sizes, tile, dtype, splits, fused, causal, kv_heads, context, batch, workers)
    chosen = order or ("row" if program == "gemm" else "sequential")
    found = reuse_report(graph, chosen, Machine(workers=workers))
    facts: dict[str, Any] = {
        "program": _title(program, sizes),
        "order": chosen,
        "waves": found.waves,
        "peak_bandwidth_bytes_per_ns": found.peak_bandwidth,
        "mean_bandwidth_bytes_per_ns": found.mean_bandwidth,
        "live_peak_bytes": found.live_peak,
        "tensors": [
            {
                "tensor": t.tensor,
                "requested_bytes": t.requested,
                "distinct_bytes": t.distinct,
                "spatial_bytes": t.spatial,
                "temporal_bytes": t.temporal,
                "later_bytes": t.later,
                "times_used": t.times,
            }
            for t in found.tensors
        ],
    }
    if as_json:
        print(json.dumps(facts))
        return
    head = tables.table(f"{facts['program']}, order {chosen}, {workers} workers", "", "")
    head.add_row("waves", f"{found.waves:,}")
    peak, mean = found.peak_bandwidth / 1000, found.mean_bandwidth / 1000
    head.add_row("bandwidth to never wait", f"{peak:,.2f} TB/s in the hungriest wave, {mean:,.2f} TB/s on average")
    head.add_row("live intermediates, peak", tables.amount(found.live_peak))
    table = tables.table("reuse", "tensor", "asked for", "distinct", "times", "spatial", "temporal", "later")
    for t in found.tensors[:40]:
        shares = [tables.percent(part / t.requested) for part in (t.spatial, t.temporal, t.later)]
        table.add_row(t.tensor, tables.amount(t.requested), tables.amount(t.distinct), f"{t.times:,.1f}", *shares)
    if len(found.tensors) > 40:
        table.add_row(f"{len(found.tensors) - 40} more", *[""] * 6)
    tables.show(head, table)


def chimera_command(
    m: Annotated[int, typer.Argument(metavar="M", help="C[M,L] = A[M,K] B[K,L], then E[M,N] = C D[L,N].")],
    n: Annotated[int, typer.Argument(metavar="N")],
    k: Annotated[int, typer.Argument(metavar="K")],
    l_: Annotated[int, typer.Argument(metavar="L")],
    cache: OnChip = "1MB",
    inner: Annotated[int, typer.Option("--inner", help="Block of K and N, in elements.")] = 64,
    dtype: given.Dtype = "bf16",
    as_json: options.Json = False,
) -> None:
    """Block order and sizes of two chained products, by closed form.

    Beside the closed form: the best of all block sizes by the same count, what the simulator moves in that order, and
    the two products on their own.
    """
    from onewave.tiles.graph.builders import DTYPES, check_sizes, cuts
    from onewave.tiles.graph.programs import parse_bytes
    from onewave.tiles.graph.stages import part_traffic, stages_of
    from onewave.tiles.related.chimera import (
        best_blocks,
        chain_graph,
        closed_form,
        movement,
        needed_bytes,
        separate_bytes,
        square_blocks,
    )

    check_sizes({"M": m, "N": n, "K": k, "L": l_, "--inner": inner})
    if dtype not in DTYPES:
        raise InvalidArgumentError("dtype", got=repr(dtype[:40]), allowed=", ".join(DTYPES))
    if max(m, n, k, l_) > MAX_CHAIN_SIDE:
        raise InvalidArgumentError("sizes", got=f"{max(m, n, k, l_):,}", allowed=f"up to {MAX_CHAIN_SIDE:,}")
    capacity, itemsize = parse_bytes(cache), DTYPES[dtype]
    whole = {"m": m, "n": n, "k": k, "l": l_}
    block = closed_form(capacity, inner, itemsize)
    blocks = square_blocks(whole, capacity, inner, itemsize)
    best = best_blocks(whole, capacity, itemsize, inner=(inner,))
    facts: dict[str, Any] = {"program": f"chain M={m} N={n} K={k} L={l_}", "cache": capacity, "block": block}
    for name, order, cut in (("closed_form", "ml", blocks), ("best", best.order, best.blocks)):
        facts[name] = {
            "order": order,
            "blocks": cut,
            "needed_bytes": needed_bytes(order, whole, cut, itemsize),
            "predicted_bytes": movement(order, whole, cut, itemsize).total,
            "simulated_bytes": None,
            "by_tensor": movement(order, whole, cut, itemsize).by_tensor,
        }
        turns = {dim: cuts(size, cut[dim]) for dim, size in whole.items()}
        # More blocks would take longer than a person waits.
        if turns["m"] * turns["l"] * (turns["k"] + turns["n"]) <= MAX_CHAIN_TASKS:
            graph = chain_graph(order, whole, cut, dtype)
            every = stages_of(graph).tasks(range(len(graph.tasks)))
            facts[name]["simulated_bytes"] = part_traffic(graph, every, capacity, orders=("sequential",)).moved
    facts["intermediate_bytes"] = int(2 * m * l_ * itemsize)
    facts["separate_bytes"] = separate_bytes(whole, capacity, itemsize, inner=inner)
    if as_json:
        print(json.dumps(facts))
        return
    table = tables.table(
        f"{facts['program']}, {cache} on chip", "", "order", "block m x l", "k, n", "needs", "predicted", "simulated"
    )
    for label, name in (("closed form", "closed_form"), ("best of all", "best")):
        row, cut = facts[name], facts[name]["blocks"]
        sizes = [row[f"{what}_bytes"] for what in ("needed", "predicted", "simulated")]
        moved = ["not run" if size is None else tables.amount(size) for size in sizes]
        table.add_row(label, row["order"], f"{cut['m']} x {cut['l']}", f"{cut['k']}, {cut['n']}", *moved)
    apart = tables.table("beside", "", "")
    apart.add_row("two launches, each at its best", tables.amount(facts["separate_bytes"]))
    apart.add_row("of that C, written and read once", tables.amount(facts["intermediate_bytes"]))
    tables.show(table, apart)


def _graph(
    program: str,
    sizes: list[str] | None,
    tile: str | None,
    dtype: str,
    splits: int,
    fused: bool,
    causal: bool,
    kv_heads: int | None,
    context: int = 4096,
    batch: int = 1,
    workers: int = 132,
) -> TileGraph:
    from onewave.cli.tiles.programs import Asked, DecodeOptions, build
    from onewave.tiles.graph.programs import ProgramOptions, parse_tile

    cut = None if tile is None else parse_tile(tile)
    shape = ProgramOptions(cut, dtype, splits, fused, causal, kv_heads, workers)
    return build(Asked(program, sizes or [], shape, DecodeOptions(context, batch))).graph


def _title(program: str, sizes: list[str] | None) -> str:
    return " ".join((program, *(sizes or ())))


def _levels(texts: list[str]) -> list[Any]:
    from onewave.tiles.graph.programs import parse_bytes
    from onewave.tiles.sim.machine import CacheLevel

    found: list[CacheLevel] = []
    for text in texts:
        name, _, rest = text.partition("=")
        size, *words = rest.split(":")
        if not name or not rest or words not in ([], ["private"]) or name == "memory":
            raise InvalidArgumentError("--level", got=repr(text[:40]), allowed="NAME=SIZE[:private]")
        found.append(CacheLevel(name, parse_bytes(size), private=bool(words)))
    if len({level.name for level in found}) != len(found):
        raise InvalidArgumentError("--level", got="one name twice", allowed="different names")
    if len(found) > 4:
        raise InvalidArgumentError("--level", got=f"{len(found)} levels", allowed="up to 4")
    return found
