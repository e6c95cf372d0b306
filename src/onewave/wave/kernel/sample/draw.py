"""Drawing a token at random inside a launch of several, token for token as ops.sampling draws.

A probability is a whole number of 2^-44ths of the best one's, as there, so that sums are exact in any order. Every
block weighs the rows of the head that it has made, against the best logit of all; shows their sum; and reads those of
all others. Where the sequence's uniform number falls, the block whose rows are there finds out which, and shows it: two
hops more than the likeliest token takes. With top_k or top_p the order is another: narrow.py then finds the token's
logit, and only rows with just that are looked through, as above where there are several and in one hop where not.

draws, float64 [batch, 4 + TOKENS] (layout.draw_words): a sequence's temperature, 0 for its likeliest token; its min_p;
its top_k, 0 for none; its top_p; its uniform numbers in [0, 1) token by token.

In `several` behind the candidates (choose.py), each two sets by token: packets of the sums, [blocks, NB] of four int32
words (31 bits of the sum, 31 more, the first row, 0); packets of the rows drawn, [NB] of (the row, 0, 0, 0). A block
clears its own, and block 0 the rows drawn, at the beginning of the token: whoever reads them has read the candidates of
that token before, and so seen that; and nobody reads those of two tokens before any more.
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

from onewave.wave.kernel.across import sum_of_all
from onewave.wave.kernel.sample.narrow import narrowed, over, weights_of_rows
from onewave.wave.kernel.spin import ABSENT, poll_words
from onewave.wave.kernel.words import WORD_BLOCKS, WORD_FIRST_BLOCK

__all__ = ["clear_draws", "draw_of", "draw_row"]

_BITS31 = gl.constexpr(0x7FFFFFFF)
_UNIT = gl.constexpr(2.0**44)
"""Weight of a probability of 1."""


@gluon.jit
def sums_of(several, number, NB: gl.constexpr):
    """The packets of the sums of the token of that number, counted over all launches."""
    words = gl.num_programs(0) * NB * 4
    return several.to(gl.pointer_type(gl.int32)) + words * 3 + (number & 1) * words


@gluon.jit
def rows_of(several, number, NB: gl.constexpr):
    """The packets of the rows drawn, likewise."""
    return several.to(gl.pointer_type(gl.int32)) + gl.num_programs(0) * (NB * 20) + (number & 1) * (NB * 4)


@gluon.jit
def clear_draws(several, number, wanted, block, NB: gl.constexpr, XW: gl.constexpr):
    """Say that nothing of a token has been drawn yet, if wanted."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [XW], [0])
    lane = gl.arange(0, XW * 32, layout=LANES)
    absent = gl.full([XW * 32], ABSENT, gl.int32, LANES)
    mine = (lane < NB * 4) & wanted
    gl.store(sums_of(several, number, NB) + block * (NB * 4) + lane, absent, mask=mine)
    gl.store(rows_of(several, number, NB) + lane, absent, mask=mine & (block == 0))


@gluon.jit
def added(a, b):
    return a + b


@gluon.jit
def draw_row(
    several, draws, head, out, out_stride, number, token, b, best_logit, rounds, watch, block, step,
    NB: gl.constexpr, R: gl.constexpr, TOKENS: gl.constexpr, XW: gl.constexpr,
):  # fmt: skip
    """The row, int64, of a sequence's token of that number in the launch, drawn; and rounds, those of narrow.py for the
    token of that number so far. head: the record of the block's step that has made logits. best_logit: of all. number:
    of the token, over all launches."""
    mine = draws + b * (4 + TOKENS)
    first = gl.load(head + WORD_FIRST_BLOCK) * R
    rows = gl.minimum(gl.load(head + WORD_BLOCKS) * R, out_stride - first)
    return draw_of(
        several, mine, gl.load(mine + 4 + token), out + b * out_stride, out_stride, first, rows, number, b, best_logit,
        rounds, watch, block, step, NB, TOKENS, XW,
    )  # fmt: skip


@gluon.jit
def draw_of(
    several, mine, uniform, logits, vocabulary, first, rows, number, b, best_logit, rounds, watch, block, step,
    NB: gl.constexpr, TOKENS: gl.constexpr, XW: gl.constexpr,
):  # fmt: skip
    """The same of logits (words of float32, [vocabulary]), of which the block has `rows` from `first` on. mine: the
    sequence's draw_words."""
    ROWS: gl.constexpr = gl.BlockedLayout([4], [32], [XW], [0])
    SIZE: gl.constexpr = XW * 128
    inverse = 1.0 / gl.load(mine).to(gl.float32).to(gl.float64)
    least = gl.load(mine + 1) * _UNIT
    top_k = gl.load(mine + 2).to(gl.int64)
    top_p = gl.load(mine + 3)
    best = over(best_logit, inverse)
    logits += first
    # Rows that are looked through: those of logits, over the temperature, from low to high.
    low = float("-inf")
    high = float("inf")
    alone = 0
    goal = top_k * 0
    limited = (top_k > 0) | (top_p < 1)
    if limited:
        low, goal, alone, rounds = narrowed(
            several, logits, rows, inverse, best, least, top_k, top_p, uniform, number, rounds, watch, block, step,
            NB, TOKENS, XW,
        )  # fmt: skip
        high = low
    of_threads = gl.zeros([SIZE], gl.int64, ROWS)
    for at in range(0, rows, SIZE):
        scaled, weights = weights_of_rows(logits, at, rows, inverse, best, least, ROWS, SIZE)
        of_threads += gl.where((scaled >= low) & (scaled <= high), weights, 0)
    own = sum_of_all(of_threads, XW)
    which = gl.arange(0, 4, layout=gl.BlockedLayout([4], [32], [XW], [0]))
    word = gl.arange(0, SIZE, layout=ROWS)
    total = goal + 1
    before = top_k * 0
    if alone == 0:
        sums = sums_of(several, number, NB) + b * 4
        low_bits = (own & _BITS31).to(gl.int32)
        high_bits = (own >> 31).to(gl.int32)
        packet = gl.where(which == 0, low_bits, gl.where(which == 1, high_bits, gl.where(which == 2, first, 0)))
        gl.store(sums + block * (NB * 4) + which, packet)
        pointers = gl.where(word // 4 < gl.num_programs(0), (sums + word // 4 * (NB * 4) + word % 4).to(gl.int64), 0)
        words = poll_words(pointers, watch, block, step, 4)
        even, odd = gl.split(gl.reshape(words, [XW * 32, 2, 2]))
        lows, firsts = gl.split(even)
        highs, nothing = gl.split(odd)
        theirs = (highs.to(gl.int64) << 31) + lows
        total = sum_of_all(theirs, XW)
        before = sum_of_all(gl.where(firsts < first, theirs, 0), XW)
    if limited == 0:
        # Rounding may carry the product up to the total itself, where nobody is.
        goal = gl.minimum((uniform * total.to(gl.float64)).to(gl.int64), total - 1)
    goal -= before
    drawn = rows_of(several, number, NB) + b * 4
    # Of logits that are no numbers none weighs anything: block 0 then says something, lest all wait for ever.
    if ((goal >= 0) & (goal < own)) | ((total <= 0) & (block == 0)):
        passed = first * 0
        sofar = top_k * 0
        for at in range(0, rows, SIZE):
            scaled, weights = weights_of_rows(logits, at, rows, inverse, best, least, ROWS, SIZE)
            weights = gl.where((scaled >= low) & (scaled <= high), weights, 0)
            up_to = gl.associative_scan(weights, 0, added) + sofar
            there = at + gl.arange(0, SIZE, layout=ROWS) < rows
            passed += sum_of_all(((up_to <= goal) & there).to(gl.int32), XW)
            sofar += sum_of_all(weights, XW)
        gl.store(drawn + which, gl.where(which == 0, gl.minimum(first + passed, vocabulary - 1), 0))
    found = poll_words(gl.where(word < 4, (drawn + word % 4).to(gl.int64), 0), watch, block, step, 4)
    # A launch that gives up may have seen nothing.
    return gl.maximum(sum_of_all(gl.where(word == 0, found, 0), XW), 0).to(gl.int64), rounds
