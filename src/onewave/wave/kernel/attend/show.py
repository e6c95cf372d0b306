"""What attention publishes of a task: a split's result for `combine`, or for who merges it, or the whole attention.

Words that a sequence of another number of splits would have published are cleared for the next token.
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

from onewave.wave.kernel.attend.combine import clear_words
from onewave.wave.kernel.attend.layouts import few_words
from onewave.wave.kernel.finish import bits16, bits32
from onewave.wave.kernel.records import noted
from onewave.wave.kernel.spin import ABSENT
from onewave.wave.kernel.words import WORD_FEW, WORD_HEADS, WORD_SLICE, WORD_TARGET, WORD_WHOLE
from onewave.wave.plan.layout import MOST_SPLITS

__all__ = ["clear_others", "show_few", "show_part", "show_whole"]

_MOST = gl.constexpr(MOST_SPLITS)


@gluon.jit
def show_part(record, ours, theirs, low, high, lse, keep_back, D: gl.constexpr):
    """Publish a split's result for `combine`: head by head, D values and four times their log2-sum-exp2."""
    values = bits32(gl.reshape(gl.join(low, high), [8, D]))
    LW: gl.constexpr = values.type.layout
    head = gl.arange(0, 8, layout=gl.SliceLayout(1, LW))[:, None]
    column = gl.arange(0, D, layout=gl.SliceLayout(0, LW))[None, :]
    target = noted(record, WORD_TARGET)
    shown = (head < noted(record, WORD_HEADS)) & (keep_back == 0)
    at = head * (D + 4) + column
    ours = gl.multiple_of(ours + target, 16)
    theirs = gl.multiple_of(theirs + target, 16)
    gl.store(ours + at, values, mask=shown)
    gl.store(theirs + at, values | ABSENT, mask=shown)
    once = gl.arange(0, 4, layout=gl.SliceLayout(0, LW))[None, :]
    lse = gl.convert_layout(lse, gl.SliceLayout(1, LW))[:, None] + (once * 0).to(gl.float32)
    at = head * (D + 4) + D + once
    gl.store(ours + at, bits32(lse), mask=shown)
    gl.store(theirs + at, once | ABSENT, mask=shown)


@gluon.jit
def show_few(record, ours, theirs, low, high, lse, keep_back, DTYPE: gl.constexpr, D: gl.constexpr):
    """Publish a split's result for whoever merges them: head by head, 16-bit values of all splits, then a log2-sum-exp2
    of each."""
    words = bits16(low, DTYPE) | (bits16(high, DTYPE) << 16)
    LW: gl.constexpr = words.type.layout
    head = gl.arange(0, 8, layout=gl.SliceLayout(1, LW))
    pair = gl.arange(0, D // 2, layout=gl.SliceLayout(0, LW))
    split = noted(record, WORD_SLICE)
    first = noted(record, WORD_FEW)
    shown = (head < noted(record, WORD_HEADS)) & (keep_back == 0)
    at = (head * few_words(D))[:, None] + pair[None, :]
    values = first + split * (D // 2)
    gl.store(gl.multiple_of(ours + values, 16) + at, words, mask=shown[:, None])
    gl.store(gl.multiple_of(theirs + values, 16) + at, words | ABSENT, mask=shown[:, None])
    at = first + _MOST * (D // 2) + split + head * few_words(D)
    gl.store(ours + at, bits32(gl.convert_layout(lse, gl.SliceLayout(1, LW))), mask=shown)
    gl.store(theirs + at, head | ABSENT, mask=shown)


@gluon.jit
def clear_others(record, theirs, splits, D: gl.constexpr, GP: gl.constexpr, FEW: gl.constexpr, XW: gl.constexpr):
    """Clear what the task would publish of a sequence of another number of splits: show_part's words, or show_few's and
    show_whole's (of which `combine` clears those that it would publish)."""
    if FEW == 0:
        if splits <= 1:
            clear_words(theirs + noted(record, WORD_TARGET), GP * (D + 4), XW)
    else:
        split = noted(record, WORD_SLICE)
        if (split == 0) & (splits != 1):
            clear_words(theirs + noted(record, WORD_WHOLE), noted(record, WORD_HEADS) * (D // 2), XW)
        if splits <= 1:
            LINE: gl.constexpr = gl.BlockedLayout([4], [32], [XW], [0])
            heads = noted(record, WORD_HEADS)
            first = noted(record, WORD_FEW)
            word = gl.arange(0, XW * 128, layout=LINE)
            absent = gl.full([XW * 128], ABSENT, gl.int32, LINE)
            for begin in gl.static_range(0, GP * (D // 2), XW * 128):
                head = (begin + word) // (D // 2)
                at = head * few_words(D) + split * (D // 2) + word % (D // 2)
                gl.store(gl.multiple_of(theirs + first, 16) + at, absent, mask=head < heads)
            at = _MOST * (D // 2) + split + word * few_words(D)
            gl.store(theirs + first + at, absent, mask=word < heads)


@gluon.jit
def show_whole(record, ours, theirs, low, high, keep_back, DTYPE: gl.constexpr, D: gl.constexpr):
    """Publish a sequence's only split as `combine` would."""
    words = bits16(low, DTYPE) | (bits16(high, DTYPE) << 16)
    LW: gl.constexpr = words.type.layout
    head = gl.arange(0, 8, layout=gl.SliceLayout(1, LW))[:, None]
    pair = gl.arange(0, D // 2, layout=gl.SliceLayout(0, LW))[None, :]
    target = noted(record, WORD_WHOLE)
    shown = (head < noted(record, WORD_HEADS)) & (keep_back == 0)
    at = head * (D // 2) + pair
    gl.store(gl.multiple_of(ours + target, 16) + at, words, mask=shown)
    gl.store(gl.multiple_of(theirs + target, 16) + at, words | ABSENT, mask=shown)
