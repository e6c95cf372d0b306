"""Simulated launches for the page: small chains with every task's producers, larger traces, traffic, the staircase.

A decode step is the one that the engine plans and launches (models/llama_plan), which needs neither torch nor a GPU.
"""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any, cast

from onewave.base.errors import InvalidArgumentError
from onewave.lab.fields import choice, whole, wholes
from onewave.models.config.read import builtin_config, builtin_models
from onewave.models.llama_plan import MAX_BATCH, DealtStep, DecodeStep, deal_decode, workers_for
from onewave.tiles.graph.builders import gemm_chain
from onewave.tiles.graph.builders_attention import attention_block
from onewave.tiles.graph.graph import TileGraph
from onewave.tiles.graph.programs import ProgramOptions, build_program
from onewave.tiles.order.chain import coordinates, successors
from onewave.tiles.order.orders import INTERLEAVINGS, ORDERS
from onewave.tiles.order.policies import POLICIES
from onewave.tiles.search.bounds import graph_bound
from onewave.tiles.sim.machine import CacheLevel, Machine
from onewave.tiles.sim.simulate import latency_staircase, simulate
from onewave.tiles.sim.trace import Trace

CHAIN_ORDERS = tuple(name for name in ORDERS if name not in ("explicit", "stream-k"))
"""Orders for whole graphs: explicit needs a path of its own, Stream-K cuts tasks anew."""

MAX_CHAIN_TASKS = 1500
MAX_MATRIX_TASKS = 300
MAX_TRACE_TASKS = 100_000
MAX_TRACE_ACCESSES = 6_000_000
TILE = 128


def choices() -> dict[str, Any]:
    """Return the page's choices: names, and the largest chain that all of them are tried on."""
    return {
        "orders": {name: ORDERS[name].summary for name in CHAIN_ORDERS},
        "interleavings": list(INTERLEAVINGS),
        "policies": list(POLICIES),
        "max_matrix_tasks": MAX_MATRIX_TASKS,
    }


def chain(given: Mapping[str, Any]) -> dict[str, Any]:
    """One chain on P workers: every task's place, producers and times.

    Fields: program ("gemms" or "attention"), rows, cols, inner (tiles), workers, cache (tiles), order, sync.
    Raises InvalidArgumentError.
    """
    graph = _chain_graph(given, MAX_CHAIN_TASKS)
    machine = _machine(given, graph)
    order = choice(given, "order", "sequential", CHAIN_ORDERS)
    sync = choice(given, "sync", "tile", POLICIES)
    trace = simulate(graph, order, machine, sync=sync)
    at = coordinates(graph)
    begin, after = successors(graph)
    producers: list[list[int]] = [[] for _ in graph.tasks]
    for task in range(len(graph.tasks)):
        later: list[int] = after[begin[task] : begin[task + 1]].tolist()
        for consumer in later:
            producers[consumer].append(task)
    places = zip(at.stage.tolist(), at.row.tolist(), at.column.tolist(), at.split.tolist(), strict=True)
    return {
        "trace": trace.to_dict(),
        "stages": list(at.stage_names),
        "places": [list(place) for place in places],
        "producers": producers,
        **_result(trace),
    }


def chain_matrix(given: Mapping[str, Any]) -> dict[str, Any]:
    """Time, idle share and bytes of a chain under every order and sync policy; null where a launch would hang.

    Fields as chain's. A hang is one of a ticket launch: the workers have all taken tasks that wait for later ones.
    """
    graph = _chain_graph(given, MAX_MATRIX_TASKS)
    machine = _machine(given, graph)
    cells: dict[str, list[dict[str, Any] | None]] = {}
    for order in CHAIN_ORDERS:
        cells[order] = []
        for sync in POLICIES:
            try:
                cells[order].append(_result(simulate(graph, order, machine, sync=sync)))
            except InvalidArgumentError as error:
                if error.what != "deadlock":
                    raise
                cells[order].append(None)
    return {"policies": list(POLICIES), "cells": cells, "tasks": len(graph.tasks)}


def _result(trace: Trace) -> dict[str, Any]:
    report = trace.report
    assert report is not None
    return {
        "makespan": trace.makespan,
        "idle_share": float(trace.idle.sum()) / max(trace.makespan * trace.workers, 1e-9),
        "moved": report.memory_loaded + report.memory_stored,
        "critical_path": report.critical_path,
    }


def _machine(given: Mapping[str, Any], graph: TileGraph) -> Machine:
    """A part of an H200: its share of bandwidth goes with the workers, its cache is counted in tiles."""
    workers = whole(given, "workers", 4, 132)
    capacity = whole(given, "cache", 24, 100_000, least=4) * _largest_tile(graph)
    share = workers / 132
    return Machine(
        workers=workers,
        levels=(CacheLevel("L2", capacity, bandwidth=5500.0 * share),),
        memory_bandwidth=4650.0 * share,
        flops_per_ns=989_000.0 * share,
        task_ns=200.0,
    )


def _largest_tile(graph: TileGraph) -> int:
    return max(int(graph.bytes_of_numbers(graph.accesses.tile).max()), 1)


def chain_sweep(given: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes moved by a chain under every order and interleaving, against the cache's size."""
    graph = _chain_graph(ChainMap(cast("dict[str, Any]", given), {"rows": 6, "cols": 6, "inner": 6}), MAX_MATRIX_TASKS)
    total = sum(tensor.nbytes for tensor in graph.tensors.values())
    largest = _largest_tile(graph)
    least, most = 12 * largest, max(int(total), 16 * largest)
    sizes = [round(least * (most / least) ** (i / 9)) for i in range(10)]
    series: dict[str, list[int]] = {name: [] for name in CHAIN_ORDERS}
    for size in sizes:
        machine = Machine(workers=4, levels=(CacheLevel("L2", size),))
        for name in CHAIN_ORDERS:
            series[name].append(_result(simulate(graph, name, machine, mode="serial"))["moved"])
    bound = round(graph_bound(graph).value)
    return {
        "unit": "bytes moved",
        "x": sizes,
        "x_unit": "bytes of cache",
        "series": series,
        "bound": [bound] * len(sizes),
    }


def staircase(given: Mapping[str, Any]) -> dict[str, Any]:
    """Time of C[M, n] for M up to max_m. Fields: n, k, max_m (elements), workers."""
    n, k = whole(given, "n", 4096, 16384), whole(given, "k", 4096, 65536)
    max_m, workers = whole(given, "max_m", 4096, 16384), whole(given, "workers", 132, 1024)
    step = max(TILE, max_m // 48 // TILE * TILE)
    sizes = list(range(step, max_m + 1, step)) or [max_m]
    stairs = latency_staircase(n, k, sizes, machine=Machine(workers=workers))
    return {
        "m": sizes,
        "us": [s.time / 1000 for s in stairs],
        "waves": [s.waves for s in stairs],
        "tiles": [s.tiles for s in stairs],
        "used": [s.used for s in stairs],
    }


SAMPLES = {
    "gemm": "2048,4096,4096",
    "chain": "1024,2048,2048,2048",
    "ffn": "1024,2048,5632",
    "attention": "1024,1024,8,128",
    "block": "1024,8,128,4096",
    "decode": "llama-3.2-1b,4096",
}
"""Programs of a sample trace, with sizes that make a picture."""


def sample_trace(given: Mapping[str, Any]) -> dict[str, Any]:
    """A simulated trace of a named program. Fields: program, sizes (with commas), workers, order, sync.

    sizes: numbers; of decode, a built-in model, then context and batch. Raises InvalidArgumentError.
    """
    program = choice(given, "program", "ffn", SAMPLES)
    workers = whole(given, "workers", 132, 1024)
    order = choice(given, "order", "sequential", CHAIN_ORDERS)
    sync = choice(given, "sync", "tile", POLICIES)
    if program == "decode":
        step = _decode_step(str(given.get("sizes", SAMPLES[program])), workers)
        machine = Machine(workers=workers, ahead_bytes=step.ahead_bytes)
        # In program order, the launch's own queues; in any other order a free worker takes the next task.
        queues = step.queues if order == "sequential" else None
        return simulate(step.graph, order, machine, queues=queues, sync=sync).to_dict()
    sizes = wholes(given, "sizes", SAMPLES[program], 65_536)
    tasks, wanted = _tasks_and_accesses(program, sizes)
    _check_tasks(tasks)
    if wanted > MAX_TRACE_ACCESSES:
        got = f"some {wanted:,} accesses to tiles"
        next = "Choose smaller sizes."
        raise InvalidArgumentError("trace", got=got, allowed=f"up to {MAX_TRACE_ACCESSES:,}", next=next)
    graph, _ = build_program(program, sizes, ProgramOptions(workers=workers))
    return simulate(graph, order, Machine(workers=workers), sync=sync).to_dict()


def _decode_step(text: str, workers: int) -> DealtStep:
    """Deal the decode step that the wave runs. text: "model[,context[,batch]]".

    The model is one of those that come with onewave: no file of the server is read for the page. workers: SMs.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 3:
        raise InvalidArgumentError("sizes", got=f"{len(parts)} parts", allowed="model, context, batch")
    model, context, batch = (*parts, *("4096", "1")[len(parts) - 1 :])
    config = builtin_config(choice({"model": model}, "model", "", builtin_models()))
    rows = whole({"batch": batch}, "batch", 1, MAX_BATCH)
    keys = whole({"context": context}, "context", 0, 1_000_000, least=0)
    blocks = workers_for(DecodeStep(config, rows), available=workers)

    def dealt(layers: int) -> DealtStep:
        return deal_decode(DecodeStep(config.of_layers(layers), rows), workers=blocks, context=keys)

    # Layers are alike: two tell how many tasks all of them have.
    one, two = (len(dealt(layers).graph.tasks) for layers in (1, 2))
    _check_tasks(one + (config.num_layers - 1) * (two - one))
    return dealt(config.num_layers)


def _check_tasks(tasks: int) -> None:
    if tasks > MAX_TRACE_TASKS:
        allowed, next = f"up to {MAX_TRACE_TASKS:,}", "Choose smaller sizes."
        raise InvalidArgumentError("trace", got=f"{tasks:,} tasks", allowed=allowed, next=next)


def _tasks_and_accesses(program: str, sizes: Sequence[int]) -> tuple[int, int]:
    """A program's tasks and, roughly, the tiles they touch, known before anything is built. K steps are 64 wide."""
    a, b, c, d = ([-(-size // TILE) for size in sizes] + [1] * 4)[:4]
    if program == "gemm":
        return a * b, a * b * c * 4
    if program == "chain":
        return a * (c + d), 4 * a * c * (b + d)
    if program == "ffn":
        return a * (3 * c + b), 12 * a * b * c
    if program == "attention":
        heads = sizes[2] if len(sizes) > 2 else 1
        return heads * a * (b + 2), 7 * heads * a * b
    heads = sizes[1] if len(sizes) > 1 else 1
    width = -(-heads * (sizes[2] if len(sizes) > 2 else 1) // TILE)
    # The projection walks K head by head, however narrow or wide a head is.
    accesses = heads * (2 * a + 2) + width * (2 * heads + 2) + d * (3 * width + 1) + width * (2 * d + 1)
    return a * (heads + d + 2 * width), a * accesses


def _chain_graph(given: Mapping[str, Any], max_tasks: int) -> TileGraph:
    program = choice(given, "program", "gemms", ("gemms", "attention"))
    rows, cols, inner = (whole(given, name, 4, 32) for name in ("rows", "cols", "inner"))
    if program == "gemms":
        # The second GEMM is cut along K, once per column of the first: without it no interleaving can start early.
        tasks, side = rows * inner * (1 + cols), TILE
    else:
        tasks, side = rows * (rows * cols + inner), TILE
    refused = InvalidArgumentError(
        "chain", got=f"{tasks:,} tasks or more", allowed=f"up to {max_tasks:,}", next="Choose fewer tiles."
    )
    if tasks > 2 * max_tasks:
        raise refused
    if program == "gemms":
        graph = gemm_chain(rows * side, 4 * side, inner * side, cols * side, (side, side, side), splits=inner)
    else:
        graph = attention_block(rows * side, cols, side, inner * side, (side, side, side))
    if len(graph.tasks) > max_tasks:
        raise refused
    return graph
