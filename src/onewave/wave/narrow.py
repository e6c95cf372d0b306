"""top_k and top_p inside a launch of several tokens: a search for a place in the sorted vocabulary, which nobody sorts.

ops.sampling orders a sequence's tokens by their logits over its temperature, the first of equals first, and weighs each
with a whole number. top_k keeps the tokens up to the one of a rank, top_p those up to the one in whose weight a number
falls, and the one drawn is again the one in whose weight a number falls. Each of the three is one search, and the sum
of the weights kept is all that the next has to know of the one before.

A search goes in rounds of one hop. All blocks cut an interval of logits into eight parts, the last of which is its
upper end alone; each shows, of the rows of the head that it has made, the sum of weights, the number and the greatest
logit in every part; each reads those of all.
Sums of whole numbers are the same in any order, so all find the same part in which the rank or the number falls, and
the next round is about the interval from that part's lower bound to the greatest logit in it. A search ends with a part
that holds one token, or nothing but equals. Tokens that weigh nothing are none: they change no sum and are not drawn.
The first round, over everything that weighs anything, serves all three searches.

In `several`, behind all else (layout.several_words): two groups by token of four sets by round of [blocks] times eight
packets of four int32 words (31 bits of the sum, 31 more, the number, the greatest logit's bits). A block clears its own
of a group at the beginning of the token, as draw.py does, and in each round, once it has shown what it found, the set
of the round after the next. Whoever reads there has read what this block has shown in between, behind a fence; and
nobody reads any more what stood there two rounds before, as all have shown the round between.
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

from onewave.wave.spin import ABSENT, fence, poll_words

__all__ = ["added", "clear_rounds", "narrowed", "weights_of", "weights_of_rows"]

# Of a probability of 1, and the number that, added, leaves no bits behind the point of what is at most that.
_UNIT = gl.constexpr(2.0**44)
_ROUNDER = gl.constexpr(2.0**52)
_BITS31 = gl.constexpr(0x7FFFFFFF)
# A logit (over the temperature) as far below the best, or farther, weighs nothing: exp(-32) is less than half of 2^-44.
_SPAN = gl.constexpr(32.0)
# More rounds than any three searches take: each makes the interval seven times narrower, and between 32 and the
# smallest float32 lie 154 factors of two. Only a launch that gives up reads what never ends.
_MOST_ROUNDS = gl.constexpr(192)


@gluon.jit
def weights_of(scaled, best, least):
    """Weights of logits over the temperature, as float64 whole numbers; 0 for those below `least`, and for those that
    are no numbers. best: the best logit of all over the temperature."""
    weight = gl.exp((scaled - best).to(gl.float64)) * _UNIT
    weight = (weight + _ROUNDER) - _ROUNDER
    return gl.where(weight >= least, weight, 0.0)


@gluon.jit
def weights_of_rows(logits, at, rows, temperature, best, least, LAYOUT: gl.constexpr, SIZE: gl.constexpr):
    """SIZE rows of logits (words of float32) from `at` on: over the temperature, float32, and what they weigh, int64; 0
    from `rows` on."""
    row = at + gl.arange(0, SIZE, layout=LAYOUT)
    logit = gl.load(logits + row, mask=row < rows, other=0, cache_modifier=".cg").to(gl.float32, bitcast=True)
    scaled = gl.div_rn(logit, temperature + logit * 0)
    return scaled, gl.where(row < rows, weights_of(scaled, best, least), 0.0).to(gl.int64)


@gluon.jit
def added(a, b):
    return a + b


@gluon.jit
def rounds_of(several, number, NB: gl.constexpr, TOKENS: gl.constexpr):
    """The sets of the rounds of the token of that number, counted over all launches."""
    pairs = (gl.num_programs(0) * (NB * 13) + (NB * 4 + TOKENS * NB + 1)) // 2
    return several.to(gl.pointer_type(gl.int32)) + pairs * 4 + (number & 1) * (gl.num_programs(0) * 128)


@gluon.jit
def clear_rounds(several, number, wanted, block, NB: gl.constexpr, TOKENS: gl.constexpr, XW: gl.constexpr):
    """Say that there has been no round of a token yet, if wanted."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [XW], [0])
    lane = gl.arange(0, 128, layout=LANES)
    mine = rounds_of(several, number, NB, TOKENS) + lane // 32 * (gl.num_programs(0) * 32) + block * 32 + lane % 32
    gl.store(mine, gl.full([128], ABSENT, gl.int32, LANES), mask=(lane < 128) & wanted)


@gluon.jit
def bounds_of(low, high, whole, part):
    """The lower bounds of parts, by their numbers: sevenths of [low, high]; of the whole, halves of what is left up to
    the best, near which most that weighs anything lies. The last part is what equals the greatest alone: so those that
    equal each other are found in a round. Where a bound is rounded to matters to nobody, as long as all round it alike:
    hence the fma."""
    zero = part.to(gl.float32) * 0
    halved = ((127 - part) << 23).to(gl.float32, bitcast=True)
    share = gl.where(whole > 0, halved, part.to(gl.float32) * (1 / 7))
    bound = gl.fma(share, zero + gl.where(whole > 0, -_SPAN, high - low), zero + gl.where(whole > 0, high, low))
    return gl.where(part < 7, bound, high)


@gluon.jit
def show_parts(
    mine, behind, low, high, whole, logits, rows, temperature, best, least, XW: gl.constexpr
):  # fmt: skip
    """Show what the block's rows have in each part of [low, high], at `mine`; then clear `behind`."""
    PARTS: gl.constexpr = gl.BlockedLayout([4, 8], [32, 1], [XW, 1], [1, 0])
    PACKETS: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [XW, 1], [1, 0])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, PARTS)
    OF_PARTS: gl.constexpr = gl.SliceLayout(0, PARTS)
    part = gl.arange(0, 8, layout=OF_PARTS)
    lower = bounds_of(low, high, whole, part)
    upper = gl.where(part < 7, bounds_of(low, high, whole, part + 1), float("inf"))
    sums = gl.zeros([8], gl.int64, OF_PARTS)
    counts = gl.zeros([8], gl.int32, OF_PARTS)
    tops = gl.full([8], float("-inf"), gl.float32, OF_PARTS)
    for at in range(0, rows, XW * 128):
        scaled, weight = weights_of_rows(logits, at, rows, temperature, best, least, OF_ROWS, XW * 128)
        counted = (weight > 0) & (scaled >= low) & (scaled <= high)
        inside = (scaled[:, None] >= lower[None, :]) & (scaled[:, None] < upper[None, :]) & counted[:, None]
        sums += gl.sum(gl.where(inside, weight[:, None], 0), axis=0)
        counts += gl.sum(inside.to(gl.int32), axis=0)
        tops = gl.maximum(tops, gl.max(gl.where(inside, scaled[:, None], float("-inf")), axis=0))
    sums = gl.convert_layout(sums, gl.SliceLayout(1, PACKETS))[:, None]
    counts = gl.convert_layout(counts, gl.SliceLayout(1, PACKETS))[:, None]
    tops = gl.convert_layout(tops, gl.SliceLayout(1, PACKETS))[:, None]
    at = gl.arange(0, 8, layout=gl.SliceLayout(1, PACKETS))[:, None] * 4
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, PACKETS))[None, :]
    low_bits = (sums & _BITS31).to(gl.int32)
    high_bits = (sums >> 31).to(gl.int32)
    rest = gl.where(word == 2, counts, tops.to(gl.int32, bitcast=True))
    gl.store(mine + at + word, gl.where(word == 0, low_bits, gl.where(word == 1, high_bits, rest)))
    # While the others' packets are on their way. The fence is for the next round's packet, which the same threads show.
    gl.store(behind + at + word, gl.full([8, 4], ABSENT, gl.int32, PACKETS))
    fence()


@gluon.jit
def read_parts(shown, watch, block, step, OF_PARTS: gl.constexpr, XW: gl.constexpr):
    """What all blocks have shown of each part: sums, int64; numbers, int32; greatest logits, float32 [8]."""
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [XW, 1], [1, 0])
    whose = gl.arange(0, XW * 32, layout=gl.SliceLayout(1, WORDS))[:, None]
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, WORDS))[None, :]
    pointers = gl.where(whose < gl.num_programs(0), (shown + whose * 32 + word).to(gl.int64), 0)
    words = poll_words(pointers, watch, block, step, 32)
    even, odd = gl.split(gl.reshape(words, [XW * 32, 8, 2, 2]))
    lows, counts = gl.split(even)
    highs, tops = gl.split(odd)
    sums = gl.sum((highs.to(gl.int64) << 31) + lows, axis=0)
    top = gl.max(gl.where(counts > 0, tops.to(gl.float32, bitcast=True), float("-inf")), axis=0)
    counts = gl.convert_layout(gl.sum(counts, axis=0), OF_PARTS)
    return gl.convert_layout(sums, OF_PARTS), counts, gl.convert_layout(top, OF_PARTS)


@gluon.jit
def narrowed(
    several, logits, rows, temperature, best, least, top_k, top_p, uniform, number, rounds, watch, block, step,
    NB: gl.constexpr, TOKENS: gl.constexpr, XW: gl.constexpr,
):  # fmt: skip
    """Search for a sequence's token. logits, rows: the block's. best, temperature, least: as in weights_of; top_k,
    int64, 0 for none; top_p, uniform: float64. rounds: how many there have been for the token of that number.

    Returns the token's logit over the temperature; how much its equals that are kept weigh before it (int64, below what
    they weigh together); whether it has none; and the rounds.
    """
    OF_PARTS: gl.constexpr = gl.BlockedLayout([1], [32], [XW], [0])
    sets = rounds_of(several, number, NB, TOKENS)
    part = gl.arange(0, 8, layout=OF_PARTS)
    no_sum = best.to(gl.int64) * 0
    sums = gl.zeros([8], gl.int64, OF_PARTS)
    counts = gl.zeros([8], gl.int32, OF_PARTS)
    tops = gl.zeros([8], gl.float32, OF_PARTS)
    all_sums = sums
    all_counts = counts
    all_tops = tops
    first = rounds
    search = -1  # 0: top_k, 1: top_p, 2: the token; before them the first round
    whole = 1
    low = best - _SPAN
    high = best
    counted = no_sum  # tokens above the interval, and what they weigh
    weighed = no_sum
    goal = no_sum
    total = no_sum  # weight of the tokens kept so far
    alone = 0
    while (search < 3) & (rounds - first < _MOST_ROUNDS):
        if (search < 0) | (whole == 0):
            shown = sets + (rounds & 3) * (gl.num_programs(0) * 32)
            behind = sets + ((rounds + 2) & 3) * (gl.num_programs(0) * 32) + block * 32
            show_parts(shown + block * 32, behind, low, high, whole, logits, rows, temperature, best, least, XW)
            sums, counts, tops = read_parts(shown, watch, block, step, OF_PARTS, XW)
            rounds += 1
        else:
            sums = all_sums
            counts = all_counts
            tops = all_tops
        ends = 1
        if search < 0:
            all_sums = sums
            all_counts = counts
            all_tops = tops
            total = gl.sum(sums, axis=0)
        else:
            size = gl.where(search == 0, counts.to(gl.int64), sums)
            # How far the parts reach, each with all above it.
            reach = gl.where(search == 0, counted, weighed)
            reach += gl.sum(size, axis=0) - gl.associative_scan(size, 0, added) + size
            chosen = 7 - gl.sum((reach <= goal).to(gl.int32), axis=0)
            counted += gl.sum(gl.where(part > chosen, counts, 0), axis=0).to(gl.int64)
            weighed += gl.sum(gl.where(part > chosen, sums, 0), axis=0)
            found = gl.sum(gl.where(part == chosen, counts, 0), axis=0)
            top = gl.max(gl.where(part == chosen, tops, float("-inf")), axis=0)
            bound = gl.max(gl.where(part == chosen, bounds_of(low, high, whole, part), float("-inf")), axis=0)
            alone = gl.where(found == 1, 1, 0)
            ends = gl.where((found <= 1) | (bound >= top), 1, 0)
            low = bound
            high = top
            whole = 0
        if ends > 0:
            equal = gl.maximum(weights_of(high, best, least).to(gl.int64), 1)
            if search == 0:
                total = weighed + (goal + 1 - counted) * equal
            if search == 1:
                total = weighed + ((goal - weighed) // equal + 1) * equal
            goal = gl.where(search == 2, goal - weighed, goal)
            search += 1
            if search == 0:
                goal = top_k - 1
                search = gl.where((top_k > 0) & (top_k < gl.sum(counts, axis=0)), 0, 1)
            search = gl.where((search == 1) & (top_p >= 1), 2, search)
            if search == 1:
                wanted = top_p * total.to(gl.float64)
                limit = wanted.to(gl.int64)
                limit += gl.where(limit.to(gl.float64) < wanted, 1, 0)
                goal = gl.minimum(limit, total) - 1
            if search == 2:
                # Rounding may carry the product up to the total itself, where nobody is.
                goal = gl.minimum((uniform * total.to(gl.float64)).to(gl.int64), total - 1)
            # Of logits that are no numbers none weighs anything.
            search = gl.where(total > 0, search, 3)
            if search < 3:
                whole = 1
                low = best - _SPAN
                high = best
                counted = no_sum
                weighed = no_sum
    return high, gl.where(total > 0, goal, 0), gl.where(total > 0, alone, 0), rounds
