"""Register and shared-memory layouts of the wave kernel's attention.

A layout is a list of bases: what each bit of the register's, the lane's and the warp's number adds to a tensor's index.
Operands of an m16n8k16 product spread the inner index over the lanes in pairs; loads are fastest with 16 neighbouring
bytes a lane. The order of the inner index is free, so keys are loaded the second way and used as the first
(attend.inner_order).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onewave.wave.plan.layout import mergeable_head_words

mergeable_words = gluon.constexpr_function(mergeable_head_words)


@gluon.constexpr_function
def bits(axis: int, low: int, size: int, rank: int = 3) -> list[list[int]]:
    """List the bases low, 2 * low, .. below the size of an axis."""
    found: list[list[int]] = []
    while low < size:
        found.append([low if i == axis else 0 for i in range(rank)])
        low *= 2
    return found


@gluon.constexpr_function
def dealt(registers: Sequence[list[int]], rest: Sequence[list[int]], warps: int, shape: Sequence[int]) -> Any:
    """Assign bases: `registers` first, then `rest` to 5 bits of lanes, to the warps, to more registers.

    Threads without a base repeat others' values.
    """
    rank = len(shape)
    nothing = [0] * rank
    warp_bits = warps.bit_length() - 1
    lanes = [*rest[:5], *([nothing] * (5 - len(rest[:5])))]
    after = rest[5 : 5 + warp_bits]
    return gl.DistributedLinearLayout(
        reg_bases=[*registers, *rest[5 + warp_bits :]],
        lane_bases=lanes,
        warp_bases=[*after, *([nothing] * (warp_bits - len(after)))],
        block_bases=[],
        shape=list(shape),
    )


@gluon.constexpr_function
def product(warps: int) -> Any:
    """The layout of sums of one [16, n] product a warp, [warps, 16, n]."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def key_words(keys: int, dim: int, warps: int) -> Any:
    """The layout of keys, words [warps, keys, dim / 2]: 4 lanes load 64 neighbouring bytes of a key, a warp 8 keys.
    dim, here and below: byte_cache.stored_dim."""
    words = dim // 2
    return gl.DistributedLinearLayout(
        reg_bases=[*bits(2, 1, 4), *bits(1, 8, keys), *bits(2, 16, words)],
        lane_bases=[*bits(2, 4, 16), *bits(1, 1, 8)],
        warp_bases=[*bits(0, 1, warps)],
        block_bases=[],
        shape=[warps, keys, words],
    )


@gluon.constexpr_function
def value_words(keys: int, dim: int, warps: int) -> Any:
    """The layout of values, words [warps, keys, dim / 2]: 8 lanes side by side, 4 pairs of neighbouring keys."""
    words = dim // 2
    low = min(4, dim // 16)
    return gl.DistributedLinearLayout(
        reg_bases=[*bits(2, 1, low), *bits(1, 1, 2), *bits(1, 8, keys), *bits(2, 8 * low, words)],
        lane_bases=[*bits(1, 2, 8), *bits(2, low, 8 * low)],
        warp_bases=[*bits(0, 1, warps)],
        block_bases=[],
        shape=[warps, keys, words],
    )


@gluon.constexpr_function
def in_tile(layout: Any, keys: int, dim: int) -> Any:
    """Convert a layout of [warps, keys, dim / 2] to one of a ring tile's rows of 32 words."""

    def placed(bases: Sequence[list[int]]) -> list[list[int]]:
        at = [(warp * keys + key) * (dim // 2) + word for warp, key, word in bases]
        return [list(divmod(word, 32)) for word in at]

    warps = 1 << len(layout.warp_bases)
    return gl.DistributedLinearLayout(
        reg_bases=placed(layout.reg_bases),
        lane_bases=placed(layout.lane_bases),
        warp_bases=placed(layout.warp_bases),
        block_bases=[],
        shape=[warps * keys * dim // 64, 32],
    )


@gluon.constexpr_function
def key_rows(dim: int, warps: int) -> Any:
    """The layout of a ring tile's keys that matches key_words; with head_dim 128 a tile has 8 of each warp's 16."""
    keys = min(16, 1024 // dim)
    return in_tile(key_words(keys, dim, warps), keys, dim)


@gluon.constexpr_function
def value_rows(dim: int, warps: int) -> Any:
    """The layout of a ring tile's values that matches value_words."""
    keys = min(16, 1024 // dim)
    return in_tile(value_words(keys, dim, warps), keys, dim)


@gluon.constexpr_function
def head_words(rows: int, dim: int, warps: int) -> Any:
    """The layout of heads, words [rows, 2, dim / 4]: both halves of a rotated pair in one thread."""
    quarter = dim // 4
    registers = [*bits(2, 1, 4), [0, 1, 0]]
    return dealt(registers, [*bits(2, 4, quarter), *bits(0, 1, rows)], warps, [rows, 2, quarter])


@gluon.constexpr_function
def merged_words(dim: int, warps: int) -> Any:
    """The layout of the warps' results, [warps, 8, dim]: a thread's 4 columns are neighbours in a head."""
    in_lanes = 4 if dim < 128 else warps  # lanes to spare for the last bit of the warps' number
    registers = [*bits(2, 8, 32), *bits(0, 1, in_lanes)]
    rest = [*bits(2, 1, 8), *bits(2, 32, dim), *bits(0, in_lanes, warps), *bits(1, 1, 8)]
    return dealt(registers, rest, warps, [warps, 8, dim])


@gluon.constexpr_function
def part_words(splits: int, values: int, warps: int) -> Any:
    """The layout of splits' results, [2, splits, values].

    A packet of values and the packet of their log2-sum-exp2 are in one thread, all splits of a packet in one warp, so
    that a merge needs no barrier.
    """
    registers = [*bits(2, 1, 4), [1, 0, 0]]
    return dealt(registers, [*bits(1, 1, splits), *bits(2, 4, values)], warps, [2, splits, values])


@gluon.constexpr_function
def part_packet(splits: int, values: int, warps: int) -> int:
    """Words a thread of part_words, at most the 32 of one poll."""
    return min(32, max(8, 2 * splits * values // (32 * warps)))


@gluon.constexpr_function
def query_rows(vector: int, dim: int) -> Any:
    """The layout of queries in shared memory, 16-byte pieces of `vector` values swizzled: 8 rows share no bank."""
    return gl.SwizzledSharedLayout(vector, max(1, 64 // dim), min(8, dim // 8), [1, 0])


@gluon.constexpr_function
def warps_rows(dim: int) -> Any:
    """The layout of the warps' weighted values in shared memory, [warps, 8, dim], 32-byte pieces swizzled."""
    return gl.SwizzledSharedLayout(8, 1, min(8, dim // 8), [2, 1, 0])
