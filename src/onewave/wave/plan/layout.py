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

TILE_VALUES = 8192
"""Of operand A."""
TILE_BYTES = 2 * TILE_VALUES
"""Of a tile of 16-bit weights."""
COMPACT_BYTES = 1.625
"""Of a bfloat16 weight in thirteen bits (compact.py)."""
LIST_WORDS = 32
"""Of the list of numbers that thirteen bits do not reach, beside each tile of compact weights: what a copy by TMA wants
its place in shared memory aligned to."""
STEP_WORDS = 32
TOGETHER, GROUPS = 2, 4
"""Steps' records that are brought to shared memory at a time, and places there for so many (notes.py)."""
NOTES = (GROUPS - 2) * TOGETHER
"""Steps ahead, at most, whose records a block can look at."""
POINTERS = STEP_WORDS // 2
"""int64 of what a launch keeps its data by (`places`, see steps.LaunchPlaces)."""
MOST_BATCH = 64
MOST_SPLITS = 16
"""Splits of a sequence's keys, at most; and the places they have, where whoever reads the attention merges them."""
FEW_SPLITS = 8
"""Splits that one poll of such a reader brings."""
WHOLE_KEYS, SPLIT_KEYS = 256, 128
"""Cached keys up to which one split is sooner done than several and their merging (128 more take half as long as that),
and of a split beyond."""
BLOCK_KEYS = 128
"""Keys that attention multiplies at a time, 16 a warp."""
FEW_KEYS = 1024 * FEW_SPLITS
"""Cached keys up to which FEW_SPLITS splits, if who reads them merges them, are sooner done than twice as many: half as
many workers then read keys, but each of them faster, and nobody polls for splits a second time."""
PAGES = (16, 32, 64, 128, 256)
"""Keys of a page, where a cache is paged."""
# Shared memory of an sm_90 block, and what of it barriers, records and small buffers take.
_SHARED_BYTES, _SMALL_BYTES = 227 * 1024, 2304
# What activations may take of it: half the rest is a ring deep enough to ride out a hand-off. Of 32 rows of a block on
# compact weights less, in shorter chunks, which leaves the ring a tile more.
_X_BYTES, _X_BYTES_OF_32 = 64 * 1024, 48 * 1024


@dataclass(frozen=True)
class TileShape:
    """How a batch of at most `batch` sequences is multiplied.

    rows, cols: of a weight tile. chunk: tiles that one load of activations covers. slots: chunks that fit shared
    memory. ring: weight tiles that fit beside them. piece: rows that a reduction finishes at a time. weight_bytes: of a
    packed weight: 2, 1 of rounded ones (rounding.py), or COMPACT_BYTES. images: operands A that make up a tile, side by
    side; 2 of one-byte weights make a tile as large as one of 16-bit weights. held: tiles of a product that go to
    registers before its activations have come, as if the ring were that much deeper; 0, 2 or 4. multipliers:
    partitions that multiply, each its own row blocks of a group.
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

    @property
    def tile_bytes(self) -> int:
        """Of a weight tile."""
        return int(TILE_VALUES * self.weight_bytes) * self.images

    @property
    def slot_bytes(self) -> int:
        """Of a weight tile's place in the ring: with its list, if it is one of compact weights."""
        return self.tile_bytes + (LIST_WORDS * 4 if self.weight_bytes == COMPACT_BYTES else 0)

    @property
    def tile_rows(self) -> int:
        """Rows of a weight tile in the stream, 128 bytes each."""
        return self.tile_bytes // 128

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
        """Row blocks whose products are handed over together."""
        return group_of(self.batch)

    @property
    def piece(self) -> int:
        """Rows that a reduction finishes at a time."""
        return min(self.rows, 16)

    @property
    def most_tiles(self) -> int:
        """Longest slice of K, in tiles, of which any number of row blocks can be made: what shared memory holds of the
        activations. For `group` row blocks they pass through, however long the slice is."""
        return self.slots * self.chunk


_ROWS = {1: 8, 2: 16, 4: 16, 8: 16, 16: 32, 32: 64, 64: 64}
# Tiles held in registers in a decode step, by whether attention leaves few of them (head_dim 128) and by the padded
# batch.
_HELD = {False: {1: 4, 2: 4, 4: 2, 8: 2}, True: {1: 2, 2: 2, 4: 2, 8: 2}}


def tile_shape(
    batch: int,
    *,
    rows: int | None = None,
    head_dim: int = 0,
    columns: int = 16384,
    weight_bytes: float = 2,
    images: int = 1,
) -> TileShape:
    """The shape for a batch of 1 to 64 sequences. rows: of a tile, 8 to 64, if the batch is not to decide. head_dim:
    of a decode step, whose attention takes shared memory too (0: none). columns: of the longest activations; the
    ring is as deep as they allow. weight_bytes, images: 2 and 1, or of one-byte weights 1 and 1 or 2.

    Raises UnsupportedError.
    """
    if not 1 <= batch <= MOST_BATCH:
        raise UnsupportedError("wave: batch", got=str(batch), allowed=f"1 to {MOST_BATCH}")
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
    chunk_bytes = chunk * width * 256
    wanted = max(2 * padded * columns, _warps_bytes(head_dim))
    # Of one sequence 16,384 columns are enough: a deeper ring serves more.
    most = 2 if padded == 1 else (_X_BYTES_OF_32 if of_32 else _X_BYTES) // chunk_bytes
    slots = min(most, -(-wanted // chunk_bytes))
    held = held_tiles(padded, head_dim) if weight_bytes == 2 else 0
    assert held <= chunk, "held tiles are multiplied by the first chunk"
    # What bounds 32 rows of the block is how fast one partition unpacks and multiplies. A decode step's attention
    # leaves no registers for a second one.
    multipliers = group_of(padded) if of_32 else 1
    shape = TileShape(padded, rows, chunk // images, slots, 0, weight_bytes, images, held, multipliers)
    return replace(shape, ring=_tiles_beside(slots * chunk_bytes + _SMALL_BYTES, padded, head_dim, shape.slot_bytes))


def held_tiles(padded: int, head_dim: int, *, crowded: bool = False) -> int:
    """Tiles of 16-bit weights that fit registers. crowded: whether the kernel adds up slices of K, which
    leaves fewer."""
    if head_dim == 0 or (crowded and head_dim > 64 and padded > 2):
        return 0
    return _HELD[head_dim > 64].get(padded, 0)


def splits_of(keys: int, splits: int, *, few: bool) -> int:
    """Count the splits that a sequence uses (combine.split_of_keys), at least 1.

    keys: in sight, the new one among them. splits: of the group. few: whether the attention's reader merges splits.
    """
    return max(-(-(keys - 1) // keys_per_split(keys, splits, few=few)), 1)


def keys_per_split(keys: int, splits: int, *, few: bool) -> int:
    """Cached keys of a full split, a multiple of BLOCK_KEYS; the last split that is used has the rest. Arguments as of
    splits_of."""
    cached = keys - 1
    used = 1 if cached <= WHOLE_KEYS else min(splits, -(-cached // SPLIT_KEYS))
    if few and cached <= FEW_KEYS:
        used = min(used, FEW_SPLITS)
    return max(-(-cached // (BLOCK_KEYS * used)) * BLOCK_KEYS, BLOCK_KEYS)


def few_head_words(head_dim: int) -> int:
    """Words of a head's splits in their places: 16-bit values of all, then a log2-sum-exp2 of each."""
    return MOST_SPLITS * (head_dim // 2 + 1)


def group_of(padded: int) -> int:
    """Row blocks whose products are handed over together: as many as one hand-over takes no longer for; of more than
    eight sequences, whose activations pass, two, which then pass half as often."""
    return 2 if padded in (16, 32) else max(1, min(4, 16 // padded))


def _tiles_beside(taken: int, padded: int, head_dim: int, tile_bytes: int) -> int:
    """Tiles that fit shared memory beside so many bytes, the results that are handed over, and attention's."""
    results = 2 * group_of(padded) * padded * 64 * 4 + heads_bytes(head_dim)
    return (_SHARED_BYTES - taken - results) // tile_bytes


def _warps_bytes(head_dim: int) -> int:
    """What attention keeps in the activations' place: 8 warps' weighted values of 8 heads, float32."""
    return 8 * 8 * head_dim * 4


def heads_bytes(head_dim: int) -> int:
    """Shared memory that attention takes (attend.attention_memory): queries, a new key and value, its scores, 8 warps'
    maxima and sums."""
    if head_dim == 0:
        return 0
    return 2 * 16 * head_dim * 2 + (1 + 2 * 8) * 8 * 4
