"""How decode attention is cut into tiles and splits: plain arithmetic on shapes, for the launch and for explain."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

# Rows whose lengths a program looks at to find its share; with more of them each row is one.
MAX_ROWS_LOOKED_AT = 256
# Programs that one row should give the GPU: about one for every SM of a large one.
_PROGRAMS_PER_ROW = 128
# Tiles of a split up to which a row has no more partial results than are merged at once. Merging as many again takes as
# long as two tiles, so longer splits may be twice as many (docs/log/decode-attention.md).
_MAX_SHORT_TILES = 4
_SMALLEST_SPLIT, _LARGEST_SPLIT = 64, 2048
# Bytes of keys and values that a program requests while it still works on the row before: what it reads in about four
# microseconds, longer than it takes from one row to the next.
_BYTES_AHEAD = 128 << 10
# A partial result's numbers that the program that merges holds in registers at a time.
_MERGED_AT_ONCE = 8192
# Partial results in a program's code, at most: each is there by itself, and Triton's pass that coalesces accesses takes
# time by the cube of how many there are (32: 3.6 seconds, 64: 20, 128: minutes). Gluon does not run it.
_MERGED, _MERGED_BY_TRITON = 32, 16
# More query rows would spill; with a head_dim above 128 more than 8.
_LARGEST_TILE = 32


class DecodeSizes(NamedTuple):
    """The sizes that a plan depends on. capacity: keys that a row can have; kv_itemsize: bytes of a cached element.

    split_size: keys of every split, rounded up to whole tiles. smallest_split: of a short row's, to a power of two.
    in_pieces: whether the cache's strides are multiples of 8 elements, so that 8 at least are copied at once.
    """

    num_heads: int
    num_kv_heads: int
    num_queries: int
    head_dim: int
    capacity: int
    kv_itemsize: int
    split_size: int | None = None
    windowed: bool = False
    smallest_split: int | None = None
    in_pieces: bool = True


@dataclass(frozen=True)
class DecodePlan:
    """One launch of the split-KV kernel.

    split: keys a split as the caller fixed it, in whole tiles, or 0 for smallest * 2^n with the smallest n that cuts a
    row in at most limits[n] splits, or the last n, which has no limit; smallest is a power of two. max_splits: the most
    splits of a row over all lengths that the cache can hold; full_splits: of the longest. block_m: query rows of a tile
    (query tokens x heads of a group, padded), block_h: those kept in a partial. unroll: partials that are loaded at a
    time to be merged. ahead: keys of the next row that are asked for before they are due. trigger: keys before the end
    at which the next kernel may be launched.
    """

    split: int
    smallest: int
    limits: tuple[int, ...]
    max_splits: int
    full_splits: int
    tiles: int
    block_m: int
    block_n: int
    block_d: int
    block_h: int
    unroll: int
    num_warps: int
    num_stages: int
    num_kv_heads: int
    ahead: int
    trigger: int

    @property
    def unroll_by_triton(self) -> int:
        """unroll, for the kernel that Triton lays out."""
        return min(self.unroll, _MERGED_BY_TRITON)

    def shares(self, rows: int, num_sms: int, *, in_pairs: bool = False) -> int:
        """Programs of a KV head (or of a tile of its query rows): the keys of all rows are shared among them.

        in_pairs: whether an SM has two, however many rows there are: twice as many shares, so that rows of one length
        are cut no more often than need be.
        """
        if rows > MAX_ROWS_LOOKED_AT:
            return rows
        # Where a program has little to do, two on an SM hide each other's beginning and end.
        programs = num_sms * (2 if rows == 1 else 1)
        shares = max(1, programs // (self.num_kv_heads * self.tiles)) * (2 if in_pairs and rows > 1 else 1)
        # Without more than have a split: those that have none make the others slower.
        return min(rows * self.full_splits, shares)

    def rows_looked_at(self, rows: int) -> int:
        """The kernels' ROWS: the length of their list of rows."""
        return _power_of_two(min(rows, MAX_ROWS_LOOKED_AT))

    def split_of(self, length: int) -> int:
        """Keys of a split of a row of so many."""
        if self.split:
            return self.split
        return self.smallest << _doublings(length, self.smallest, self.limits)


@lru_cache(maxsize=4096)
def plan_decode(sizes: DecodeSizes) -> DecodePlan:
    """Plan for sequences of at most `capacity` keys."""
    num_kv_heads, head_dim, capacity, split_size = sizes.num_kv_heads, sizes.head_dim, sizes.capacity, sizes.split_size
    tile_rows = sizes.num_heads // num_kv_heads * sizes.num_queries
    block_d = max(16, _power_of_two(head_dim))
    largest = 8 if block_d > 128 or _in_two_tiles(sizes) else _LARGEST_TILE
    block_m = min(largest, max(8, _power_of_two(tile_rows)))
    tiles = -(-tile_rows // block_m)
    block_h = min(block_m, _power_of_two(tile_rows))
    programs = max(1, -(-_PROGRAMS_PER_ROW // num_kv_heads))
    tile = 128 if block_d <= 64 else 64
    # Loads of single elements would take more registers than there are: ptxas 12.8 has read what it had not yet spilt
    # (docs/log/correctness.md).
    block_n = tile if sizes.in_pieces else 16
    smallest = max(tile, _power_of_two(sizes.smallest_split or _SMALLEST_SPLIT))
    # Sized for one query token, so that a row's splits are the same for any number of them.
    merged = _merged_at_once(min(block_m, _power_of_two(sizes.num_heads // num_kv_heads)), block_d)
    limits = tuple(
        min(programs, merged if smallest << n < _MAX_SHORT_TILES * tile else 2 * merged)
        for n in range((_LARGEST_SPLIT // smallest).bit_length() - 1)
    )
    if split_size is None:
        last = _doublings(capacity, smallest, limits)
        full_splits = -(-capacity // (smallest << last))
        max_splits = max(full_splits, *limits[:last], 1)
    else:
        # A program goes from one split to the next, so a tile must not lie in two.
        split_size = -(-split_size // tile) * tile
        max_splits = full_splits = max(1, -(-capacity // split_size))
    windowed = sizes.windowed and split_size is None  # a window may begin inside a split
    max_splits, full_splits = max(1, max_splits) + windowed, max(1, full_splits) + windowed
    return DecodePlan(
        split=split_size or 0,
        smallest=smallest,
        limits=limits,
        max_splits=max_splits,
        full_splits=full_splits,
        tiles=tiles,
        block_m=block_m,
        block_n=block_n,
        block_d=block_d,
        block_h=block_h,
        unroll=min(_power_of_two(max_splits), _merged_at_once(block_h, block_d)),
        # Never 8 with wgmma, which tiles of more than 8 rows use: Triton 3.6 waits for one warpgroup's only.
        num_warps=8 if block_d > 128 else 4,
        # More bytes under way make every load wait longer: more stages were slower (docs/log/decode-attention.md).
        num_stages=max(2, min(4, (128 << 10) // (2 * block_n * block_d * sizes.kv_itemsize))) if sizes.in_pieces else 1,
        num_kv_heads=num_kv_heads,
        # Tiles of many query rows multiply longer than they load, and have no registers to spare.
        ahead=_BYTES_AHEAD // (2 * block_d * sizes.kv_itemsize) // block_n * block_n if block_m <= 8 else 0,
        # With its last loads under way a program leaves the memory to the next one.
        trigger=4 * block_n,
    )


def _in_two_tiles(sizes: DecodeSizes) -> bool:
    """Whether a token's query rows are two tiles of 8, as many as Hopper's kernel takes, and both read the keys.

    Not groups of 16 and not wider heads: large batches lose more than small ones gain (docs/log/decode-attention.md).
    """
    return sizes.head_dim <= 64 and sizes.num_queries == 1 and 8 < sizes.num_heads // sizes.num_kv_heads < 16


def _merged_at_once(rows: int, columns: int) -> int:
    """Partial results of so many query rows that are merged at a time."""
    return max(1, min(_MERGED_AT_ONCE // (rows * columns), _MERGED))


def _doublings(length: int, smallest: int, limits: tuple[int, ...]) -> int:
    """How often a row of so many keys doubles its smallest split."""
    return next((n for n, most in enumerate(limits) if -(-length // (smallest << n)) <= most), len(limits))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
