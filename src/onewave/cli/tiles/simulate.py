"""`onewave tiles simulate`, `bounds` and `staircase`."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from onewave.base.errors import InvalidArgumentError, shown
from onewave.cli import options
from onewave.cli.output import amount, answer, percent, table, write_file
from onewave.cli.tiles import options as given
from onewave.cli.tiles import tables
from onewave.cli.tiles.programs import Built, Program, by_stage
from onewave.models.wave_prediction import kept_costs, predict_plan
from onewave.tiles.graph.builders import DTYPES, cuts
from onewave.tiles.graph.programs import parse_bytes, parse_tile, read_sizes
from onewave.tiles.order.orders import GRID_ORDERS, grid_order
from onewave.tiles.search.bounds import (
    Bound,
    ChainShape,
    best_bound,
    chain_bounds,
    gemm_bounds,
    graph_bound,
    panel_bounds,
)
from onewave.tiles.search.panels import MAX_PANEL_TILES, panel_loads, strip_snake_loads
from onewave.tiles.sim.machine import CacheLevel, Machine
from onewave.tiles.sim.simulate import latency_staircase, simulate
from onewave.tiles.sim.trace import Trace


def simulate_command(
    call: typer.Context,
    program: Program,
    order: given.Order = None,
    cache: given.Cache = None,
    cache_panels: given.CachePanels = None,
    policy: Annotated[str | None, typer.Option("--policy", help="lru (the default), fifo or belady (or opt).")] = None,
    level: Annotated[
        list[str] | None,
        typer.Option(
            "--level", help="NAME=SIZE[:POLICY][:private]; from the workers outwards, inside --cache. Repeatable."
        ),
    ] = None,
    workers: given.Workers = 132,
    co_resident: Annotated[int, typer.Option("--co-resident", help="Thread blocks that share an SM.")] = 1,
    queues: given.Queues = None,
    mode: Annotated[
        str, typer.Option("--mode", help="wave: tasks of a wave advance together; serial: one by one.")
    ] = "wave",
    skew: Annotated[
        float, typer.Option("--skew", help="Accesses by which each lane of a wave lags behind the last.")
    ] = 0.0,
    sync: Annotated[
        str | None,
        typer.Option(
            "--sync",
            help="Wait by none (a whole stage), row, tile, strided, conv2d-tile, consecutive. Default: exactly.",
        ),
    ] = None,
    as_json: options.Json = False,
    trace: Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="Write the Trace as JSON.")] = None,
    perfetto: Annotated[
        Path | None, typer.Option("--perfetto", metavar="FILE", help="Write the timeline for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Simulate a program: traffic, time, idle, energy, gap to bounds.

    Times are those of a model of an H200: 132 SMs that share 989 TFLOP/s and 4,650 GB/s of memory, 50 MB of L2 at 5,500
    GB/s, and 0.5 us on top of each task's work. --workers deals the same totals out to fewer or more. decode is the
    plan that the engine launches, on the queues that it deals out, unless --order or --queues ask for others; "a step"
    is what `bench predict` says of it.

    Examples: simulate gemm 4096 4096 4096 --tile 128x128x64 --order grouped:8 --cache 50MB --workers 132;
    simulate decode llama-3.1-8b; simulate chain 1024 4096 4096 4096 --order row-by-row.
    """
    if cache_panels is not None:
        _refuse_beside_panels(call, ("order", "policy"))
        _simulate_panels(program, order or "row", cache_panels, given.policy_of(policy or "lru"), as_json)
        return
    lanes = Machine(workers, co_resident).lanes
    built = program.build(lanes, order)
    machine = Machine(
        workers=workers,
        co_resident=co_resident,
        queues=queues or "ticket",
        levels=_levels(built, cache, policy, level or []),
        skew=skew,
        ahead_bytes=built.ahead_bytes,
    )
    prescribed = built.chosen_queues(order, queues)
    order = order or program.default_order
    planned = built.proved if prescribed is not None else None
    followed = order if prescribed is None else "sequential" if planned is None else planned.order
    made = simulate(built.graph, followed, machine, mode=mode, queues=prescribed, sync=sync)
    if trace is not None:
        write_file("--trace", trace, made.to_json())
    if perfetto is not None:
        write_file("--perfetto", perfetto, json.dumps(made.to_perfetto()))
    report, bounds = made.report, _bounds_of(program, built, machine, at_once=lanes if mode == "wave" else 1)
    assert report is not None
    best, moved = best_bound(bounds), _moved(made)
    facts: dict[str, Any] = {
        "program": program.title,
        "order": order,
        "mode": report.mode,
        "tasks": len(made),
        "workers": made.workers,
        "waves": report.waves,
        **tables.timing(made if built.step is None else by_stage(made)),
        "loads_bytes": report.memory_loaded,
        "stores_bytes": report.memory_stored,
        "moved_bytes": moved,
        "bound": best.name,
        "bound_bytes": best.value,
        "gap": best.gap(moved),
        "bounds": [asdict(bound) | {"gap": bound.gap(moved) if bound.applies else None} for bound in bounds],
        "levels": report.to_dict()["levels"],
        "energy_mj": report.energy_mj,
        "flops": report.flops,
        "sync": sync,
        # On an H200, by costs fitted to a measured launch, as `bench predict` says it.
        "predicted_ms": None
        if built.step is None or prescribed is None
        else predict_plan(built.step, kept_costs()).makespan * 1e-6,
    }
    answer(as_json, facts, *tables.simulation_tables(facts))


def bounds_command(
    call: typer.Context,
    program: Program,
    cache: given.Cache = None,
    cache_panels: given.CachePanels = None,
    workers: given.Workers = 132,
    as_json: options.Json = False,
) -> None:
    """Lower bounds on traffic, and every order's gap to them.

    The orders are those of a gemm's grid; other programs show their sequential order. Of two chained products and of
    attention, bounds of the red-blue pebble game stand beside the compulsory one.
    """
    if cache_panels is not None:
        _refuse_beside_panels(call)
        rows, cols = _panel_grid(program)
        found: tuple[Bound, ...] = panel_bounds(rows, cols, cache_panels)
        results = _panel_results(rows, cols, cache_panels)
    else:
        Machine(workers)
        built = program.build(workers)
        machine = Machine(workers, levels=_levels(built, cache, None, []))
        found = _bounds_of(program, built, machine, at_once=workers)
        # Above this many accesses all orders together would take longer than a person waits.
        every = program.program == "gemm" and len(built.graph.accesses.tile) <= 300_000
        orders = list(GRID_ORDERS) if every else ["sequential"]
        results = {name: _moved(simulate(built.graph, name, machine)) for name in orders}
    best = best_bound(found)
    moved = sorted(results.items(), key=lambda row: row[1])
    facts = {
        "program": program.title,
        "unit": best.unit,
        "best": best.name,
        "bounds": [asdict(bound) for bound in found],
        "orders": [{"order": name, "moved": value, "gap": best.gap(value)} for name, value in moved],
    }
    bounds = table(f"lower bounds: {program.title}", "bound", "source", best.unit, "applies", left=2)
    for bound in found:
        bounds.add_row(bound.name, bound.source, amount(bound.value, best.unit), "yes" if bound.applies else "no")
    gaps = table(f"orders, gap to {best.name}", "order", best.unit, "gap")
    for name, value in moved:
        gaps.add_row(name, amount(value, best.unit), percent(best.gap(value)))
    answer(as_json, facts, bounds, gaps)


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
    title = f"C[M,{n}] = A[M,{k}] B[{k},{n}] on {workers} workers"
    rows_of = table(title, "M", "tiles", "waves", "us", "lanes used")
    for stair in stairs:
        counts = (f"{stair.m:,}", f"{stair.tiles:,}", f"{stair.waves:,}")
        rows_of.add_row(*counts, f"{stair.time / 1000:,.2f}", percent(stair.used))
    answer(as_json, {"n": n, "k": k, "stairs": [asdict(stair) for stair in stairs]}, rows_of)


def _refuse_beside_panels(call: typer.Context, more: tuple[str, ...] = ()) -> None:
    """Whole panels are counted without time, caches or workers. Raises InvalidArgumentError for their options."""
    counted = ("program", "sizes", "tile", "cache_panels", "as_json", *more)
    others = options.chosen(call, {str(parameter.name) for parameter in call.command.params} - {*counted})
    for name, value in others.items():
        named = ", ".join(f"--{option}" for option in ("tile", *more))
        raise InvalidArgumentError(name, got=shown(str(value)), allowed=f"{named} and --json beside --cache-panels")


def _simulate_panels(program: Program, order: str, capacity: int, policy: str, as_json: bool) -> None:
    """Whole panels instead of bytes: the tile game's count."""
    rows, cols = _panel_grid(program)
    loads = panel_loads(rows, cols, grid_order(order, rows, cols).to_list(), capacity, policy)
    bound = best_bound(panel_bounds(rows, cols, capacity))
    facts = {"order": order, "policy": policy, "loads": loads, "bound": int(bound.value), "bound_name": bound.name}
    facts |= {"gap": bound.gap(loads), "strip_snake": strip_snake_loads(rows, cols, capacity)}
    head = table(f"{program.title}: {rows} x {cols} tiles, room for {capacity} panels", "", "")
    for name, value in facts.items():
        head.add_row(name.replace("_", " "), percent(value) if name == "gap" else str(value))
    size = {"program": program.title, "rows": rows, "cols": cols, "cache_panels": capacity}
    answer(as_json, size | facts, head)


def _panel_grid(program: Program) -> tuple[int, int]:
    if program.program != "gemm":
        raise InvalidArgumentError("--cache-panels", got=f"with {program.program}", allowed="gemm", next="Use --cache.")
    m, n, _ = read_sizes("gemm", program.sizes or [])
    tile = program.shape().gemm_tile
    rows, cols = cuts(m, tile[0]), cuts(n, tile[1])
    if rows * cols > MAX_PANEL_TILES:
        raise InvalidArgumentError("tiles", got=f"{rows * cols:,}", allowed=f"up to {MAX_PANEL_TILES:,}")
    return rows, cols


def _panel_results(rows: int, cols: int, capacity: int) -> dict[str, int]:
    return {
        f"{name} ({policy})": panel_loads(rows, cols, grid_order(name, rows, cols).tiles.tolist(), capacity, policy)
        for name in (GRID_ORDERS if rows * cols <= 20_000 else ("row", "snake", "grouped"))
        for policy in ("lru", "belady")
    }


def _levels(built: Built, cache: str | None, policy: str | None, inner: list[str]) -> tuple[CacheLevel, ...]:
    """The caches asked for, or those that the program names. policy: None for lru."""
    if built.levels and cache is None and not inner:
        if policy is not None:
            allowed = "beside --cache or --level"
            raise InvalidArgumentError("--policy", got=f"{shown(policy)} for a file that has levels", allowed=allowed)
        return built.levels
    cache = cache or "50MB"
    if cache.endswith("tiles"):
        count = cache.removesuffix("tiles").strip()
        if not re.fullmatch(r"[0-9]{1,9}", count) or not int(count):
            raise InvalidArgumentError("--cache", got=repr(cache[:40]), allowed="1 or more tiles, as 64tiles")
        sizes = built.graph.bytes_of_numbers(built.graph.accesses.tile)
        capacity = int(count) * int(sizes.max(initial=1))
    else:
        capacity = parse_bytes(cache)
    return (*given.levels_of(inner), CacheLevel("L2", capacity, policy=given.policy_of(policy or "lru")))


def _bounds_of(program: Program, built: Built, machine: Machine, *, at_once: int) -> tuple[Bound, ...]:
    """The program's bounds above 0 on this machine. at_once: lanes that compute a tile at the same time."""
    if program.program not in ("gemm", "chain", "attention"):
        return (graph_bound(built.graph),)
    sizes, shape = read_sizes(program.program, program.sizes or []), program.shape()
    # Every lane keeps its private caches, though in serial mode one lane computes at a time.
    capacity = sum(level.capacity * (machine.lanes if level.private else 1) for level in machine.levels)
    # Registers of a lane lie outside every cache but are fast memory all the same. They hold accumulators; for
    # attention, all that it works on.
    if program.program == "attention":
        seq_q, seq_k, heads, head_dim = sizes
        rows, keys = (shape.tile or (128, 128))[:2]
        scores = min(rows, seq_q) * (min(keys, seq_k) if shape.fused else seq_k)
        held = scores + 2 * head_dim * (min(rows, seq_q) + min(keys, seq_k))
        chain = ChainShape.of_attention(seq_q, seq_k, heads, head_dim, causal=shape.causal)
    else:
        tile = shape.gemm_tile
        widest = sizes[1] if program.program == "gemm" else max(sizes[2:])
        held = min(tile[0], sizes[0]) * min(tile[1], widest)
        m, k, n0, n1 = (*sizes, 0)[:4]
        chain = None if program.program == "gemm" else ChainShape(m * n0, k, n1)
    itemsize, held = DTYPES[program.dtype], at_once * held
    found: tuple[Bound, ...]
    if chain is None:
        m, n, k = sizes
        found = gemm_bounds(m, n, k, capacity, itemsize=itemsize, accumulators=held, workers=at_once)
    else:
        more = chain_bounds(chain, capacity, itemsize=itemsize, accumulators=held, workers=at_once)
        found = (graph_bound(built.graph), *more)
    return tuple(bound for bound in found if bound.value > 0)


def _moved(trace: Trace) -> int:
    assert trace.report is not None
    return trace.report.memory_loaded + trace.report.memory_stored
