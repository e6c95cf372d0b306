"""`onewave tiles fuse`, `place`, `sync`, `reuse` and `chimera`: ideas of related work, worked out on our graphs.

docs/related.md has an example of each with what it prints.
"""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from onewave.base.errors import InvalidArgumentError, check_one_of
from onewave.cli import options
from onewave.cli.output import amount, answer, percent, table
from onewave.cli.tiles import options as given
from onewave.cli.tiles.programs import Program
from onewave.tiles.graph.builders import DTYPES, check_sizes, cuts
from onewave.tiles.graph.programs import parse_bytes
from onewave.tiles.graph.stages import part_traffic, stages_of
from onewave.tiles.related import chimera
from onewave.tiles.related.fusion import plan_fusion
from onewave.tiles.related.placement import place_intermediates
from onewave.tiles.related.reuse import reuse_report
from onewave.tiles.related.sync_points import grid_syncs
from onewave.tiles.sim.machine import Machine

MAX_CHAIN_SIDE = 65_536
MAX_CHAIN_TASKS = 200_000
MAX_ROWS = 40

OnChip = Annotated[str, typer.Option("--cache", help="On-chip memory, as 4MB or 228KiB.")]


def fuse_command(
    program: Program,
    cache: OnChip = "4MB",
    policy: Annotated[str, typer.Option("--policy", help="lru, fifo or belady (also called opt).")] = "belady",
    as_json: options.Json = False,
) -> None:
    """Which operators to fuse so that the fewest bytes move.

    A group of operators is one launch; what only it reads stays on chip as far as that holds it. Exact for up to 12
    operators, each group in the best of a few orders.
    """
    policy = given.policy_of(policy)
    plan = plan_fusion(program.build().graph, parse_bytes(cache), policy)
    facts: dict[str, Any] = {
        "program": program.title,
        "cache": parse_bytes(cache),
        "moved_bytes": plan.moved,
        "unfused_bytes": plan.unfused,
        "all_fused_bytes": plan.fused,
        "compulsory_bytes": plan.compulsory,
        "tried": plan.tried,
        "groups": [],
    }
    head = table(f"{program.title}, {cache} on chip", "", "")
    head.add_row("best groups", amount(plan.moved))
    head.add_row("each alone", amount(plan.unfused))
    head.add_row("all in one", amount(plan.fused))
    head.add_row("compulsory", amount(plan.compulsory))
    groups = table("groups", "operators", "order", "loads", "stores")
    for group in plan.groups:
        names, order, loads, stores = group.operators, group.traffic.order, group.traffic.loads, group.traffic.stores
        groups.add_row(" + ".join(names), order, amount(loads), amount(stores))
        moved = {"loads_bytes": loads, "stores_bytes": stores}
        facts["groups"].append({"operators": list(names), "order": order, **moved})
    answer(as_json, facts, head, groups)


def place_command(
    program: Program,
    level: Annotated[
        list[str] | None, typer.Option("--level", help="NAME=SIZE[:private], from the workers outwards. Repeatable.")
    ] = None,
    workers: given.Workers = 132,
    as_json: options.Json = False,
) -> None:
    """On which level each intermediate should live.

    As near to the workers as it fits. Workers take whole row blocks. Levels from the workers outwards; by default
    --level smem=228KiB:private --level L2=50MB. Searches all placements and a few interleavings for the fewest bytes in
    memory, then in the next level.
    """
    levels = given.levels_of(level or ["smem=228KiB:private", "L2=50MB"], policies=())
    found = place_intermediates(program.build().graph, levels, workers)
    facts = {"program": program.title, "order": found.order, "tensors": [asdict(each) for each in found.tensors]}
    facts |= {"traffic_bytes": found.traffic, "unplaced_bytes": found.unplaced, "rest_bytes": found.rest}
    placed = table(f"{program.title}, order {found.order}", "intermediate", "level", "written + read", "peak")
    for each in found.tensors:
        placed.add_row(each.tensor, each.level, amount(each.accessed), amount(each.peak))
    traffic = table("traffic of intermediates", "level", "bytes")
    for name, moved in found.traffic.items():
        traffic.add_row(name, amount(moved))
    traffic.add_row("all of it, unplaced", amount(found.unplaced))
    answer(as_json, facts, placed, traffic)


def sync_command(
    program: Program,
    workers: given.Workers = 132,
    mapping: Annotated[
        str, typer.Option("--map", help="Tasks to workers: follow (their producers), deal (in turn), row, column.")
    ] = "follow",
    as_json: options.Json = False,
) -> None:
    """Where one launch needs a grid-wide sync, and where none.

    Two operators need one between them only if a task depends on another worker's; the fewest that order all such
    dependencies are printed.
    """
    plan = grid_syncs(program.build(workers).graph, workers, mapping)
    before = [plan.stages[stage] for stage in plan.barriers]
    facts: dict[str, Any] = {"program": program.title, "mapping": mapping, "workers": workers}
    facts |= {"stages": list(plan.stages), "boundaries": plan.boundaries, "syncs": len(before), "before": before}
    facts |= {"inside": list(plan.inside), "busy": plan.busy, "pairs": [asdict(pair) for pair in plan.pairs]}
    head = table(f"{program.title}, {workers} workers, map {mapping}", "", "")
    head.add_row("operators, boundaries", f"{len(plan.stages)}, {plan.boundaries}")
    head.add_row("grid syncs needed", str(len(before)))
    head.add_row("before", ", ".join(before[:12]) + (", ..." if len(before) > 12 else "") or "-")
    if plan.inside:
        head.add_row("flags needed inside", ", ".join(plan.inside[:12]))
    head.add_row("worker slots with a task", percent(plan.busy))
    pairs = table("dependencies", "from", "to", "pairs of tasks", "across workers")
    for pair in plan.pairs[:MAX_ROWS]:
        pairs.add_row(pair.producer, pair.consumer, f"{pair.pairs:,}", f"{pair.crossing:,}")
    if len(plan.pairs) > MAX_ROWS:
        pairs.add_row(f"{len(plan.pairs) - MAX_ROWS} more")
    answer(as_json, facts, head, pairs)


def reuse_command(
    program: Program,
    order: given.Order = None,
    workers: given.Workers = 132,
    as_json: options.Json = False,
) -> None:
    """How often each tensor's bytes are used again.

    And what bandwidth the rest asks for. spatial: by other tasks of the same wave; temporal: since the wave before;
    later: after a pause. live peak: the most bytes of intermediates alive at once.
    """
    chosen = order or program.default_order
    found = reuse_report(program.build(workers).graph, chosen, Machine(workers=workers))
    parts = ("requested", "distinct", "spatial", "temporal", "later")
    facts: dict[str, Any] = {
        "program": program.title,
        "order": chosen,
        "waves": found.waves,
        "peak_bandwidth_bytes_per_ns": found.peak_bandwidth,
        "mean_bandwidth_bytes_per_ns": found.mean_bandwidth,
        "live_peak_bytes": found.live_peak,
        "tensors": [
            {"tensor": t.tensor, **{f"{part}_bytes": getattr(t, part) for part in parts}, "times_used": t.times}
            for t in found.tensors
        ],
    }
    head = table(f"{program.title}, order {chosen}, {workers} workers", "", "")
    head.add_row("waves", f"{found.waves:,}")
    peak, mean = found.peak_bandwidth / 1000, found.mean_bandwidth / 1000
    head.add_row("bandwidth to never wait", f"{peak:,.2f} TB/s in the hungriest wave, {mean:,.2f} TB/s on average")
    head.add_row("live intermediates, peak", amount(found.live_peak))
    rows = table("reuse", "tensor", "asked for", "distinct", "times", "spatial", "temporal", "later")
    for t in found.tensors[:MAX_ROWS]:
        shares = [percent(part / t.requested) for part in (t.spatial, t.temporal, t.later)]
        rows.add_row(t.tensor, amount(t.requested), amount(t.distinct), f"{t.times:,.1f}", *shares)
    if len(found.tensors) > MAX_ROWS:
        rows.add_row(f"{len(found.tensors) - MAX_ROWS} more")
    answer(as_json, facts, head, rows)


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
    check_sizes({"M": m, "N": n, "K": k, "L": l_, "--inner": inner})
    check_one_of("dtype", dtype, DTYPES)
    if max(m, n, k, l_) > MAX_CHAIN_SIDE:
        raise InvalidArgumentError("sizes", got=f"{max(m, n, k, l_):,}", allowed=f"up to {MAX_CHAIN_SIDE:,}")
    capacity, itemsize = parse_bytes(cache), DTYPES[dtype]
    whole = {"m": m, "n": n, "k": k, "l": l_}
    block = chimera.closed_form(capacity, inner, itemsize)
    blocks = chimera.square_blocks(whole, capacity, inner, itemsize)
    best = chimera.best_blocks(whole, capacity, itemsize, inner=(inner,))
    facts: dict[str, Any] = {"program": f"chain M={m} N={n} K={k} L={l_}", "cache": capacity, "block": block}
    for name, order, cut in (("closed_form", "ml", blocks), ("best", best.order, best.blocks)):
        moved, simulated = chimera.movement(order, whole, cut, itemsize), None
        turns = {dim: cuts(size, cut[dim]) for dim, size in whole.items()}
        # More blocks would take longer than a person waits.
        if turns["m"] * turns["l"] * (turns["k"] + turns["n"]) <= MAX_CHAIN_TASKS:
            graph = chimera.chain_graph(order, whole, cut, dtype)
            every = stages_of(graph).tasks(range(len(graph.tasks)))
            simulated = part_traffic(graph, every, capacity, orders=("sequential",)).moved
        facts[name] = {
            "order": order,
            "blocks": cut,
            "needed_bytes": chimera.needed_bytes(order, whole, cut, itemsize),
            "predicted_bytes": moved.total,
            "simulated_bytes": simulated,
            "by_tensor": moved.by_tensor,
        }
    facts["intermediate_bytes"] = int(2 * m * l_ * itemsize)
    facts["separate_bytes"] = chimera.separate_bytes(whole, capacity, itemsize, inner=inner)
    title = f"{facts['program']}, {cache} on chip"
    rows = table(title, "", "order", "block m x l", "k, n", "needs", "predicted", "simulated")
    for label, name in (("closed form", "closed_form"), ("best of all", "best")):
        row, cut = facts[name], facts[name]["blocks"]
        sizes = [row[f"{what}_bytes"] for what in ("needed", "predicted", "simulated")]
        moved = ["not run" if size is None else amount(size) for size in sizes]
        rows.add_row(label, row["order"], f"{cut['m']} x {cut['l']}", f"{cut['k']}, {cut['n']}", *moved)
    apart = table("beside", "", "")
    apart.add_row("two launches, each at its best", amount(facts["separate_bytes"]))
    apart.add_row("of that C, written and read once", amount(facts["intermediate_bytes"]))
    answer(as_json, facts, rows, apart)
