"""What the wave kernel's functions take: one NamedTuple for each group of values that travels together.

Triton flattens a NamedTuple into its values, so a group costs no instruction. Groups are made with keywords, because
Triton's cache key holds a function's source but not the order of a class's fields. No field is called `values` or
`type`: Triton's own tuple has attributes of these names.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Constants(NamedTuple):
    """The launch's constexprs. kernel.py has their table."""

    DTYPE: Any
    FORMAT: Any
    IMAGES: Any
    NB: Any
    R: Any
    G: Any
    S: Any
    XS: Any
    PC: Any
    SPLITS: Any
    ACT: Any
    GATED: Any
    SYNC: Any
    FLIGHT: Any
    HELD: Any
    TEST: Any
    TRACE: Any
    XW: Any
    D: Any
    GP: Any
    CH: Any
    FEW: Any
    KSPLITS: Any
    QKNORM: Any
    EPS: Any
    SCALE: Any
    PAGE: Any
    STREAMS: Any
    MULTIPLIERS: Any


class Channel(NamedTuple):
    """Shared-memory places that one partition (or TMA) fills and another empties.

    places: the buffer, one place an index; of the ring a tuple: tiles and, for compact weights, the words beside a
    tile's planes and its list. full, empty: mbarriers, one a place.
    """

    places: Any
    full: Any
    empty: Any


class Records(NamedTuple):
    """The thread block's step records.

    box: descriptor of TOGETHER rows of all records; row 0 is the launch's `places` (layout.Place). first_step,
    num_steps: the thread block's. groups, places: shared memory. full: mbarriers, one a group.
    """

    box: Any
    first_step: Any
    num_steps: Any
    groups: Any
    places: Any
    full: Any


class Sequences(NamedTuple):
    """The launch's sequences. tokens, positions, slots: pointers to int64 [batch], unused where D is 0."""

    tokens: Any
    positions: Any
    slots: Any
    batch: Any


class ExchangeSets(NamedTuple):
    """Pointers to the exchange's two sets of words: this launch publishes in `current` and clears `next`."""

    current: Any
    next: Any


class Site(NamedTuple):
    """Where a wait happens, for the stall record. watch: pointer (spin.py). step: number of the step record."""

    watch: Any
    block: Any
    step: Any


class Counters(NamedTuple):
    """Counter hand-off (SYNC 1). waits: pointer to (counter, value) pairs. totals: rise of each counter a launch.

    epoch: launches before this one."""

    waits: Any
    counts: Any
    totals: Any
    epoch: Any


class Output(NamedTuple):
    """The caller's result: pointer to words, and words a sequence."""

    words: Any
    stride: Any


class ExchangeInputs(NamedTuple):
    """What the exchange partition reads and writes in device memory (launch.py); scalars of its thread block.

    source: pointer to the caller's activations. exchange: pointer to both sets. skipped: the step of which a test
    build withholds the results.
    """

    source: Any
    source_stride: Any
    exchange: Any
    set_words: Any
    output: Any
    counters: Any
    epochs: Any
    watch: Any
    trace: Any
    block: Any
    skipped: Any


class Step(NamedTuple):
    """One step of the exchange partition.

    record: in shared memory. kind: layout.Kind. withheld: whether a test build stores no result of this step. places:
    the launch's `places` in shared memory.
    """

    record: Any
    kind: Any
    withheld: Any
    sets: Any
    sequences: Any
    places: Any
    output: Any


class Target(NamedTuple):
    """Where a step publishes. to_caller: to Output, not to the exchange. first, stride: words in the exchange."""

    flags: Any
    to_caller: Any
    first: Any
    stride: Any


class TileStream(NamedTuple):
    """The thread block's weight tiles.

    boxes: descriptors: of the tiles and, for compact weights, of the words beside a tile's planes and of its list.
    ahead: tiles requested before the partitions part. num_tiles: all tiles. first_row, row_step: rows of the stream.
    """

    boxes: Any
    ahead: Any
    num_tiles: Any
    first_row: Any
    row_step: Any


class KeyStream(NamedTuple):
    """Cached keys and values that come through the ring. k_box, v_box: descriptors of the caches. tasks: pointer to
    the thread block's list of attention tasks (program.py). steps: pointer to the launch's first step record."""

    k_box: Any
    v_box: Any
    tasks: Any
    steps: Any


class CacheRows(NamedTuple):
    """Where a task's keys and values lie: pointers, or words from page 0 and the block table's (row, places)."""

    k: Any
    v: Any
    table: Any


class SplitTask(NamedTuple):
    """One split of one sequence's keys.

    projected: pointer to the sequence's projected q, k, v. begin, end: first cached key and the one after the last.
    position: of the new token. has_new: whether the new key is in this split. rows: CacheRows.
    """

    rows: Any
    projected: Any
    begin: Any
    end: Any
    position: Any
    has_new: Any
    layer: Any


class AttentionMemory(NamedTuple):
    """Shared memory of attention. queries, fresh: int32 [16, D / 2]; fresh: queries, new key and new value as they
    came. newest: float32 [8], the new key's scores. peaks, masses: float32 [XW, 8], each warp's maxima and sums."""

    queries: Any
    fresh: Any
    newest: Any
    peaks: Any
    masses: Any
