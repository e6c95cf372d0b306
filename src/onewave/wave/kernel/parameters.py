"""Parameters of the wave kernel's functions: a named tuple for each group of values that travels together.

Triton flattens a tuple into its values, so a group costs no instruction. Groups are made with keywords, because
Triton's cache key holds a function's source but not the order of a class's fields. No field is called `values` or
`type`: Triton's own tuple has attributes of these names.
"""

from collections import namedtuple


class Constants(namedtuple("Constants", (
    "DTYPE FORMAT IMAGES NB R G S XS PC SPLITS ACT GATED SYNC FLIGHT HELD TEST TRACE XW D GP CH MERGE_WORDS KSPLITS "
    "QKNORM EPS SCALE PAGE STREAMS MULTIPLIERS KV"
))):  # fmt: skip
    """The launch's constexprs. kernel.py has their table."""


class Channel(namedtuple("Channel", "places full empty")):
    """Shared-memory places that one partition (or TMA) fills and another empties.

    places: the buffer, one place an index; of the ring a tuple: tiles and, for compact weights, the words beside a
    tile's planes and its list; of activations a tuple: values and, for digits, scales and sums. full, empty:
    mbarriers, one a place.
    """


class Records(namedtuple("Records", "box first_step num_steps groups places full")):
    """The thread block's step records.

    box: descriptor of TOGETHER rows of all records; row 0 is the launch's `places` (layout.Place). first_step,
    num_steps: the thread block's. groups, places: shared memory. full: mbarriers, one a group.
    """


class Sequences(namedtuple("Sequences", "tokens positions slots batch")):
    """The launch's sequences. tokens, positions, slots: pointers to int64 [batch], unused where D is 0."""


class ExchangeSets(namedtuple("ExchangeSets", "current next")):
    """Pointers to the exchange's two sets of words: this launch publishes in `current` and clears `next`."""


class Site(namedtuple("Site", "watch block step")):
    """Where a wait happens, for the stall record. watch: pointer (spin.py). step: number of the step record."""


class Counters(namedtuple("Counters", "waits counts totals epoch")):
    """Counter hand-off (SYNC 1). waits: pointer to (counter, value) pairs. totals: rise of each counter a launch.

    epoch: launches before this one."""


class Output(namedtuple("Output", "words stride")):
    """The caller's result: pointer to words, and words a sequence."""


class ExchangeInputs(
    namedtuple(
        "ExchangeInputs", "source source_stride exchange set_words output counters epochs watch trace block skipped"
    )
):
    """Device memory of the exchange partition (launch.py), read and written; scalars of its thread block.

    source: pointer to the caller's activations. exchange: pointer to both sets. skipped: the step of which a test
    build withholds the results.
    """


class Step(namedtuple("Step", "record kind withheld sets sequences places output")):
    """One step of the exchange partition.

    record: in shared memory. kind: layout.Kind. withheld: whether a test build stores no result of this step. places:
    the launch's `places` in shared memory.
    """


class Target(namedtuple("Target", "flags to_caller first stride")):
    """Where a step publishes. to_caller: to Output, not to the exchange. first, stride: words in the exchange."""


class TileStream(namedtuple("TileStream", "boxes ahead num_tiles first_row row_step")):
    """The thread block's weight tiles.

    boxes: descriptors: of the tiles and, for compact weights, of the words beside a tile's planes and of its list.
    ahead: tiles requested before the partitions part. num_tiles: all tiles. first_row, row_step: rows of the stream.
    """


class KeyStream(namedtuple("KeyStream", "k_box v_box tasks steps")):
    """Cached keys and values that come through the ring. k_box, v_box: descriptors of the caches. tasks: pointer to
    the thread block's list of attention tasks (program.py). steps: pointer to the launch's first step record."""


class CacheRows(namedtuple("CacheRows", "k v table")):
    """Where a task's keys and values lie: pointers, or words from page 0 and the block table's (row, places)."""


class SplitTask(namedtuple("SplitTask", "rows projected begin end position has_new layer")):
    """One split of one sequence's keys.

    projected: pointer to the sequence's projected q, k, v. begin, end: first cached key and the one after the last.
    position: of the new token. has_new: whether the new key is in this split. rows: CacheRows.
    """


class AttentionMemory(namedtuple("AttentionMemory", "queries fresh newest peaks masses")):
    """Shared memory of attention. queries, fresh: int32 [16, D / 2]; fresh: queries, new key and new value as they
    came. newest: float32 [8], the new key's scores. peaks, masses: float32 [XW, 8], each warp's maxima and sums."""
