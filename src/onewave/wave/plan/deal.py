"""Deal a chain of operations out to workers: a task graph and a queue a worker, ready for plan, verify and lower.

Work is dealt in contiguous runs, as evenly as whole row blocks allow. The workers that stream least so far take the
remainder. The operations fix all that decides about rounding (blocks, slices of K, splits), so results are bitwise
equal on any number of workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from onewave.tiles.graph.builders import Builder
from onewave.tiles.graph.graph import Tile
from onewave.wave.plan.layout import TileShape, keys_per_split
from onewave.wave.plan.operations import INPUT, AnyOperation, Attention, Combination, HeadGroups, Operation
from onewave.wave.plan.slices import passes, slice_bounds

# A tile of cached keys and values holds at most so many bytes, a fraction of any L2 that steps are simulated with.
_MAX_TILE_BYTES = 16 << 20


def fewest_workers(units: Iterable[int], available: int) -> int:
    """Return the fewest workers that give no worker more of any operation, at least 15/16 of `available`.

    units: row blocks times slices of K of each operation. Fewer workers each have more bandwidth, and fewer of them
    read the activations.
    """
    fewest = max(-(-count // -(-count // available)) for count in units)
    return max(fewest, available * 15 // 16)


@dataclass
class Deal:
    """A graph under construction.

    by_writer: a tile of an activation is one worker's part of it, not one row block's. That is a hundred times fewer
    accesses where every task of a stage reads a whole row. context: tokens in the cache of each sequence. Attention
    tasks read that many keys and values, 16 bits each. Nothing writes them within a step, so neither the order nor any
    wait depends on the context. build: the graph. queues: task ids a worker. load: weight tiles that a worker streams
    so far.
    """

    operations: Mapping[str, AnyOperation]
    shape: TileShape
    workers: int
    batch: int
    by_writer: bool = False
    context: int = 0
    build: Builder = field(default_factory=lambda: Builder("bf16"))
    queues: list[list[int]] = field(default_factory=list[list[int]])
    load: list[int] = field(default_factory=list[int])
    _spans: dict[str, list[tuple[int, int, Tile]]] = field(default_factory=dict[str, list[tuple[int, int, Tile]]])
    # Tiles found before, by source, number of its spans then, and bounds: all tasks of a stage read the same ones.
    _found: dict[tuple[str, int, int, int], tuple[Tile, ...]] = field(default_factory=dict[Any, Any])

    def __post_init__(self) -> None:
        self.queues = [[] for _ in range(self.workers)]
        self.load = [0] * self.workers
        self.build.tensor(INPUT, (self.batch, 1), (self.batch, 1))

    def height(self, operation: Operation) -> int:
        """Return the rows of an operation's blocks: row blocks of a product, pieces of a reduction."""
        return self.shape.piece if operation.weight is None else self.shape.rows

    def shares(self, units: int, *, first: bool = False) -> list[int]:
        """Share units out. The workers that stream least so far take the rest; of equals the last, or the first."""
        found = [units // self.workers] * self.workers
        by_load = sorted(range(self.workers), key=lambda w: (self.load[w], w if first else -w))
        for worker in by_load[: units % self.workers]:
            found[worker] += 1
        return found

    def add(
        self,
        name: str,
        *,
        first: int = 0,
        last: int | None = None,
        low: int = 0,
        high: int | None = None,
        shares: Sequence[int] | None = None,
    ) -> None:
        """Deal out an operation's rows first to last, over slices low to high of K.

        first, last: multiples of the blocks' height. shares: row blocks a worker, if others than even ones (and then
        of one slice only).
        """
        operation = self.operations[name]
        assert isinstance(operation, Operation)
        slices = 1 if operation.weight is None else operation.slices
        runs = (slices if high is None else high) - low
        begin, end_row = first // self.height(operation), operation.rows if last is None else last
        count = end_row // self.height(operation) - begin
        at = 0
        planned: list[tuple[int, int, int, int]] = []
        for worker, share in enumerate(self.shares(count * runs) if shares is None else shares):
            end = at + share
            while at < end:  # a share may run over several slices of K
                slice_of, block = divmod(at, count)
                run = min(end - at, count - block, self._max_blocks(operation))
                planned.append((worker, begin + block, run, low + slice_of))
                at += run
        assert at == count * runs
        for worker, block, run, slice_of in planned:
            self.task(worker, name, block, run, slice_of)

    def _max_blocks(self, operation: Operation) -> int:
        """Return the most row blocks of a task: one group of them where activations pass through shared memory."""
        passing = operation.weight is not None and passes(
            operation.cols, operation.slices, self.shape.of_width(operation.width)
        )
        return self.shape.group if passing else operation.rows

    def blocks_of(self, name: str) -> int:
        """Count an operation's row blocks, of all slices of K."""
        operation = self.operations[name]
        assert isinstance(operation, Operation)
        slices = 1 if operation.weight is None else operation.slices
        return operation.rows // self.height(operation) * slices

    def add_units(self, name: str, *, turn: int = 0) -> None:
        """Deal out attention, a task a unit and split, or its combination, a task a unit and part. turn: workers by
        which they are moved on.

        Combination runs on the workers of the unit's last splits, which are idle while a sequence is short.
        """
        operation = self.operations[name]
        assert not isinstance(operation, Operation)
        groups = operation.groups
        units = groups.count * self.batch
        for unit, piece in self.units_of(name):
            split = max(0, groups.splits - 1 - piece) if isinstance(operation, Combination) else piece
            number = unit * groups.splits + split
            worker = number * self.workers // (units * groups.splits)
            self.unit((worker + turn) % self.workers, name, unit, piece)

    def units_of(self, name: str) -> list[tuple[int, int]]:
        """List the tasks of attention, (unit, split), or of its combination, (unit, part), in their order."""
        operation = self.operations[name]
        assert not isinstance(operation, Operation)
        groups, merges = operation.groups, isinstance(operation, Combination)
        return [
            (unit, piece)
            for unit in range(groups.count * self.batch)
            for piece in range(len(groups.parts_of(unit % groups.count)) if merges else groups.splits)
        ]

    def task(self, worker: int, name: str, first: int, blocks: int, part: int) -> int:
        """Add one worker's run of row blocks of one slice of K; return its id."""
        operation = self.operations[name]
        assert isinstance(operation, Operation)
        height = self.height(operation)
        spans = range(first * height // self.shape.rows, ((first + blocks) * height - 1) // self.shape.rows + 1)
        flops = blocks * height * operation.slices * self.batch
        if operation.weight is None:
            reads: list[Tile] = [(operation.source, (k, row)) for k in range(operation.slices) for row in spans]
        else:
            shape = self.shape.of_width(operation.width)
            bounds = slice_bounds(operation.cols, operation.slices, shape)
            reads = []
            if operation.merges is not None:
                groups = operation.merges.groups
                units = range(groups.count * self.batch)
                reads += [(operation.merges.target, (unit, split)) for unit in units for split in range(groups.splits)]
            reads += self._reads(operation.source, bounds[part], bounds[part + 1])
            reads += [(self._weight(name, operation), (first + i, part)) for i in range(blocks)]
            tiles = -(-(bounds[part + 1] - bounds[part]) // shape.cols)
            self.load[worker] += blocks * tiles
            flops = 2 * blocks * height * (bounds[part + 1] - bounds[part]) * self.batch
        writes: list[Tile] = self._writes(operation, first, blocks, part, worker)
        if operation.residual:  # the stream itself stays with its worker
            self._tensor("residual", (self.batch, operation.rows), (self.batch, self.shape.rows), 4)
            own: list[Tile] = [("residual", (0, row)) for row in spans]
            reads += [(INPUT, (0, 0))] if operation.embedded else own
            writes += own
        phase = name.removesuffix("_sum")
        made = self.build.task(name, tuple(reads), tuple(writes), flops, phase=phase, index=(first, blocks, part))
        self.queues[worker].append(made.id)
        return made.id

    def _weight(self, name: str, operation: Operation) -> str:
        tensor = f"W_{name}"
        if tensor not in self.build.tensors:
            shape = self.shape.of_width(operation.width)
            bounds = slice_bounds(operation.cols, operation.slices, shape)
            width = max(b - a for a, b in pairwise(bounds))
            whole = (operation.rows, width * operation.slices)
            self.build.tensor(tensor, whole, (shape.rows, width), shape.weight_bytes)
        return tensor

    def _tensor(
        self, name: str, shape: tuple[int, int], tile: tuple[int, int], value_bytes: float | None = None
    ) -> str:
        """Declare a tensor at its first use; return its name."""
        if name not in self.build.tensors:
            self.build.tensor(name, shape, tile, value_bytes)
        return name

    def _reads(self, source: str, low: int, high: int) -> tuple[Tile, ...]:
        """Return the tiles that hold values low to high of every sequence."""
        if source == INPUT:
            return ((INPUT, (0, 0)),)
        key = (source, len(self._spans[source]), low, high)
        if key not in self._found:
            self._found[key] = self._find(source, low, high)
        return self._found[key]

    def _find(self, source: str, low: int, high: int) -> tuple[Tile, ...]:
        found = sorted((first, last, tile) for first, last, tile in self._spans[source] if first < high and low < last)
        reached = low
        for first, last, _ in found:
            reached = last if first <= reached else reached
        assert reached >= high, f"{source}: values {reached} to {high} are read before anything makes them"
        return tuple(dict.fromkeys(tile for _, _, tile in found))

    def _writes(self, operation: Operation, first: int, blocks: int, part: int, worker: int) -> list[Tile]:
        target, height = operation.target, self.height(operation)
        if operation.partial:
            self._tensor(target, (operation.slices, operation.rows), (1, self.shape.rows), 4 * self.batch)
            return [(target, (part, first + i)) for i in range(blocks)]
        width = height // 2 if operation.gated else height
        spans = self._spans.setdefault(target, [])
        if self.by_writer:
            share = 2 * operation.outputs / self.workers
            self._tensor(target, (self.batch, self.workers), (self.batch, 1), share)
            tiles: list[Tile] = [(target, (0, worker))]
            spans.append((first * width, (first + blocks) * width, tiles[0]))
            return tiles
        self._tensor(target, (self.batch, operation.outputs), (self.batch, width))
        tiles = [(target, (0, first + i)) for i in range(blocks)]
        spans += [((first + i) * width, (first + i + 1) * width, tile) for i, tile in enumerate(tiles)]
        return tiles

    def unit(self, worker: int, name: str, unit: int, split: int) -> int:
        """Add a task of attention (split: of the keys) or of its combination (split: the part of the heads); return its
        id."""
        operation = self.operations[name]
        assert not isinstance(operation, Operation)
        groups = operation.groups
        group = unit % groups.count
        if isinstance(operation, Attention):
            reads, writes = self._attention(operation, unit, split)
            heads = groups.heads_of(group)
        else:
            pieces = groups.size // groups.merged
            reads = tuple((operation.source, (unit * pieces + split, k)) for k in range(groups.splits))
            head, heads = groups.first_head(group) + split * groups.merged, groups.parts_of(group)[split]
            writes = (self._finished(operation.target, groups, unit * pieces + split, head, heads),)
        keys = self._keys(operation, split) if isinstance(operation, Attention) else 1
        flops = 4 * heads * groups.head_dim * max(keys, 1)
        made = self.build.task(name, reads, writes, flops, phase=name, index=(unit, 1, split))
        self.queues[worker].append(made.id)
        return made.id

    def _attention(self, operation: Attention, unit: int, split: int) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
        """Return the tiles that a unit's attention over one split of its keys reads and writes."""
        groups = operation.groups
        units, group, dim = groups.count * self.batch, unit % groups.count, groups.head_dim
        kv_head, head, heads = group // groups.of_kv_head, groups.first_head(group), groups.heads_of(group)
        at = (head, groups.heads + kv_head, groups.heads + groups.kv_heads + kv_head)
        ends = (head + heads, at[1] + 1, at[2] + 1)
        found = [
            tile
            for low, high in zip(at, ends, strict=True)
            for tile in self._reads(operation.source, low * dim, high * dim)
        ]
        fresh = self._tensor(f"appended{operation.layer}", (units, 1), (1, 1), 2 * 2 * dim)
        cached = self._cached(operation, unit // groups.count * groups.kv_heads + kv_head, split)
        if groups.reader_merges:  # whole heads; split 0 also writes finished attention, for sequences of one split
            self._tensor(operation.target, (units, groups.splits), (1, 1))
            writes: list[Tile] = [(operation.target, (unit, split))]
            if split == 0:
                writes.append(self._finished(operation.combined, groups, unit, head, heads))
        else:
            pieces = groups.size // groups.merged
            shape = (units * pieces, groups.splits)
            self._tensor(operation.target, shape, (1, 1), 4 * groups.merged * (dim + 4))
            writes = [(operation.target, (unit * pieces + part, split)) for part in range(len(groups.parts_of(group)))]
        if split == groups.splits - 1:  # whichever split holds the new key appends it; this one stands for all
            writes.append((fresh, (unit, 0)))
        return (*dict.fromkeys(found), *cached), tuple(writes)

    def _keys(self, operation: Attention, split: int) -> int:
        """Cached keys of one split; 0 for a split that this context leaves unused."""
        groups = operation.groups
        cached = self.context if operation.window is None else min(self.context, operation.window - 1)
        share = keys_per_split(cached + 1, groups.splits, reader_merges=groups.reader_merges)
        return max(0, min(share, cached - split * share))

    def _cached(self, operation: Attention, kv_unit: int, split: int) -> tuple[Tile, ...]:
        """The tiles of keys and values that a split reads: one, or several where one would fill a cache. kv_unit:
        sequence * KV heads + KV head."""
        if self._keys(operation, split) == 0:
            return ()
        cache, full, groups = f"cache{operation.layer}", self._keys(operation, 0), operation.groups
        key_bytes, tiles = 2 * 2 * groups.head_dim, 1
        while full * key_bytes > tiles * _MAX_TILE_BYTES:
            tiles *= 2  # full splits hold multiples of BLOCK_KEYS
        keys_of_tile = -(-full // tiles)
        if cache not in self.build.tensors:
            keys = sum(self._keys(operation, each) for each in range(groups.splits))
            shape = (self.batch * groups.kv_heads, keys)
            self.build.tensor(cache, shape, (1, keys_of_tile), key_bytes)
        read = -(-self._keys(operation, split) // keys_of_tile)
        return tuple((cache, (kv_unit, split * tiles + tile)) for tile in range(read))

    def _finished(self, target: str, groups: HeadGroups, number: int, head: int, heads: int) -> Tile:
        """Return the tile that holds so many heads' finished attention."""
        tiles = groups.count * self.batch * (groups.size // groups.merged)
        self._tensor(target, (1, tiles), (1, 1), 2 * groups.merged * groups.head_dim)
        tile: Tile = (target, (0, number))
        self._spans.setdefault(target, []).append((head * groups.head_dim, (head + heads) * groups.head_dim, tile))
        return tile
