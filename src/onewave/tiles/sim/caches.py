"""Caches that replay a stream of tile accesses: least recently used, first in first out, Belady.

All write back: a written tile is stored when it is evicted or, at the end, flushed. A write to an absent tile makes
room but loads nothing, for a task writes whole tiles; a task that accumulates lists the tile as a read too, and that
loads.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from onewave.base.errors import InvalidArgumentError, check_one_of

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Stream:
    """Accesses in the order of their arrival at a cache.

    tile: int64 numbers, any. is_write: bool. nbytes: int64 bytes of each access's tile (1 each to count in tiles).
    group: None, or int64 per access: while a group's accesses run, tiles that it has touched are not evicted.
    """

    tile: Ints
    is_write: Bools
    nbytes: Ints
    group: Ints | None = None


@dataclass(frozen=True)
class CacheResult:
    """The hits, loads and evictions of a cache.

    hit: bool per access. loaded: bool per access, a read that missed. evicted_at: the access that pushed a tile out, or
    len(hit) for the flush at the end; evicted_tile: its number; evicted_dirty: whether it had to be stored.
    """

    hit: Bools
    loaded: Bools
    evicted_at: Ints
    evicted_tile: Ints
    evicted_dirty: Bools
    loaded_bytes: int
    stored_bytes: int

    @property
    def num_loads(self) -> int:
        """Reads that missed."""
        return int(self.loaded.sum())


@dataclass
class Dense:
    """A stream as plain lists over tiles 0..m-1, and what has happened so far."""

    tile: list[int]
    is_write: list[bool]
    size: list[int]
    group: list[int] | None
    next_read: Callable[[], list[int]]
    missed: list[int] = field(default_factory=list[int])
    evicted_at: list[int] = field(default_factory=list[int])
    evicted: list[int] = field(default_factory=list[int])
    dirty: list[bool] = field(default_factory=list[bool])

    def evict(self, place: int, tile: int, dirty: bool) -> None:
        self.evicted_at.append(place)
        self.evicted.append(tile)
        self.dirty.append(dirty)


def replay(policy: str, stream: Stream, capacity: int) -> CacheResult:
    """Run a stream through one cache.

    policy: a name in CACHES. capacity: in the unit of stream.nbytes. With tiles of different sizes farthest-next-use is
    not always the least (that problem is NP-hard): belady then answers with the better of it and LRU.
    Raises InvalidArgumentError for an unknown policy, or a capacity that one tile, or one group's tiles, do not fit.
    Source of belady: Belady 1966, IBM Systems Journal 5(2).
    """
    run = CACHES[check_one_of("cache policy", policy, CACHES)]
    largest = int(stream.nbytes.max()) if len(stream.nbytes) else 0
    if capacity < largest:
        raise InvalidArgumentError(
            "cache capacity", got=f"{capacity:,}", allowed=f"at least the largest tile, {largest:,}"
        )
    if policy == "lru" and stream.group is not None:
        _check_groups(stream, stream.group, capacity)
    result = _run(run, stream, capacity)
    if policy == "belady" and len(stream.nbytes) and int(stream.nbytes.min()) != largest:
        other = _run(lru, stream, capacity)
        return other if other.loaded_bytes < result.loaded_bytes else result
    return result


def _check_groups(stream: Stream, group: Ints, capacity: int) -> None:
    """Refuse a group whose tiles do not fit at once. LRU looks no further: what a group has touched it evicts last."""
    numbers, tile = np.unique(stream.tile, return_inverse=True)
    turn = np.concatenate((np.zeros(min(1, len(group)), np.int64), np.cumsum(group[1:] != group[:-1])))
    touched, first = np.unique(turn * max(1, len(numbers)) + tile.reshape(-1), return_index=True)
    needed = np.zeros(len(group), dtype=np.int64)
    np.add.at(needed, touched // max(1, len(numbers)), stream.nbytes[first])
    if len(group) and int(needed.max()) > capacity:
        raise _too_small(capacity)


def _run(run: Callable[[Dense, int], None], stream: Stream, capacity: int) -> CacheResult:
    numbers, first, tile = np.unique(stream.tile, return_index=True, return_inverse=True)
    tile = tile.reshape(-1).astype(np.int64)
    size = stream.nbytes[first] if len(first) else np.zeros(0, dtype=np.int64)
    dense = Dense(
        tile=tile.tolist(),
        is_write=stream.is_write.tolist(),
        size=size.tolist(),
        group=None if stream.group is None else stream.group.tolist(),
        next_read=lambda: next_reads(tile, stream.is_write).tolist(),
    )
    run(dense, capacity)
    hit = np.ones(len(tile), dtype=np.bool_)
    hit[dense.missed] = False
    loaded = ~hit & ~stream.is_write
    evicted = np.array(dense.evicted, dtype=np.int64)
    dirty = np.array(dense.dirty, dtype=np.bool_)
    return CacheResult(
        hit=hit,
        loaded=loaded,
        evicted_at=np.array(dense.evicted_at, dtype=np.int64),
        evicted_tile=numbers[evicted].astype(np.int64),
        evicted_dirty=dirty,
        loaded_bytes=int(stream.nbytes[loaded].sum()),
        stored_bytes=int(size[evicted[dirty]].sum()),
    )


def next_reads(tile: Ints, is_write: Bools) -> Ints:
    """For each access, when its tile is next read before it is overwritten; n + tile where it never is.

    The value is unique to a tile at any moment, so it names the tile: below n it is the place of an access.
    """
    n = len(tile)
    order = np.argsort(tile, kind="stable")
    found = n + tile
    if n:
        here, later = order[:-1], order[1:]
        live = (tile[here] == tile[later]) & ~is_write[later]
        found[here[live]] = later[live]
    return found


def lru(run: Dense, capacity: int) -> None:
    """Evict the tile that was touched longest ago."""
    resident: OrderedDict[int, bool] = OrderedDict()
    touch, used, size, missed = resident.move_to_end, 0, run.size, run.missed
    for place, (tile, write) in enumerate(zip(run.tile, run.is_write, strict=True)):
        if tile in resident:
            touch(tile)
            if write:
                resident[tile] = True
            continue
        missed.append(place)
        used += size[tile]
        # The running group's tiles are the most recent, so they go last by themselves.
        while used > capacity:
            victim, dirty = resident.popitem(last=False)
            used -= size[victim]
            run.evict(place, victim, dirty)
        resident[tile] = write
    _flush(run, resident)


def fifo(run: Dense, capacity: int) -> None:
    """Evict the tile that came in first, skipping those of the running group."""
    resident: OrderedDict[int, bool] = OrderedDict()
    used, size, missed, group = 0, run.size, run.missed, run.group
    touched = [-1] * len(size)
    for place, (tile, write) in enumerate(zip(run.tile, run.is_write, strict=True)):
        now = place if group is None else group[place]
        if tile in resident:
            touched[tile] = now
            if write:
                resident[tile] = True
            continue
        missed.append(place)
        used += size[tile]
        while used > capacity:
            victim = next(iter(resident))
            if group is not None and touched[victim] == now:
                victim = next((t for t in resident if touched[t] != now), -1)
                if victim < 0:
                    raise _too_small(capacity)
            used -= size[victim]
            run.evict(place, victim, resident.pop(victim))
        resident[tile] = write
        touched[tile] = now
    _flush(run, resident)


def belady(run: Dense, capacity: int) -> None:
    """Evict the tile whose next read lies farthest ahead; first of all one that is overwritten first, or never read."""
    next_read, n = run.next_read(), len(run.tile)
    resident: dict[int, bool] = {}
    wanted = [-1] * len(run.size)  # when each resident tile is next read
    touched = [-1] * len(run.size)
    heap: list[int] = []
    push, pop = heapq.heappush, heapq.heappop
    used, size, missed, group, tiles = 0, run.size, run.missed, run.group, run.tile
    for place, (tile, write) in enumerate(zip(tiles, run.is_write, strict=True)):
        now = place if group is None else group[place]
        if tile in resident:
            if write:
                resident[tile] = True
        else:
            missed.append(place)
            used += size[tile]
            pinned: list[int] = []
            while used > capacity:
                if not heap:
                    raise _too_small(capacity)
                key = -pop(heap)
                victim = tiles[key] if key < n else key - n
                if wanted[victim] != key or victim not in resident:
                    continue  # an older wish of a tile that was touched or evicted since
                if group is not None and touched[victim] == now:
                    pinned.append(key)
                    continue
                used -= size[victim]
                run.evict(place, victim, resident.pop(victim))
            for key in pinned:
                push(heap, -key)
            resident[tile] = write
        touched[tile] = now
        wanted[tile] = wish = next_read[place]
        push(heap, -wish)
    _flush(run, resident)


def _flush(run: Dense, resident: dict[int, bool]) -> None:
    for tile, dirty in resident.items():
        if dirty:
            run.evict(len(run.tile), tile, True)


def _too_small(capacity: int) -> InvalidArgumentError:
    return InvalidArgumentError("cache capacity", got=f"{capacity:,}", allowed="room for all that one step touches")


CACHES: dict[str, Callable[[Dense, int], None]] = {"lru": lru, "fifo": fifo, "belady": belady}
"""Replacement policies by name."""
