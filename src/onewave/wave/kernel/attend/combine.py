"""Combine attention's splits in the wave kernel; and what attending and combining share.

One task merges all splits of a few heads of one sequence, in their order. The number of splits follows from the
sequence's length. Tasks that find no keys clear the words of the other splits, which are not read. A sequence that fits
one split needs no merge: its attend task publishes the result, which spares a hand-off. With MERGE_WORDS > 0 product
steps merge the splits (merge.py), and combine has nothing to do. Constexprs: kernel.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onewave.wave.kernel.attend.layouts import part_packet, part_words
from onewave.wave.kernel.finish import bits16
from onewave.wave.kernel.records import record_word
from onewave.wave.kernel.spin import ABSENT, read_words
from onewave.wave.kernel.words import WORD
from onewave.wave.plan.layout import BLOCK_KEYS, POLLED_KEYS, POLLED_SPLITS, SINGLE_SPLIT_KEYS, SPLIT_KEYS

_WHOLE = gl.constexpr(SINGLE_SPLIT_KEYS)
_SPLIT = gl.constexpr(SPLIT_KEYS)
_POLLED_KEYS = gl.constexpr(POLLED_KEYS)
_POLLED_SPLITS = gl.constexpr(POLLED_SPLITS)
_BLOCK = gl.constexpr(BLOCK_KEYS)


@gluon.jit
def split_of_keys(window, splits, length, MERGE_WORDS: gl.constexpr):
    """Split a sequence's keys: the first key in sight, cached keys a split, the number of splits in use.

    The last split has the new key as well. In one build all three depend on the sequence's own length alone, so results
    are batch-invariant. A short sequence leaves splits unused, because merging them would take longer. window, splits:
    the record's. MERGE_WORDS: as in kernel.py.
    """
    first_key = gl.where(window > 0, gl.maximum(length - window, 0), 0)
    count = length - 1 - first_key
    used = gl.where(count <= _WHOLE, 1, gl.minimum(splits, (count + (_SPLIT - 1)) // _SPLIT))
    if MERGE_WORDS > 0:
        used = gl.where(count <= _POLLED_KEYS, gl.minimum(used, _POLLED_SPLITS), used)
    share = gl.maximum(((count + used - 1) // used + (_BLOCK - 1)) // _BLOCK * _BLOCK, _BLOCK)
    return first_key, share, gl.maximum((count + share - 1) // share, 1)


@gluon.jit
def clear_words(pointer, count, XW: gl.constexpr):
    """Set `count` words to ABSENT: a launch before may have had more sequences than this one."""
    LINE: gl.constexpr = gl.BlockedLayout([4], [32], [XW], [0])
    word = gl.arange(0, XW * 128, layout=LINE)
    for begin in range(0, count, XW * 128):
        mine = begin + word < count
        gl.store(pointer + begin + word, gl.full([XW * 128], ABSENT, gl.int32, LINE), mask=mine)


@gluon.jit
def combine(step, site, c):
    """Merge all splits of up to CH heads of one sequence, in their order, and publish their attention.

    A sequence with one split has nothing to merge. Weights and sums in float32; one rounding to DTYPE.
    """
    VALUES: gl.constexpr = c.CH * c.D
    L3: gl.constexpr = part_words(c.KSPLITS, VALUES, c.XW)
    record = step.record
    current = step.sets.current
    other = step.sets.next
    b = record_word(record, WORD.SEQUENCE)
    target = record_word(record, WORD.TARGET)
    count = record_word(record, WORD.HEADS)
    if b < step.sequences.batch:
        length = gl.load(step.sequences.positions + b).to(gl.int32) + 1
        window = record_word(record, WORD.WINDOW)
        first_key, share, used = split_of_keys(window, record_word(record, WORD.SPLITS), length, 0)
        if used > 1:
            what = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, L3)))[:, None, None]
            split = gl.arange(0, c.KSPLITS, layout=gl.SliceLayout(0, gl.SliceLayout(2, L3)))[None, :, None]
            value = gl.arange(0, VALUES, layout=gl.SliceLayout(0, gl.SliceLayout(1, L3)))[None, None, :]
            at = value // c.D * (c.D + 4) + gl.where(what == 0, value % c.D, c.D + value % 4)
            at = record_word(record, WORD.SOURCE) + split * record_word(record, WORD.SOURCE_STRIDE) + at
            real = (split < used) & (value < count * c.D)
            pointers = gl.where(real & (what >= 0), (current + at).to(gl.int64), 0)
            words = read_words(pointers, site, c.SYNC, part_packet(c.KSPLITS, VALUES, c.XW))
            values, lses = gl.split(gl.permute(words.to(gl.float32, bitcast=True), (1, 2, 0)))
            # A packet's four log2-sum-exp2 are equal: one is enough.
            lse = gl.max(gl.reshape(lses, [c.KSPLITS, VALUES // 4, 4]), axis=2)
            number = gl.arange(0, c.KSPLITS, layout=gl.SliceLayout(1, lse.type.layout))[:, None]
            lse = gl.where(number < used, lse, float("-inf"))
            weight = gl.exp2(lse - gl.max(lse, axis=0)[None, :])
            merged = gl.sum(weight[:, :, None] * gl.reshape(values, [c.KSPLITS, VALUES // 4, 4]), axis=0)
            inverse = gl.convert_layout(1.0 / gl.sum(weight, axis=0), gl.SliceLayout(1, merged.type.layout))
            merged = merged * inverse[:, None]
            low, high = gl.split(gl.reshape(merged, [VALUES // 2, 2]))
            words = bits16(low, c.DTYPE) | (bits16(high, c.DTYPE) << 16)
            LW: gl.constexpr = words.type.layout
            pair = gl.arange(0, VALUES // 2, layout=LW)
            shown = (pair < count * (c.D // 2)) & (step.withheld == 0)
            gl.store(gl.multiple_of(current + target, 16) + pair, words, mask=shown)
            gl.store(gl.multiple_of(other + target, 16) + pair, words | ABSENT, mask=shown)
    else:
        clear_words(other + target, count * (c.D // 2), c.XW)
