"""Combining attention's splits in the wave kernel, and what attending and combining share.

One task merges all splits of a few heads of one sequence, in their order. How many splits a sequence uses follows from
its length; words of the others are cleared by the tasks that find no keys, and are not read. A sequence that fits one
split needs no merging: who attends it publishes what a merge would, and spares it a hand-off. Where the
output projection merges splits while it loads them (FEW, see merge.py), nothing is left to do here either.
"""
# ruff: noqa: RET505, SIM102, SIM108, RUF059, RUF005, B007, RUF100
# (A branch on a constant is taken when the kernel is compiled, so both of its sides stand as they are.)
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingTypeStubs=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportUnusedVariable=false, reportReturnType=false
# (Triton ships no type information.)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onewave.wave.kernel.attend.layouts import part_packet, part_words
from onewave.wave.kernel.finish import bits16
from onewave.wave.kernel.records import noted
from onewave.wave.kernel.spin import ABSENT, load_words, poll_words
from onewave.wave.kernel.words import (
    WORD_HEADS,
    WORD_SEQUENCE,
    WORD_SOURCE,
    WORD_SOURCE_STRIDE,
    WORD_SPLITS,
    WORD_TARGET,
    WORD_WINDOW,
)
from onewave.wave.plan.layout import BLOCK_KEYS, FEW_KEYS, FEW_SPLITS, SPLIT_KEYS, WHOLE_KEYS

__all__ = ["clear_words", "combine", "read_words", "split_of_keys"]

_WHOLE = gl.constexpr(WHOLE_KEYS)
_SPLIT = gl.constexpr(SPLIT_KEYS)
_FEW_KEYS = gl.constexpr(FEW_KEYS)
_FEW = gl.constexpr(FEW_SPLITS)
_BLOCK = gl.constexpr(BLOCK_KEYS)


@gluon.jit
def read_words(pointers, watch, block, step, SYNC: gl.constexpr, WORDS: gl.constexpr):
    if SYNC == 1:
        return load_words(pointers, WORDS)
    else:
        return poll_words(pointers, watch, block, step, WORDS)


@gluon.jit
def split_of_keys(window, splits, length, FEW: gl.constexpr):
    """The first key that is seen, cached keys a split, and how many splits there are, the last of which has the new key
    as well. In one build all depend on the sequence's own length alone, so that its bits do not depend on its company;
    a short sequence leaves splits empty, as merging them would take longer. window, splits: the record's. FEW: as in
    wave_kernel."""
    first_key = gl.where(window > 0, gl.maximum(length - window, 0), 0)
    count = length - 1 - first_key
    used = gl.where(count <= _WHOLE, 1, gl.minimum(splits, (count + (_SPLIT - 1)) // _SPLIT))
    if FEW > 0:
        used = gl.where(count <= _FEW_KEYS, gl.minimum(used, _FEW), used)
    share = gl.maximum(((count + used - 1) // used + (_BLOCK - 1)) // _BLOCK * _BLOCK, _BLOCK)
    return first_key, share, gl.maximum((count + share - 1) // share, 1)


@gluon.jit
def clear_words(pointer, count, XW: gl.constexpr):
    """Say of `count` words that they have not come yet: a launch before may have had more sequences than this one."""
    LINE: gl.constexpr = gl.BlockedLayout([4], [32], [XW], [0])
    word = gl.arange(0, XW * 128, layout=LINE)
    for begin in range(0, count, XW * 128):
        mine = begin + word < count
        gl.store(pointer + begin + word, gl.full([XW * 128], ABSENT, gl.int32, LINE), mask=mine)


@gluon.jit
def combine(
    record, ours, theirs, positions, watch, block, step, batch, keep_back, DTYPE: gl.constexpr,
    D: gl.constexpr, CH: gl.constexpr, KSPLITS: gl.constexpr, SYNC: gl.constexpr, XW: gl.constexpr,
):  # fmt: skip
    """Merge all splits of up to CH heads of one sequence, in their order, and publish their attention; of a sequence of
    one split nothing is left to do."""
    VALUES: gl.constexpr = CH * D
    L3: gl.constexpr = part_words(KSPLITS, VALUES, XW)
    b = noted(record, WORD_SEQUENCE)
    target = noted(record, WORD_TARGET)
    count = noted(record, WORD_HEADS)
    if b < batch:
        length = gl.load(positions + b).to(gl.int32) + 1
        first_key, share, used = split_of_keys(noted(record, WORD_WINDOW), noted(record, WORD_SPLITS), length, 0)
        if used > 1:
            what = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, L3)))[:, None, None]
            split = gl.arange(0, KSPLITS, layout=gl.SliceLayout(0, gl.SliceLayout(2, L3)))[None, :, None]
            value = gl.arange(0, VALUES, layout=gl.SliceLayout(0, gl.SliceLayout(1, L3)))[None, None, :]
            at = value // D * (D + 4) + gl.where(what == 0, value % D, D + value % 4)
            at = noted(record, WORD_SOURCE) + split * noted(record, WORD_SOURCE_STRIDE) + at
            real = (split < used) & (value < count * D)
            pointers = gl.where(real & (what >= 0), (ours + at).to(gl.int64), 0)
            words = read_words(pointers, watch, block, step, SYNC, part_packet(KSPLITS, VALUES, XW))
            values, lses = gl.split(gl.permute(words.to(gl.float32, bitcast=True), (1, 2, 0)))
            # Of a packet's four equal log2-sum-exp2 one is enough.
            lse = gl.max(gl.reshape(lses, [KSPLITS, VALUES // 4, 4]), axis=2)
            number = gl.arange(0, KSPLITS, layout=gl.SliceLayout(1, lse.type.layout))[:, None]
            lse = gl.where(number < used, lse, float("-inf"))
            weight = gl.exp2(lse - gl.max(lse, axis=0)[None, :])
            merged = gl.sum(weight[:, :, None] * gl.reshape(values, [KSPLITS, VALUES // 4, 4]), axis=0)
            inverse = gl.convert_layout(1.0 / gl.sum(weight, axis=0), gl.SliceLayout(1, merged.type.layout))
            merged = merged * inverse[:, None]
            low, high = gl.split(gl.reshape(merged, [VALUES // 2, 2]))
            words = bits16(low, DTYPE) | (bits16(high, DTYPE) << 16)
            LW: gl.constexpr = words.type.layout
            pair = gl.arange(0, VALUES // 2, layout=LW)
            shown = (pair < count * (D // 2)) & (keep_back == 0)
            gl.store(gl.multiple_of(ours + target, 16) + pair, words, mask=shown)
            gl.store(gl.multiple_of(theirs + target, 16) + pair, words | ABSENT, mask=shown)
    else:
        clear_words(theirs + target, count * (D // 2), XW)
