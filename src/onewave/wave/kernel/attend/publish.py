"""Publish an attention task's result: a split's for `combine`, a split's for product steps that merge, or the whole.

A task also clears the words that a sequence with another number of splits would have published. Constexprs: kernel.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onewave.wave.kernel.attend.combine import clear_words
from onewave.wave.kernel.attend.layouts import mergeable_words
from onewave.wave.kernel.finish import bits16, bits32
from onewave.wave.kernel.records import record_word
from onewave.wave.kernel.spin import ABSENT
from onewave.wave.kernel.words import WORD
from onewave.wave.plan.layout import MAX_SPLITS

_MAX_SPLITS = gl.constexpr(MAX_SPLITS)


@gluon.jit
def store_both(step, first, at, words, mask):
    """Store words at `at` behind a 16-byte aligned `first`, and clear them in the next set."""
    gl.store(gl.multiple_of(step.sets.current + first, 16) + at, words, mask=mask)
    gl.store(gl.multiple_of(step.sets.next + first, 16) + at, words | ABSENT, mask=mask)


@gluon.jit
def publish_split(step, low, high, lse, D: gl.constexpr):
    """Publish a split's result for `combine`: head by head, D float32 values and four times their log2-sum-exp2."""
    values = bits32(gl.reshape(gl.join(low, high), [8, D]))
    LW: gl.constexpr = values.type.layout
    head = gl.arange(0, 8, layout=gl.SliceLayout(1, LW))[:, None]
    column = gl.arange(0, D, layout=gl.SliceLayout(0, LW))[None, :]
    target = record_word(step.record, WORD.TARGET)
    shown = (head < record_word(step.record, WORD.HEADS)) & (step.withheld == 0)
    at = head * (D + 4) + column
    current = gl.multiple_of(step.sets.current + target, 16)
    other = gl.multiple_of(step.sets.next + target, 16)
    gl.store(current + at, values, mask=shown)
    gl.store(other + at, values | ABSENT, mask=shown)
    once = gl.arange(0, 4, layout=gl.SliceLayout(0, LW))[None, :]
    lse = gl.convert_layout(lse, gl.SliceLayout(1, LW))[:, None] + (once * 0).to(gl.float32)
    at = head * (D + 4) + D + once
    gl.store(current + at, bits32(lse), mask=shown)
    gl.store(other + at, once | ABSENT, mask=shown)


@gluon.jit
def publish_mergeable(step, low, high, lse, c):
    """Publish a split's result for product steps that merge: head by head, 16-bit values of all splits, then a
    log2-sum-exp2 of each."""
    words = bits16(low, c.DTYPE) | (bits16(high, c.DTYPE) << 16)
    LW: gl.constexpr = words.type.layout
    head = gl.arange(0, 8, layout=gl.SliceLayout(1, LW))
    pair = gl.arange(0, c.D // 2, layout=gl.SliceLayout(0, LW))
    split = record_word(step.record, WORD.SLICE)
    first = record_word(step.record, WORD.MERGEABLE)
    shown = (head < record_word(step.record, WORD.HEADS)) & (step.withheld == 0)
    at = (head * mergeable_words(c.D))[:, None] + pair[None, :]
    values = first + split * (c.D // 2)
    store_both(step, values, at, words, shown[:, None])
    at = first + _MAX_SPLITS * (c.D // 2) + split + head * mergeable_words(c.D)
    gl.store(step.sets.current + at, bits32(gl.convert_layout(lse, gl.SliceLayout(1, LW))), mask=shown)
    gl.store(step.sets.next + at, head | ABSENT, mask=shown)


@gluon.jit
def clear_unused(step, splits, c):
    """Clear in the next set what the task would publish of a sequence with another number of splits.

    These are publish_split's words, or publish_mergeable's and publish_whole's. `combine` clears its own.
    splits: of this sequence; 0: the task attends to nothing.
    """
    record = step.record
    other = step.sets.next
    if c.MERGE_WORDS == 0:
        if splits <= 1:
            clear_words(other + record_word(record, WORD.TARGET), c.GP * (c.D + 4), c.XW)
    else:
        split = record_word(record, WORD.SLICE)
        if (split == 0) & (splits != 1):
            clear_words(other + record_word(record, WORD.WHOLE), record_word(record, WORD.HEADS) * (c.D // 2), c.XW)
        if splits <= 1:
            LINE: gl.constexpr = gl.BlockedLayout([4], [32], [c.XW], [0])
            heads = record_word(record, WORD.HEADS)
            first = record_word(record, WORD.MERGEABLE)
            word = gl.arange(0, c.XW * 128, layout=LINE)
            absent = gl.full([c.XW * 128], ABSENT, gl.int32, LINE)
            for begin in gl.static_range(0, c.GP * (c.D // 2), c.XW * 128):
                head = (begin + word) // (c.D // 2)
                at = head * mergeable_words(c.D) + split * (c.D // 2) + word % (c.D // 2)
                gl.store(gl.multiple_of(other + first, 16) + at, absent, mask=head < heads)
            at = _MAX_SPLITS * (c.D // 2) + split + word * mergeable_words(c.D)
            gl.store(other + first + at, absent, mask=word < heads)


@gluon.jit
def publish_whole(step, low, high, c):
    """Publish a sequence's only split, as `combine` would publish merged splits."""
    words = bits16(low, c.DTYPE) | (bits16(high, c.DTYPE) << 16)
    LW: gl.constexpr = words.type.layout
    head = gl.arange(0, 8, layout=gl.SliceLayout(1, LW))[:, None]
    pair = gl.arange(0, c.D // 2, layout=gl.SliceLayout(0, LW))[None, :]
    target = record_word(step.record, WORD.WHOLE)
    shown = (head < record_word(step.record, WORD.HEADS)) & (step.withheld == 0)
    at = head * (c.D // 2) + pair
    store_both(step, target, at, words, shown)
