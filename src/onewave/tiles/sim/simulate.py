"""simulate: a graph, an order and a machine to a Trace with its traffic; and the latency staircase over M."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onewave.base.errors import InvalidArgumentError, shown
from onewave.tiles.graph.builders import gemm
from onewave.tiles.graph.graph import TileGraph
from onewave.tiles.order.orders import task_order
from onewave.tiles.sim.energy import energy_mj
from onewave.tiles.sim.machine import Machine
from onewave.tiles.sim.report import Report
from onewave.tiles.sim.time import longest_chain, run_lanes
from onewave.tiles.sim.trace import Trace
from onewave.tiles.sim.traffic import compulsory, run_levels

Ints = npt.NDArray[np.int64]


def simulate(
    graph: TileGraph,
    order: str | Sequence[int] | Ints = "sequential",
    machine: Machine | None = None,
    *,
    mode: str = "wave",
    queues: Sequence[Sequence[int]] | None = None,
    sync: str | None = None,
) -> Trace:
    """Run a graph in an order on a machine; returns its Trace in ns, with trace.report for bytes, hits, waves, energy.

    order: a name in ORDERS with its parameter, or all task ids. mode: how accesses
    reach shared caches: "serial" (task after task) or "wave" (a wave's tasks advance together). queues: each lane's
    tasks, for a static launch other than dealing the order out in turn. sync: a name in POLICIES, by which tasks wait
    for counters that several tiles share ("none": a whole stage); None to wait for exactly what they read, at no cost.
    First the caches are played, then time: a task's traffic is what its own accesses caused.
    Raises InvalidArgumentError.
    """
    machine = Machine() if machine is None else machine
    name, ids = _resolve(graph, order, machine)
    traffic, waves = run_levels(graph, ids, machine, mode)
    timeline = run_lanes(graph, ids, traffic.requested, traffic.from_memory, machine, queues, sync)
    loaded, stored = compulsory(graph)
    flops = sum(task.flops for task in graph.tasks)
    moved = {level.level: level.requested_bytes for level in traffic.levels}
    report = Report(
        order=name,
        mode=mode,
        levels=traffic.levels,
        memory_loaded=traffic.loaded,
        memory_stored=traffic.stored,
        compulsory_loaded=loaded,
        compulsory_stored=stored,
        flops=flops,
        waves=waves,
        critical_path=longest_chain(graph, timeline.end - timeline.start),
        energy_mj=energy_mj(moved | {"memory": traffic.loaded + traffic.stored}, flops),
    )
    return Trace(
        source="simulated",
        unit="ns",
        workers=machine.lanes,
        task=np.arange(len(graph.tasks), dtype=np.int64),
        worker=timeline.lane,
        wait_start=timeline.taken,
        start=timeline.start,
        end=timeline.end,
        name=tuple(task.name for task in graph.tasks),
        phase=tuple(task.phase for task in graph.tasks),
        report=report,
    )


def _resolve(graph: TileGraph, order: str | Sequence[int] | Ints, machine: Machine) -> tuple[str, Ints]:
    if isinstance(order, str):
        return order, task_order(graph, order, workers=machine.lanes)
    try:
        ids = np.asarray(order, dtype=np.int64)
    except (TypeError, ValueError):
        allowed = "a name or task ids"
        raise InvalidArgumentError("order", got=shown(order), allowed=allowed) from None
    if ids.ndim != 1 or not np.array_equal(np.sort(ids), np.arange(len(graph.tasks))):
        raise InvalidArgumentError(
            "order", got=f"{ids.size} ids", allowed=f"each of the {len(graph.tasks)} tasks exactly once"
        )
    return "explicit", ids


@dataclass(frozen=True)
class Stair:
    """One M of a staircase. tiles: of C. waves: tiles / lanes, rounded up. time: ns. used: tiles / (waves x lanes)."""

    m: int
    tiles: int
    waves: int
    time: float
    used: float


def latency_staircase(
    n: int,
    k: int,
    sizes: Sequence[int],
    tile: tuple[int, int, int] = (128, 128, 64),
    *,
    machine: Machine | None = None,
    order: str = "row",
    dtype: str = "bf16",
) -> tuple[Stair, ...]:
    """The time of C[m, n] = A[m, k] B[k, n] for each m of `sizes`: flat while a wave fills, then a step (tail effect).

    Simulated with whole panels along K (tile[2] is not used), so a stair takes milliseconds.
    Raises InvalidArgumentError.
    """
    machine = Machine() if machine is None else machine
    if not 1 <= k < 2**31:
        raise InvalidArgumentError("K", got=str(k), allowed="1 to 2^31 - 1")
    stairs: list[Stair] = []
    for m in sizes:
        graph = gemm(m, n, k, (tile[0], tile[1], k), dtype)
        tiles = len(graph.tasks)
        waves = -(-tiles // machine.lanes)
        trace = simulate(graph, order, machine)
        stairs.append(Stair(m, tiles, waves, trace.makespan, tiles / (waves * machine.lanes)))
    return tuple(stairs)
