"""`onewave tiles simulate`, `bounds` and `compare`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onewave.base.errors import InvalidArgumentError, shown
from onewave.cli import options
from onewave.cli.tiles import options as given
from onewave.cli.tiles import tables

if TYPE_CHECKING:
    from onewave.cli.tiles.programs import Asked
    from onewave.tiles.graph.graph import TileGraph
    from onewave.tiles.search.bounds import Bound
    from onewave.tiles.sim.machine import CacheLevel, Machine
    from onewave.tiles.sim.trace import Trace


def simulate_command(
    program: given.Program,
    sizes: given.Sizes = None,
    tile: given.Tile = None,
    order: given.Order = None,
    cache: given.Cache = None,
    cache_panels: given.CachePanels = None,
    policy: Annotated[str | None, typer.Option("--policy", help="lru (the default), fifo or belady (or opt).")] = None,
    level: given.Level = None,
    workers: given.Workers = 132,
    co_resident: given.CoResident = 1,
    queues: given.Queues = None,
    mode: given.Mode = "wave",
    skew: given.Skew = 0.0,
    sync: given.Sync = None,
    dtype: given.Dtype = "bf16",
    splits: given.Splits = 1,
    fused: given.Fused = False,
    causal: given.Causal = False,
    kv_heads: given.KvHeads = None,
    context: given.Context = 4096,
    batch: given.Batch = 1,
    weight_format: given.WeightFormat = "16-bit",
    as_json: options.Json = False,
    trace: Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="Write the Trace as JSON.")] = None,
    perfetto: Annotated[
        Path | None, typer.Option("--perfetto", metavar="FILE", help="Write the timeline for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Simulate a program: traffic, time, idle, energy, gap to bounds.

    Times are those of a model of an H200: 132 SMs that share 989 TFLOP/s and 4,650 GB/s of memory, 50 MB of L2 at 5,500
    GB/s, and 0.5 us on top of each task's work. --workers deals the same totals out to fewer or more. decode is the
    plan that the engine launches, on the queues that it deals out, unless --order or --queues ask for others.

    Examples: simulate gemm 4096 4096 4096 --tile 128x128x64 --order grouped:8 --cache 50MB --workers 132;
    simulate decode llama-3.1-8b; simulate chain 1024 4096 4096 4096 --order row-by-row.
    """
    from onewave.cli.tiles.programs import Asked, DecodeOptions, build, by_stage
    from onewave.tiles.graph.programs import ProgramOptions, parse_tile
    from onewave.tiles.sim.machine import Machine
    from onewave.tiles.sim.simulate import simulate

    machine = Machine(workers=workers, co_resident=co_resident, queues=queues or "ticket", levels=(), skew=skew)
    cut = None if tile is None else parse_tile(tile)
    if cache_panels is not None:
        _refuse_beside_panels(
            "--tile, --order, --policy and --json beside --cache-panels",
            cache=cache, level=level, sync=sync, trace=trace, perfetto=perfetto, kv_heads=kv_heads, skew=skew or None,
            fused=fused or None, causal=causal or None,
            **_changed(
                mode=(mode, "wave"), queues=(queues, None), workers=(workers, 132), co_resident=(co_resident, 1),
                dtype=(dtype, "bf16"), splits=(splits, 1), context=(context, 4096), batch=(batch, 1),
                weight_format=(weight_format, "16-bit"),
            ),
        )  # fmt: skip
        _simulate_panels(
            program, sizes or [], cut or (128, 128, 64), order or "row", cache_panels, policy or "lru", as_json
        )
        return
    shape = ProgramOptions(cut, dtype, splits, fused, causal, kv_heads, machine.lanes, order == "stream-k")
    asked = Asked(program, sizes or [], shape, DecodeOptions(context, batch, weight_format))
    built = build(asked)
    graph, prescribed = built.graph, built.chosen_queues(order, queues)
    machine = Machine(
        workers=workers,
        co_resident=co_resident,
        queues=queues or "ticket",
        levels=_levels(graph, built.levels, cache, policy, level or []),
        skew=skew,
        ahead_bytes=built.ahead_bytes,
    )
    default = "row" if program == "gemm" else "sequential"
    chosen = "sequential" if prescribed is not None else order or default
    made = simulate(graph, chosen, machine, mode=mode, queues=prescribed, sync=sync)
    for path, text in ((trace, made.to_json), (perfetto, lambda: json.dumps(made.to_perfetto()))):
        if path is not None:
            tables.write_text(path, text())
    found = _bounds_of(graph, asked, machine, at_once=machine.lanes if mode == "wave" else 1)
    shown_trace = made if built.step is None else by_stage(made)
    facts = _facts(asked.title, shown_trace, found, order or default) | {"sync": sync}
    if as_json:
        print(json.dumps(facts))
    else:
        tables.print_simulation(facts)


def bounds_command(
    program: given.Program,
    sizes: given.Sizes = None,
    tile: given.Tile = None,
    cache: given.Cache = None,
    cache_panels: given.CachePanels = None,
    workers: given.Workers = 132,
    dtype: given.Dtype = "bf16",
    splits: given.Splits = 1,
    fused: given.Fused = False,
    causal: given.Causal = False,
    kv_heads: given.KvHeads = None,
    context: given.Context = 4096,
    batch: given.Batch = 1,
    weight_format: given.WeightFormat = "16-bit",
    as_json: options.Json = False,
) -> None:
    """Lower bounds on traffic, and every order's gap to them.

    The orders are those of a gemm's grid; other programs show their sequential order.
    """
    from onewave.cli.tiles.programs import Asked, DecodeOptions, build
    from onewave.tiles.graph.programs import ProgramOptions, parse_tile
    from onewave.tiles.order.orders import GRID_ORDERS
    from onewave.tiles.search.bounds import best_bound, panel_bounds
    from onewave.tiles.sim.machine import Machine
    from onewave.tiles.sim.simulate import simulate

    machine = Machine(workers=workers)
    cut = None if tile is None else parse_tile(tile)
    if cache_panels is not None:
        _refuse_beside_panels(
            "--tile and --json beside --cache-panels",
            cache=cache, kv_heads=kv_heads, fused=fused or None, causal=causal or None,
            **_changed(
                workers=(workers, 132), dtype=(dtype, "bf16"), splits=(splits, 1), context=(context, 4096),
                batch=(batch, 1), weight_format=(weight_format, "16-bit"),
            ),
        )  # fmt: skip
        rows, cols = _panel_grid(program, sizes or [], cut or (128, 128, 64))
        found: tuple[Bound, ...] = panel_bounds(rows, cols, cache_panels)
        results = _panel_results(rows, cols, cache_panels)
    else:
        shape = ProgramOptions(cut, dtype, splits, fused, causal, kv_heads, workers)
        asked = Asked(program, sizes or [], shape, DecodeOptions(context, batch, weight_format))
        built = build(asked)
        graph = built.graph
        machine = Machine(workers=workers, levels=_levels(graph, built.levels, cache, None, []))
        found = _bounds_of(graph, asked, machine, at_once=workers)
        # Above this many accesses all orders together would take longer than a person waits.
        orders = list(GRID_ORDERS) if program == "gemm" and len(graph.accesses.tile) <= 300_000 else []
        results = {name: _moved(simulate(graph, name, machine)) for name in orders or ["sequential"]}
    best = best_bound(found)
    rows_of: list[dict[str, Any]] = [
        {"order": name, "moved": moved, "gap": best.gap(moved)}
        for name, moved in sorted(results.items(), key=lambda row: row[1])
    ]
    facts: dict[str, Any] = {
        "program": " ".join((program, *(sizes or ()))),
        "unit": best.unit,
        "best": best.name,
        "bounds": [tables.bound_row(bound, None) for bound in found],
        "orders": rows_of,
    }
    if as_json:
        print(json.dumps(facts))
        return
    table = tables.table(f"lower bounds: {facts['program']}", "bound", best.unit, "applies", "source")
    for bound in found:
        table.add_row(bound.name, tables.amount(bound.value, best.unit), "yes" if bound.applies else "no", bound.source)
    tables.show(table)
    table = tables.table(f"orders, gap to {best.name}", "order", best.unit, "gap")
    for row in rows_of:
        table.add_row(row["order"], tables.amount(row["moved"], best.unit), tables.percent(row["gap"]))
    tables.show(table)


def staircase_command(
    n: Annotated[int, typer.Argument(metavar="N", help="Columns of C.")],
    k: Annotated[int, typer.Argument(metavar="K", help="Depth of the product.")],
    rows: Annotated[str, typer.Option("--rows", help="M from:to:step, all included.")] = "128:4096:128",
    tile: given.Tile = None,
    order: given.Order = None,
    cache: given.Cache = None,
    workers: given.Workers = 132,
    dtype: given.Dtype = "bf16",
    as_json: options.Json = False,
) -> None:
    """A product's time over M: the steps that waves make.

    C[M,N] = A[M,K] B[K,N] for each M. Time stays flat while the last wave of tiles fills up, and steps where a new one
    begins: the tail effect.
    """
    from dataclasses import asdict

    from onewave.tiles.graph.programs import parse_bytes, parse_tile
    from onewave.tiles.sim.machine import CacheLevel, Machine
    from onewave.tiles.sim.simulate import latency_staircase

    parts = rows.split(":")
    if len(parts) != 3 or not all(re.fullmatch(r"[0-9]{1,9}", part) and int(part) for part in parts):
        raise InvalidArgumentError("--rows", got=repr(rows[:40]), allowed="from:to:step, as 128:4096:128")
    first, last, step = (int(part) for part in parts)
    sizes = range(first, last + 1, step)
    if not 0 < len(sizes) <= 1000:
        raise InvalidArgumentError("--rows", got=f"{len(sizes):,} sizes", allowed="1 to 1,000")
    machine = Machine(workers, levels=(CacheLevel("L2", parse_bytes(cache or "50MB")),))
    cut = (128, 128, 64) if tile is None else parse_tile(tile)
    stairs = latency_staircase(n, k, sizes, cut, machine=machine, order=order or "row", dtype=dtype)
    if as_json:
        print(json.dumps({"n": n, "k": k, "stairs": [asdict(stair) for stair in stairs]}))
        return
    table = tables.table(
        f"C[M,{n}] = A[M,{k}] B[{k},{n}] on {workers} workers", "M", "tiles", "waves", "us", "lanes used"
    )
    for stair in stairs:
        counts = (f"{stair.m:,}", f"{stair.tiles:,}", f"{stair.waves:,}")
        table.add_row(*counts, f"{stair.time / 1000:,.2f}", tables.percent(stair.used))
    tables.show(table)


def compare_command(
    a: Annotated[Path, typer.Argument(metavar="A", help="A Trace as JSON.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another, of the same program.")],
    as_json: options.Json = False,
) -> None:
    """Set two traces side by side, phase by phase.

    Either may be simulated (simulate --trace FILE) or measured on a GPU.
    """
    from onewave.tiles.sim.trace import compare

    rows = compare(tables.read_trace(a), tables.read_trace(b))
    if as_json:
        print(json.dumps({"a": str(a), "b": str(b), "phases": rows}))
        return
    table = tables.table(
        "a against b", "phase", "a tasks", "b tasks", "a busy", "b busy", "b / a", "a waited", "b waited"
    )
    for row in rows:
        ratio = "-" if row["busy_ratio"] is None else f"{row['busy_ratio']:.3f}"
        times = [f"{row[name]:,.0f}" for name in ("a_busy", "b_busy", "a_waited", "b_waited")]
        table.add_row(row["phase"], str(row["a_tasks"]), str(row["b_tasks"]), *times[:2], ratio, *times[2:])
    tables.show(table)


def _simulate_panels(
    program: str, sizes: list[str], tile: tuple[int, int, int], order: str, capacity: int, policy: str, as_json: bool
) -> None:
    """Whole panels instead of bytes: the tile game's count."""
    from onewave.tiles.order.orders import grid_order
    from onewave.tiles.search.bounds import best_bound, panel_bounds
    from onewave.tiles.search.panels import panel_loads, strip_snake_loads

    rows, cols = _panel_grid(program, sizes, tile)
    policy = {"opt": "belady"}.get(policy.lower(), policy.lower())
    loads = panel_loads(rows, cols, grid_order(order, rows, cols).to_list(), capacity, policy)
    bound = best_bound(panel_bounds(rows, cols, capacity))
    facts: dict[str, Any] = {
        "program": " ".join((program, *sizes)),
        "order": order,
        "policy": policy,
        "rows": rows,
        "cols": cols,
        "cache_panels": capacity,
        "loads": loads,
        "bound": int(bound.value),
        "bound_name": bound.name,
        "gap": bound.gap(loads),
        "strip_snake": strip_snake_loads(rows, cols, capacity),
    }
    if as_json:
        print(json.dumps(facts))
        return
    table = tables.table(f"{facts['program']}: {rows} x {cols} tiles, room for {capacity} panels", "", "")
    for name in ("order", "policy", "loads", "bound", "bound_name", "gap", "strip_snake"):
        table.add_row(name.replace("_", " "), tables.percent(facts[name]) if name == "gap" else str(facts[name]))
    tables.show(table)


def _changed(**options: tuple[object, object]) -> dict[str, object]:
    """The options that are not as they are by default: None where one is. Each: what it is, and its default."""
    return {name: None if value == default else value for name, (value, default) in options.items()}


def _refuse_beside_panels(allowed: str, **options: object) -> None:
    """Whole panels are counted without time, caches or workers."""
    for name, value in options.items():
        if value is not None:
            raise InvalidArgumentError(f"--{name.replace('_', '-')}", got=shown(str(value)), allowed=allowed)


def _panel_grid(program: str, sizes: list[str], tile: tuple[int, int, int]) -> tuple[int, int]:
    from onewave.tiles.graph.builders import cuts
    from onewave.tiles.graph.programs import read_sizes
    from onewave.tiles.search.panels import MAX_PANEL_TILES

    if program != "gemm":
        raise InvalidArgumentError("--cache-panels", got=f"with {program}", allowed="gemm", next="Use --cache.")
    m, n, _ = read_sizes("gemm", sizes)
    rows, cols = cuts(m, tile[0]), cuts(n, tile[1])
    if rows * cols > MAX_PANEL_TILES:
        raise InvalidArgumentError("tiles", got=f"{rows * cols:,}", allowed=f"up to {MAX_PANEL_TILES:,}")
    return rows, cols


def _panel_results(rows: int, cols: int, capacity: int) -> dict[str, int]:
    from onewave.tiles.order.orders import GRID_ORDERS, grid_order
    from onewave.tiles.search.panels import panel_loads

    return {
        f"{name} ({policy})": panel_loads(rows, cols, grid_order(name, rows, cols).tiles.tolist(), capacity, policy)
        for name in (GRID_ORDERS if rows * cols <= 20_000 else ("row", "snake", "grouped"))
        for policy in ("lru", "belady")
    }


def _levels(
    graph: TileGraph, named: tuple[CacheLevel, ...], cache: str | None, policy: str | None, inner: list[str]
) -> tuple[CacheLevel, ...]:
    """The caches asked for, or those that the program names. policy: None for lru."""
    from onewave.tiles.graph.programs import parse_bytes
    from onewave.tiles.sim.machine import CacheLevel

    if named and cache is None and not inner:
        if policy is not None:
            allowed = "beside --cache or --level"
            raise InvalidArgumentError("--policy", got=f"{shown(policy)} for a file that has levels", allowed=allowed)
        return named
    policy = (policy or "lru").lower()
    policy = {"opt": "belady"}.get(policy, policy)
    if policy not in ("lru", "fifo", "belady"):
        raise InvalidArgumentError("policy", got=repr(policy[:40]), allowed="lru, fifo, belady")
    found: list[CacheLevel] = []
    for text in inner:
        name, _, rest = text.partition("=")
        size, *words = rest.split(":")
        private = "private" in words
        words = [word for word in words if word != "private"]
        if not name or not rest or len(words) > 1:
            raise InvalidArgumentError("--level", got=repr(text[:40]), allowed="NAME=SIZE[:POLICY][:private]")
        if words == ["scratchpad"]:
            allowed = "lru, fifo, belady: nothing says which tensors a scratchpad keeps"
            raise InvalidArgumentError("--level", got=repr(text[:40]), allowed=allowed)
        found.append(CacheLevel(name, parse_bytes(size), policy=words[0] if words else "lru", private=private))
    cache = "50MB" if cache is None else cache
    if cache.endswith("tiles"):
        numbers = graph.accesses.tile
        largest = int(graph.bytes_of_numbers(numbers).max()) if len(numbers) else 1
        count = cache.removesuffix("tiles").strip()
        if not re.fullmatch(r"[0-9]{1,9}", count) or not int(count):
            raise InvalidArgumentError("--cache", got=repr(cache[:40]), allowed="1 or more tiles, as 64tiles")
        capacity = int(count) * largest
    else:
        capacity = parse_bytes(cache)
    return (*found, CacheLevel("L2", capacity, policy=policy))


def _bounds_of(graph: TileGraph, asked: Asked, machine: Machine, *, at_once: int) -> tuple[Bound, ...]:
    """The program's bounds on this machine. at_once: lanes that compute a tile of C at the same time."""
    from onewave.tiles.graph.builders import DTYPES
    from onewave.tiles.graph.programs import read_sizes
    from onewave.tiles.search.bounds import gemm_bounds, graph_bound

    if asked.program != "gemm":
        return (graph_bound(graph),)
    shape = asked.options
    m, n, k = read_sizes("gemm", asked.sizes)
    # Every lane keeps its private caches, though in serial mode one lane computes at a time.
    capacity = sum(level.capacity * (machine.lanes if level.private else 1) for level in machine.levels)
    # Accumulators stay in registers, outside every cache: they are fast memory all the same.
    held = at_once * min(shape.gemm_tile[0], m) * min(shape.gemm_tile[1], n)
    return gemm_bounds(m, n, k, capacity, itemsize=DTYPES[shape.dtype], accumulators=held, workers=at_once)


def _moved(trace: Trace) -> int:
    assert trace.report is not None
    return trace.report.memory_loaded + trace.report.memory_stored


def _facts(title: str, trace: Trace, found: tuple[Bound, ...], order: str) -> dict[str, Any]:
    from onewave.tiles.search.bounds import best_bound

    report = trace.report
    assert report is not None
    moved, best = _moved(trace), best_bound(found)
    return {
        "program": title,
        "order": order,
        "mode": report.mode,
        "tasks": len(trace),
        "workers": trace.workers,
        "waves": report.waves,
        **tables.timing(trace),
        "loads_bytes": report.memory_loaded,
        "stores_bytes": report.memory_stored,
        "moved_bytes": moved,
        "bound": best.name,
        "bound_bytes": best.value,
        "gap": best.gap(moved),
        "bounds": [tables.bound_row(bound, moved) for bound in found],
        "levels": report.to_dict()["levels"],
        "energy_mj": report.energy_mj,
        "flops": report.flops,
    }
