"""How decode attention is cut into tiles and splits: plain arithmetic on shapes, for the launch and for explain."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

__all__ = ["MAX_QUERIES", "DecodePlan", "plan_decode"]

MAX_QUERIES = 8
# Programs that one row should give the card: about one for every SM of a large one.
_PROGRAMS_PER_ROW = 128
_SMALLEST_SPLIT, _DOUBLINGS = 64, 4
_LARGEST_TILE = 64
_FLOATS_IN_MERGE = 8192


@dataclass(frozen=True)
class DecodePlan:
    """One launch of the split-KV kernel.

    split: keys a split as the caller fixed it, or 0 for smallest * 2^n, n <= doublings, the smallest that cuts a row in
    at most `target` splits. block_m: query rows of a tile (query tokens x heads of a group, padded), block_h: those
    kept in a partial. max_splits: the most splits of a row over all lengths that the cache can hold.
    """

    split: int
    smallest: int
    doublings: int
    target: int
    max_splits: int
    tiles: int
    block_m: int
    block_n: int
    block_d: int
    block_h: int
    unroll: int
    num_warps: int
    num_stages: int

    @property
    def why(self) -> str:
        """The reasons, one sentence."""
        if self.split:
            rule = f"splits of {self.split} keys as asked"
        else:
            largest = self.smallest << self.doublings
            rule = f"splits of {self.smallest} to {largest} keys, the smallest that gives a row at most {self.target}"
        return (
            f"{rule}; {self.block_h} query rows share each key, in a tile of {self.block_m}x{self.block_n}; "
            "a dependent kernel merges the partials of a row in order"
        )


@lru_cache(maxsize=4096)
def plan_decode(
    *,
    num_heads: int,
    num_kv_heads: int,
    num_queries: int,
    head_dim: int,
    capacity: int,
    kv_itemsize: int,
    split_size: int | None,
) -> DecodePlan:
    """Plan for sequences of at most `capacity` keys. kv_itemsize: bytes of a cached element."""
    tile_rows = num_heads // num_kv_heads * num_queries
    block_m = min(_LARGEST_TILE, max(16, _power_of_two(tile_rows)))
    tiles = -(-tile_rows // block_m)
    block_d = max(16, _power_of_two(head_dim))
    block_h = min(block_m, _power_of_two(tile_rows))
    target = max(1, -(-_PROGRAMS_PER_ROW // num_kv_heads))
    block_n = 128 if block_d <= 64 else 64 if block_d <= 128 else 32
    smallest = max(_SMALLEST_SPLIT, block_n)
    if split_size is None:
        largest = smallest << _DOUBLINGS
        # One more where a window begins inside a split.
        max_splits = min(-(-capacity // smallest), max(target, -(-capacity // largest)) + 1)
    else:
        max_splits = -(-capacity // split_size)
    max_splits = max(1, max_splits)
    tile_bytes = 2 * block_n * block_d * kv_itemsize
    return DecodePlan(
        split=split_size or 0,
        smallest=smallest,
        doublings=_DOUBLINGS,
        target=target,
        max_splits=max_splits,
        tiles=tiles,
        block_m=block_m,
        block_n=block_n,
        block_d=block_d,
        block_h=block_h,
        unroll=max(1, min(16, _FLOATS_IN_MERGE // (block_h * block_d))),
        num_warps=4,
        # Three programs fit on an SM.
        num_stages=max(2, min(4, (96 << 10) // tile_bytes)),
    )


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
