"""How often data is used again, when, and what bandwidth the rest asks for; and how much must be alive at once.

MAESTRO's questions (Kwon et al. 2019, MICRO, doi 10.1145/3352460.3358252) of our graph: of the bytes that tasks ask
for, a part is shared by tasks that run at the same time (spatial reuse, a multicast), a part was asked for in the wave
before (temporal reuse), a part comes again later, and each distinct byte comes a first time.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onewave.base.errors import InvalidArgumentError
from onewave.tiles.graph.graph import TileGraph
from onewave.tiles.order.orders import task_order
from onewave.tiles.sim.machine import Machine
from onewave.tiles.sim.traffic import wave_of

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TensorReuse:
    """Bytes of one tensor that tasks read or write, a task once: requested = spatial + temporal + later + distinct.

    spatial: asked for by another task of the same wave too. temporal: also used in the wave before. later: used in some
    earlier wave. distinct: used for the first time.
    """

    tensor: str
    requested: int
    distinct: int
    spatial: int
    temporal: int
    later: int

    @property
    def times(self) -> float:
        """How often each byte is used."""
        return self.requested / self.distinct


@dataclass(frozen=True)
class ReuseReport:
    """waves: of the order. peak_bandwidth, mean_bandwidth: bytes/ns that must arrive for the arithmetic never to wait,
    if nothing is kept from longer ago than the wave before: in the hungriest wave, and on average. live_peak: the most
    bytes of intermediates (written, and read later) alive at once, the tasks taken one by one.
    """

    order: str
    waves: int
    tensors: tuple[TensorReuse, ...]
    peak_bandwidth: float
    mean_bandwidth: float
    live_peak: int


def reuse_report(graph: TileGraph, order: str, machine: Machine | None = None) -> ReuseReport:
    """Report reuse of a graph in an order (a name in ORDERS). Raises InvalidArgumentError."""
    if not len(graph.accesses.tile):
        raise InvalidArgumentError("graph", got="no task reads or writes a tile", allowed="1 or more that do")
    machine = Machine() if machine is None else machine
    ids = task_order(graph, order, workers=machine.lanes)
    wave = np.empty(len(ids), dtype=np.int64)
    wave[ids] = wave_of(graph, ids, machine.lanes)
    waves = int(wave.max()) + 1
    # A task that reads a tile and writes it, a running sum, asks for it once.
    asked = np.unique(graph.access_tasks.astype(np.int64) * graph.num_tiles + graph.accesses.tile)
    task, tile = asked // graph.num_tiles, asked % graph.num_tiles
    size, at = graph.bytes_of_numbers(tile), wave[task]
    # One row per (tile, wave) that occurs; rows of a tile follow each other, wave after wave.
    rows = np.unique(tile * waves + at)
    row_tile, row_wave = rows // waves, rows % waves
    row_size = graph.bytes_of_numbers(row_tile)
    first = np.concatenate(([True], row_tile[1:] != row_tile[:-1]))
    next_wave = np.concatenate(([False], (row_wave[1:] == row_wave[:-1] + 1) & ~first[1:]))
    owner, row_owner = graph.tensor_of(tile), graph.tensor_of(row_tile)
    tensors: list[TensorReuse] = []
    for place, name in enumerate(graph.tensors):
        mine, here = owner == place, row_owner == place
        if not mine.any():
            continue
        requested, rounds = int(size[mine].sum()), int(row_size[here].sum())
        distinct, temporal = int(row_size[here & first].sum()), int(row_size[here & next_wave].sum())
        later = rounds - distinct - temporal
        tensors.append(TensorReuse(name, requested, distinct, requested - rounds, temporal, later))
    arriving = np.bincount(row_wave[~next_wave], weights=row_size[~next_wave], minlength=waves)
    flops = np.bincount(wave, weights=[float(task.flops) for task in graph.tasks], minlength=waves)
    # A lane computes at its share of the machine; a wave lasts as long as its longest task.
    longest = np.zeros(waves)
    np.maximum.at(longest, wave, np.array([float(task.flops) for task in graph.tasks]))
    times = np.maximum(longest * machine.lanes, flops) / machine.flops_per_ns
    busy = times > 0
    peak = float((arriving[busy] / times[busy]).max()) if busy.any() else 0.0
    mean = float(arriving.sum() / times.sum()) if busy.any() else 0.0
    return ReuseReport(order, waves, tuple(tensors), peak, mean, live_peak(graph, ids))


def live_peak(graph: TileGraph, order: Ints) -> int:
    """The most bytes of intermediates alive at once: from a tile's first write to its last read after that.

    order: all task ids. The tasks run one by one; a tile that is not read after its last write is a result, not an
    intermediate.
    """
    step = np.empty(len(order), dtype=np.int64)
    step[order] = np.arange(len(order))
    tile, is_write = graph.accesses.tile, graph.accesses.is_write
    when = step[graph.access_tasks]
    first = np.full(graph.num_tiles, len(order), dtype=np.int64)
    last_write = np.full(graph.num_tiles, -1, dtype=np.int64)
    last_read = np.full(graph.num_tiles, -1, dtype=np.int64)
    np.minimum.at(first, tile[is_write], when[is_write])
    np.maximum.at(last_write, tile[is_write], when[is_write])
    np.maximum.at(last_read, tile[~is_write], when[~is_write])
    chosen = np.flatnonzero((last_write >= 0) & (last_read > last_write))
    sizes = graph.bytes_of_numbers(chosen.astype(np.int64))
    change = np.zeros(len(order) + 1, dtype=np.int64)
    np.add.at(change, first[chosen], sizes)
    np.add.at(change, last_read[chosen] + 1, -sizes)
    return int(np.cumsum(change).max())
