"""Sampling one token by all thread blocks of a row, token for token as ops.sampling does.

A probability is a whole number of 2^-44ths of the best one's, as there, so that sums are exact in any order.
rounds_impl.py finds the sampled token's logit. Then every block weighs the tokens of its share that have this logit,
shows their sum, and reads those of all others. The block in whose share the searched number falls finds the token and
shows it. A token without equals needs no exchange of sums.

words, float64 [4] (op.draw_words): temperature, min_p, top_k (0 for none), top_p.

`sets`, each twice, by the parity of the launch: packets of the sums, [blocks] of four int32 words (31 bits of the sum,
31 more, the first token, 0), and one packet of the sampled token (the token, 0, 0, 0). A launch clears what the next
one will use.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onewave.ops.sampling.rounds_impl import narrowed, over, weights_of_rows
from onewave.wave.kernel.spin import ABSENT, poll_words

_BITS31 = gl.constexpr(0x7FFFFFFF)
_UNIT = gl.constexpr(2.0**44)
"""Weight of a probability of 1."""


@gluon.jit
def sum_of_all(values, XW: gl.constexpr):
    """The sum of [n] of XW warps, whole numbers, in every thread. A thread's values must be neighbours.

    A warp adds its own values, then every thread the warps' sums. Triton's own reduction over warps has more barriers,
    and keeps registers of threads that load nothing over the loop around it.
    """
    of_warps = gl.sum(gl.reshape(values, [XW, values.shape[0] // XW]), axis=1)
    return gl.sum(gl.convert_layout(of_warps, gl.BlockedLayout([XW], [32], [XW], [0])), axis=0)


@gluon.jit
def sums_of(sets, number):
    """The packets of the sums of the launch of that number."""
    return sets.to(gl.pointer_type(gl.int32)) + (number & 1) * (gl.num_programs(0) * 4)


@gluon.jit
def token_of(sets, number):
    """The packet of its sampled token."""
    return sets.to(gl.pointer_type(gl.int32)) + gl.num_programs(0) * 8 + (number & 1) * 4


@gluon.jit
def clear_draws(sets, number, block, XW: gl.constexpr):
    """Mark a block's sum of a launch as absent, and as block 0 the sampled token."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [XW], [0])
    lane = gl.arange(0, XW * 32, layout=LANES)
    absent = gl.full([XW * 32], ABSENT, gl.int32, LANES)
    gl.store(sums_of(sets, number) + block * 4 + lane, absent, mask=lane < 4)
    gl.store(token_of(sets, number) + lane, absent, mask=(lane < 4) & (block == 0))


@gluon.jit
def added(a, b):
    return a + b


@gluon.jit
def draw_of(
    sets, words, uniform, logits, vocabulary, first, rows, number, best_logit, watch, block, step, XW: gl.constexpr
):  # fmt: skip
    """The sampled token of a row, int64. logits: words of float32, [vocabulary]; the block has `rows` of them from
    `first` on. best_logit: of all. number: of the launch."""
    ROWS: gl.constexpr = gl.BlockedLayout([4], [32], [XW], [0])
    SIZE: gl.constexpr = XW * 128
    inverse = 1.0 / gl.load(words).to(gl.float32).to(gl.float64)
    least = gl.load(words + 1) * _UNIT
    top_k = gl.load(words + 2).to(gl.int64)
    top_p = gl.load(words + 3)
    best = over(best_logit, inverse)
    logits += first
    wanted, goal, alone = narrowed(
        sets, logits, rows, inverse, best, least, top_k, top_p, uniform, number, watch, block, step, XW
    )  # fmt: skip
    of_threads = gl.zeros([SIZE], gl.int64, ROWS)
    for at in range(0, rows, SIZE):
        scaled, weights = weights_of_rows(logits, at, rows, inverse, best, least, ROWS, SIZE)
        of_threads += gl.where(scaled == wanted, weights, 0)
    own = sum_of_all(of_threads, XW)
    which = gl.arange(0, 4, layout=gl.BlockedLayout([4], [32], [XW], [0]))
    word = gl.arange(0, SIZE, layout=ROWS)
    total = goal + 1
    before = top_k * 0
    if alone == 0:
        sums = sums_of(sets, number)
        low_bits = (own & _BITS31).to(gl.int32)
        high_bits = (own >> 31).to(gl.int32)
        packet = gl.where(which == 0, low_bits, gl.where(which == 1, high_bits, gl.where(which == 2, first, 0)))
        gl.store(sums + block * 4 + which, packet)
        pointers = gl.where(word // 4 < gl.num_programs(0), (sums + word).to(gl.int64), 0)
        found = poll_words(pointers, watch, block, step, 4)
        even, odd = gl.split(gl.reshape(found, [XW * 32, 2, 2]))
        lows, firsts = gl.split(even)
        highs, nothing = gl.split(odd)
        theirs = (highs.to(gl.int64) << 31) + lows
        total = sum_of_all(theirs, XW)
        before = sum_of_all(gl.where(firsts < first, theirs, 0), XW)
    goal -= before
    drawn = token_of(sets, number)
    # Logits that are no numbers all weigh nothing: block 0 then says something, lest all wait for ever.
    if ((goal >= 0) & (goal < own)) | ((total <= 0) & (block == 0)):
        passed = first * 0
        sofar = top_k * 0
        for at in range(0, rows, SIZE):
            scaled, weights = weights_of_rows(logits, at, rows, inverse, best, least, ROWS, SIZE)
            weights = gl.where(scaled == wanted, weights, 0)
            up_to = gl.associative_scan(weights, 0, added) + sofar
            there = at + gl.arange(0, SIZE, layout=ROWS) < rows
            passed += sum_of_all(((up_to <= goal) & there).to(gl.int32), XW)
            sofar += sum_of_all(weights, XW)
        gl.store(drawn + which, gl.where(which == 0, gl.minimum(first + passed, vocabulary - 1), 0))
    found = poll_words(gl.where(word < 4, (drawn + word % 4).to(gl.int64), 0), watch, block, step, 4)
    # A launch that gives up may have seen nothing.
    return gl.maximum(sum_of_all(gl.where(word == 0, found, 0), XW), 0).to(gl.int64)
