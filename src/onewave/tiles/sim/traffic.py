"""The traffic half of a simulation: in what order accesses reach the caches, and what each level passes on."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from onewave.base.errors import InvalidArgumentError, shown
from onewave.tiles.graph.graph import TileGraph, entries_of
from onewave.tiles.sim.caches import CacheResult, Stream, replay
from onewave.tiles.sim.machine import CacheLevel, Machine
from onewave.tiles.sim.report import LevelTraffic, TensorTraffic

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Traffic:
    """The traffic of the caches. requested: bytes per level and task id, outermost caches last, int64 [levels, tasks].

    from_memory: bytes per task id that the last level moved to or from memory for it, int64 [tasks]; the flush at the
    end belongs to no task. loaded, stored: bytes through the last level in all, the flush included.
    """

    levels: tuple[LevelTraffic, ...]
    requested: Ints
    from_memory: Ints
    loaded: int
    stored: int


@dataclass(frozen=True)
class Flow:
    """Accesses on their way outwards. tile, owner (task id), lane: int64; is_write: bool; nbytes: int64."""

    tile: Ints
    is_write: Bools
    nbytes: Ints
    owner: Ints
    lane: Ints


def wave_of(graph: TileGraph, order: Ints, lanes: int) -> Ints:
    """Cut an order into waves of up to `lanes` tasks that do not depend on each other.

    Returns int64 [tasks], the wave of the i-th task of the order, from 0 upwards.
    """
    n = len(order)
    place = np.empty(n, dtype=np.int64)
    place[order] = np.arange(n)
    edges = graph.edges
    newest = np.full(n, -1, dtype=np.int64)  # the latest producer of the i-th task
    np.maximum.at(newest, place[edges.consumer], place[edges.producer])
    starts = [0]
    start = 0
    for i, producer in enumerate(newest.tolist()):
        if i - start >= lanes or start <= producer < i:
            start = i
            starts.append(i)
    return np.searchsorted(np.array(starts), np.arange(n), side="right") - 1


def run_levels(graph: TileGraph, order: Ints, machine: Machine, mode: str) -> tuple[Traffic, int]:
    """Send every access through the machine's levels. mode: "serial" or "wave". Returns the traffic and the waves.

    Serial: the tasks one after the other. Wave: the tasks of a wave advance together, access by access, lane i
    floor(i * skew) accesses behind lane 0. Raises InvalidArgumentError.
    """
    flow, waves = _flow(graph, order, machine, mode)
    requested = np.zeros((len(machine.levels), len(graph.tasks)), dtype=np.int64)
    reports: list[LevelTraffic] = []
    for place, level in enumerate(machine.levels):
        np.add.at(requested[place], flow.owner[flow.owner >= 0], flow.nbytes[flow.owner >= 0])
        flow, report = _through(graph, flow, level)
        reports.append(report)
    mine = flow.owner >= 0
    from_memory = np.zeros(len(graph.tasks), dtype=np.int64)
    np.add.at(from_memory, flow.owner[mine], flow.nbytes[mine])
    stored = int(flow.nbytes[flow.is_write].sum())
    return Traffic(tuple(reports), requested, from_memory, int(flow.nbytes.sum()) - stored, stored), waves


def _flow(graph: TileGraph, order: Ints, machine: Machine, mode: str) -> tuple[Flow, int]:
    start, tile, is_write = graph.accesses
    position, source = entries_of(start, order)
    step = source - start[order][position]
    lane = position % machine.lanes
    waves = -(-len(order) // machine.lanes)
    if mode == "wave":
        wave = wave_of(graph, order, machine.lanes)
        waves = int(wave[-1]) + 1 if len(wave) else 0
        begin = np.searchsorted(wave, np.arange(waves))
        slot = (np.arange(len(order)) - begin[wave])[position]
        lag = np.floor(slot * machine.skew).astype(np.int64)
        sequence = np.lexsort((slot, step + lag, wave[position]))
        source, position, lane = source[sequence], position[sequence], slot[sequence]
    elif mode != "serial":
        raise InvalidArgumentError("mode", got=shown(mode), allowed="serial, wave")
    numbers = tile[source]
    return Flow(numbers, is_write[source], graph.bytes_of_numbers(numbers), order[position], lane), waves


def _through(graph: TileGraph, flow: Flow, level: CacheLevel) -> tuple[Flow, LevelTraffic]:
    """One level: returns what it passes on, in order, and its account."""
    if level.private:
        hit, evictions = _private_hits(graph, flow, level)
        passed = _pick(flow, np.flatnonzero(~hit | flow.is_write))
        result = None
    else:
        result = replay(level.policy, Stream(flow.tile, flow.is_write, flow.nbytes), level.capacity)
        hit, evictions = result.hit, int((result.evicted_at < len(flow.tile)).sum())
        passed = _passed_on(graph, flow, result)
    stored = int(passed.nbytes[passed.is_write].sum())
    traffic = LevelTraffic(
        level=level.name,
        policy=level.policy,
        capacity=level.capacity,
        accesses=len(flow.tile),
        hits=int(hit.sum()),
        requested_bytes=int(flow.nbytes.sum()),
        loaded_bytes=int(passed.nbytes.sum()) - stored,
        stored_bytes=stored,
        evictions=evictions,
        tensors=_by_tensor(graph, flow, hit, passed),
    )
    return passed, traffic


def _passed_on(graph: TileGraph, flow: Flow, result: CacheResult) -> Flow:
    """The next level's accesses: loads where reads missed, stores where dirty tiles were pushed out."""
    loads = np.flatnonzero(result.loaded)
    at = result.evicted_at[result.evicted_dirty]
    tiles = result.evicted_tile[result.evicted_dirty]
    padded = np.append(flow.owner, -1)
    lanes = np.append(flow.lane, 0)
    sequence = np.argsort(np.concatenate((2 * at, 2 * loads + 1)), kind="stable")
    return Flow(
        np.concatenate((tiles, flow.tile[loads]))[sequence],
        np.concatenate((np.ones(len(at), dtype=np.bool_), np.zeros(len(loads), dtype=np.bool_)))[sequence],
        np.concatenate((graph.bytes_of_numbers(tiles), flow.nbytes[loads]))[sequence],
        np.concatenate((padded[at], flow.owner[loads]))[sequence],
        np.concatenate((lanes[at], flow.lane[loads]))[sequence],
    )


def _private_hits(graph: TileGraph, flow: Flow, level: CacheLevel) -> tuple[Bools, int]:
    """A cache per lane. They write through, and a tile that any lane has rewritten since is a miss."""
    by_tile = np.argsort(flow.tile, kind="stable")
    writes = np.cumsum(flow.is_write[by_tile])
    version = np.empty(len(flow.tile), dtype=np.int64)
    version[by_tile] = writes
    key = flow.tile + version * max(graph.num_tiles, 1)
    hit = np.zeros(len(flow.tile), dtype=np.bool_)
    evictions = 0
    by_lane = np.argsort(flow.lane, kind="stable")
    for mine in np.split(by_lane, np.flatnonzero(np.diff(flow.lane[by_lane])) + 1):
        result = replay(level.policy, Stream(key[mine], flow.is_write[mine], flow.nbytes[mine]), level.capacity)
        hit[mine] = result.hit
        evictions += int((result.evicted_at < len(mine)).sum())
    return hit, evictions


def _pick(flow: Flow, at: npt.NDArray[np.intp]) -> Flow:
    return Flow(flow.tile[at], flow.is_write[at], flow.nbytes[at], flow.owner[at], flow.lane[at])


def _by_tensor(graph: TileGraph, flow: Flow, hit: Bools, passed: Flow) -> tuple[TensorTraffic, ...]:
    count = len(graph.tensors)
    owner, out = graph.tensor_of(flow.tile), graph.tensor_of(passed.tile)
    accesses = np.bincount(owner, minlength=count)
    hits = np.bincount(owner[hit], minlength=count)
    # Bytes per tensor stay below 2^53, so the float sums are exact.
    loaded = np.bincount(out[~passed.is_write], weights=passed.nbytes[~passed.is_write], minlength=count)
    stored = np.bincount(out[passed.is_write], weights=passed.nbytes[passed.is_write], minlength=count)
    return tuple(
        TensorTraffic(name, int(accesses[i]), int(hits[i]), int(loaded[i]), int(stored[i]))
        for i, name in enumerate(graph.tensors)
        if accesses[i] or stored[i]
    )


def compulsory(graph: TileGraph) -> tuple[int, int]:
    """Bytes that any order must load (tiles read before anything wrote them) and store (written, not read after).

    A tile that is written and then read is an intermediate: whether it ever reaches memory is the order's doing.
    """
    tile, is_write = graph.accesses.tile, graph.accesses.is_write
    if not len(tile):
        return 0, 0
    order = np.argsort(tile, kind="stable")
    first = order[np.concatenate(([True], np.diff(tile[order]) != 0))]
    last = order[np.concatenate((np.diff(tile[order]) != 0, [True]))]
    inputs, outputs = tile[first[~is_write[first]]], tile[last[is_write[last]]]
    return int(graph.bytes_of_numbers(inputs).sum()), int(graph.bytes_of_numbers(outputs).sum())
