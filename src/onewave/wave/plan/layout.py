"""Sizes that the host and the kernel share. Pure Python.

A weight tile is `rows` rows of a matrix times `cols` columns, 16 KiB (8 of one-byte weights, 13 of compact ones),
operand A [64, 128] of a product, or two side by side: A's row q * rows + r holds row r, columns q * 128 to q * 128 +
127 of its part of the tile. The activations are operand B [128, N]: column q * batch + b holds sequence b, the same
columns. Of the product only blocks with equal q are wanted; their sum over q is the result. So narrow batches get tiles
of few rows, which can be dealt out to workers evenly, and the tensor core's work on the unwanted blocks costs nothing,
as a product this narrow is bound by reading A.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from onewave.base.errors import UnsupportedError
from onewave.base.weight_formats import COMPACT_BYTES, NESTED, times_as_wide

TILE_VALUES = 8192
"""Values of operand A [64, 128]."""
TILE_BYTES = 2 * TILE_VALUES
"""Bytes of a tile of 16-bit weights."""
LIST_WORDS = 32
"""Words of the list beside each tile of compact weights, of numbers that thirteen bits do not reach. TMA wants its
destination in shared memory aligned to as much."""
STEP_WORDS = 32
"""int32 words of a step record (steps.py)."""
TOGETHER, GROUPS = 2, 4
"""Step records that TMA brings to shared memory at a time, and places there for so many groups (kernel/records.py)."""
RECORDS_AHEAD = (GROUPS - 2) * TOGETHER
"""Steps ahead of the current one with their records in shared memory, at most."""
POINTERS = STEP_WORDS // 2
"""int64 words of `places` (steps.LaunchPlaces)."""
MAX_ROWS = 64
DIGITS_BATCH, DIGITS_BATCH_OF_BYTES = 4, 1
"""Sequences up to which 4-bit and int8 weights are multiplied by activations in digits (kernel/widen/digits.py): every
thread block makes all activations' digits, which takes longer than it gains for more of them."""
MAX_SPLITS = 16
"""Limit of splits of a sequence's keys, and their places where the reader of the attention merges them."""
POLLED_SPLITS = 8
"""Splits that one poll of such a reader loads."""
SINGLE_SPLIT_KEYS, SPLIT_KEYS = 256, 128
"""Split policy, in cached keys. Up to SINGLE_SPLIT_KEYS one split is fastest: merging costs as much as 256 keys. Beyond
that SPLIT_KEYS a split."""
BLOCK_KEYS = 128
"""Keys that attention multiplies at a time, 16 a warp."""
POLLED_KEYS = 1024 * POLLED_SPLITS
"""Cached keys up to which POLLED_SPLITS splits are faster than twice as many, where their reader merges them. Half as
many workers then read keys, each of them faster, and the reader polls once."""
PAGES = (16, 32, 64, 128, 256)
"""Keys of a page, where a cache is paged."""
SHARED_BYTES = 227 * 1024
"""Limit of an sm_90 thread block's shared memory."""
# Bytes beside those that a plan decides: records, captures of the partitions, scratch, gaps up to 128 bytes.
_SMALL_BYTES = 2048
# Two barriers for each tile of the ring and each chunk of activations.
_BARRIERS_BYTES = 16
# Triton places what TMA swizzles at multiples of this.
_ALIGNED_BYTES = 1024
# Limit of the activations' shared memory: half the rest is a ring deep enough to ride out a hand-off. For 32 rows on
# compact weights it is less, in shorter chunks, which leaves the ring one more tile.
_X_BYTES, _X_BYTES_OF_32 = 64 * 1024, 48 * 1024


@dataclass(frozen=True)
class TileShape:
    """Tiling of products for a batch of at most `batch` sequences.

    rows, cols: of a weight tile. chunk: tiles that one load of activations covers. slots: chunks that fit shared
    memory. ring: weight tiles that fit beside them. piece: rows that a reduction finishes at a time. weight_bytes: of a
    packed weight: 2, 1 for rounded ones (rounding.py), or COMPACT_BYTES. images: operands A of a tile, side by side;
    two of one-byte weights are as large as one of 16-bit weights. held: tiles of a product that go to registers before
    its activations have come, as if the ring were deeper; 0, 2 or 4. multipliers: partitions that multiply, each its
    own row blocks of a group. digits: whether activations are in digits (kernel/widen/digits.py).
    """

    batch: int
    rows: int
    chunk: int
    slots: int
    ring: int
    weight_bytes: float = 2
    images: int = 1
    held: int = 0
    multipliers: int = 1
    digits: bool = False

    @property
    def tile_bytes(self) -> int:
        """Bytes of a weight tile."""
        return int(TILE_VALUES * self.weight_bytes) * self.images

    @property
    def slot_bytes(self) -> int:
        """Bytes of a weight tile's place in the ring, with its list for compact weights."""
        return self.tile_bytes + (LIST_WORDS * 4 if self.weight_bytes == COMPACT_BYTES else 0)

    @property
    def tile_rows(self) -> int:
        """Rows of a weight tile in the stream, 128 bytes each."""
        return self.tile_bytes // 128

    def of_width(self, width: int) -> TileShape:
        """The tiling of a matrix of that MixedFormat's width: as many bytes a tile, of fewer columns."""
        if width == 1:
            return self
        times = times_as_wide(width)
        images, chunk = self.images // times, self.chunk * times
        return replace(self, images=images, chunk=chunk, weight_bytes=self.weight_bytes * times)

    @property
    def quarters(self) -> int:
        """Column groups of a tile."""
        return 64 // self.rows

    @property
    def cols(self) -> int:
        """Columns of a weight tile."""
        return 128 * self.quarters * self.images

    @property
    def width(self) -> int:
        """N of the wgmma."""
        return self.quarters * self.batch

    @property
    def chunk_bytes(self) -> int:
        """Shared memory of a chunk of activations."""
        return self.chunk * self.images * self.width * 256

    @property
    def group(self) -> int:
        """Row blocks that are handed off together."""
        return group_of(self.batch)

    @property
    def piece(self) -> int:
        """Rows that a reduction finishes at a time."""
        return min(self.rows, 16)

    @property
    def max_tiles(self) -> int:
        """Longest slice of K, in tiles, with activations that fit shared memory. For a longer one they pass through
        it, for `group` row blocks at a time."""
        return self.slots * self.chunk


_ROWS = {1: 8, 2: 16, 4: 16, 8: 16, 16: 32, 32: 64, 64: 64}
# Tiles held in registers in a decode step, by the padded batch. True: with head_dim 128, where attention needs more.
_HELD = {False: {1: 4, 2: 4, 4: 2, 8: 2}, True: {1: 2, 2: 2, 4: 2, 8: 2}}


def tile_shape(
    batch: int,
    *,
    rows: int | None = None,
    head_dim: int = 0,
    columns: int = 16384,
    weight_bytes: float = 2,
    images: int = 1,
    digits: int = 0,
) -> TileShape:
    """Choose the tiling for a batch of 1 to 64 sequences.

    rows: of a tile, 8 to 64; None: by the batch. head_dim: of a decode step, where attention takes shared memory too
    (0: no attention). columns: of the longest activations that need not pass through shared memory; the ring is as deep
    as they allow. weight_bytes, images: 2 and 1, or for one-byte weights 1 and 1 or 2. digits: columns of most
    products' activations where these are in digits; 0 elsewhere. Raises UnsupportedError.
    """
    if not 1 <= batch <= MAX_ROWS:
        raise UnsupportedError("wave: batch", got=str(batch), allowed=f"1 to {MAX_ROWS}")
    padded = 1 << (batch - 1).bit_length()
    if rows is None:
        rows = _ROWS[padded]
    # A wgmma is 8 columns wide at least, 64 at most here.
    padded = max(padded, rows // 8)
    width = 64 // rows * padded
    if width > 64:
        raise UnsupportedError("wave: rows of a tile", got=str(rows), allowed=f"{_ROWS[padded]} or more at {batch}")
    # A thread polls 16 words a chunk, or 32 where one sequence's row would take several chunks otherwise.
    of_32 = weight_bytes == COMPACT_BYTES and padded == 32 and rows == 64 and head_dim == 0
    chunk = (64 if width < 32 or of_32 else 128) // width
    few = digits > 0
    if few:  # no longer than most rows: digits are made of a whole chunk. A thread has eight words at least.
        needed = -(-digits * rows // TILE_VALUES)
        chunk = min(chunk, max(1 << (needed - 1).bit_length(), 32 // width, images))
    chunk_bytes = chunk * width * 256
    # Nested weights' digits lie there twice, for one sequence (widen/halves.py).
    halves = 2 if few and padded == 1 and weight_bytes == NESTED.weight_bytes else 1
    wanted = max(2 * padded * columns, _warps_bytes(head_dim) // halves, 2 * chunk_bytes if few else 0)
    # For one sequence 16,384 columns are enough: a deeper ring gains more.
    most = 16 // chunk if padded == 1 else (_X_BYTES_OF_32 if of_32 else _X_BYTES) // chunk_bytes
    slots = min(most, -(-wanted // chunk_bytes))
    held = held_tiles(padded, head_dim) if weight_bytes == 2 else 0
    assert held <= chunk, "held tiles are multiplied by the first chunk"
    # One partition's unpacking and multiplying bounds 32 rows of the FFN. A decode step's attention leaves no registers
    # for a second partition.
    multipliers = group_of(padded) if of_32 else 1
    shape = TileShape(padded, rows, chunk // images, slots, 0, weight_bytes, images, held, multipliers, few)
    free = SHARED_BYTES - shared_bytes(shape, head_dim)
    made = replace(shape, ring=free // (shape.slot_bytes + _BARRIERS_BYTES))
    # A gap behind the ring may take the room of its last tile.
    return made if shared_bytes(made, head_dim) <= SHARED_BYTES else replace(made, ring=made.ring - 1)


def held_tiles(padded: int, head_dim: int, *, crowded: bool = False) -> int:
    """Tiles of 16-bit weights that fit registers. crowded: whether the kernel adds up slices of K, which
    leaves fewer."""
    if head_dim == 0 or (crowded and head_dim > 64 and padded > 2):
        return 0
    return _HELD[head_dim > 64].get(padded, 0)


def splits_of(keys: int, splits: int, *, reader_merges: bool) -> int:
    """Count the splits that a sequence uses (combine.split_of_keys), at least 1.

    keys: in sight, the new one among them. splits: of the group. reader_merges: as of HeadGroups.
    """
    return max(-(-(keys - 1) // keys_per_split(keys, splits, reader_merges=reader_merges)), 1)


def keys_per_split(keys: int, splits: int, *, reader_merges: bool) -> int:
    """Cached keys of a full split, a multiple of BLOCK_KEYS; the last split that is used has the rest. Arguments as of
    splits_of."""
    cached = keys - 1
    used = 1 if cached <= SINGLE_SPLIT_KEYS else min(splits, -(-cached // SPLIT_KEYS))
    if reader_merges and cached <= POLLED_KEYS:
        used = min(used, POLLED_SPLITS)
    return max(-(-cached // (BLOCK_KEYS * used)) * BLOCK_KEYS, BLOCK_KEYS)


def mergeable_head_words(head_dim: int) -> int:
    """Return the words of one head's places for splits: 16-bit values of all, then a log2-sum-exp2 of each."""
    return MAX_SPLITS * (head_dim // 2 + 1)


def group_of(padded: int) -> int:
    """Return the row blocks that are handed off together: as many as make a hand-off no longer. For 16 and 32 sequences
    two, so that activations pass half as often."""
    return 2 if padded in (16, 32) else max(1, min(4, 16 // padded))


def shared_bytes(shape: TileShape, head_dim: int) -> int:
    """Bound from above the shared memory of the compiled kernel, in bytes. head_dim: as of tile_shape."""
    tiles = -(-shape.ring * shape.tile_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
    lists = shape.ring * (shape.slot_bytes - shape.tile_bytes)
    activations = shape.slots * shape.chunk_bytes
    if shape.digits:
        # Scales of activations, and sums of nested weights'; for one sequence of those two of each and of the digits
        # (widen/halves.py). Beside 4-bit weights one sequence's scales and heads of 128 fit a gap.
        if shape.weight_bytes != NESTED.weight_bytes:
            in_gap = shape.batch == 1 and head_dim > 64 and shape.weight_bytes < 1
            activations += 0 if in_gap else activations // 64
        elif shape.batch == 1:
            activations += activations + activations * 3 // 32
        else:
            activations += activations * 5 // 64
    results = 2 * shape.group * shape.batch * 64 * 4
    barriers = (shape.ring + shape.slots) * _BARRIERS_BYTES
    return tiles + lists + activations + results + _heads_bytes(head_dim) + barriers + _SMALL_BYTES


def _warps_bytes(head_dim: int) -> int:
    """Return the bytes that attention keeps in the activations' place: 8 warps' sums of 8 heads' values, float32."""
    return 8 * 8 * head_dim * 4


def _heads_bytes(head_dim: int) -> int:
    """Shared memory that attention takes (attend.attention_memory): queries, a new key and value, its scores, 8 warps'
    maxima and sums."""
    if head_dim == 0:
        return 0
    return 2 * 16 * head_dim * 2 + (1 + 2 * 8) * 8 * 4
