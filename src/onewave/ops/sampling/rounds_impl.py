"""top_k and top_p without a sort: a search for a place in the sorted vocabulary.

ops.sampling orders a row's tokens by their logits over the temperature, the first of equals first, and weighs each with
a whole number. top_k keeps the tokens up to the one of a rank. top_p keeps those up to the one in whose weight a number
falls. The sampled token is again the one in whose weight a number falls. Each of the three is one search, and the sum
of the weights kept is all that the next has to know of the one before.

A search goes in rounds of one exchange between thread blocks. All blocks cut an interval of logits into eight parts,
the first of which is its lower end alone. Each block shows, of its share of the vocabulary, the sum of weights, the
number and the least logit from every part on, and reads those of all. Sums of whole numbers are the same in any order,
so all find the part where the rank or the number falls. The next round is about the interval from the least
logit in that part to its end. A search ends with a part that holds one token, or nothing but equals. Tokens that weigh
nothing are none: they change no sum and are not sampled. The first round, over all that weigh anything, serves all
three searches.

In `sets`, behind what draw_impl.py keeps: two groups by launch of four sets by round of eight parts of [blocks] packets
of four int32 words (31 bits of the sum, 31 more, the number, the least logit as `ordered` has it). A block clears its
own of the next launch's group, and in each round, once it has shown what it found, the set of the round after the next.
A block that reads there has read what this block has shown in between, behind a fence. What stood there two rounds
before is not read any more, as all have shown the round between.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onewave.wave.kernel.spin import ABSENT, fence, poll_words

# Weight of a probability of 1, and the number that, added to at most that, leaves no bits behind the point.
_UNIT = gl.constexpr(2.0**44)
_ROUNDER = gl.constexpr(2.0**52)
_BITS31 = gl.constexpr(0x7FFFFFFF)
# A logit (over the temperature) as far below the best, or farther, weighs nothing: exp(-32) is less than half of 2^-44.
_SPAN = gl.constexpr(32.0)
# More rounds than any three searches take: each makes the interval seven times narrower, and between 32 and the
# smallest float32 lie 154 factors of two. Only a launch that gives up reads what never ends.
_MAX_ROUNDS = gl.constexpr(192)


@gluon.jit
def weights_of(scaled, best, least):
    """Weights of logits over the temperature, as float64 whole numbers; 0 for those below `least`, and for those that
    are no numbers. best: the best logit of all over the temperature."""
    weight = gl.exp((scaled - best).to(gl.float64)) * _UNIT
    weight = (weight + _ROUNDER) - _ROUNDER
    return gl.where(weight >= least, weight, 0.0)


@gluon.jit
def over(logit, inverse):
    """A logit over the temperature, float32, from 1 / temperature in float64: rounded as a division rounds it. (The
    product is off by 2^-52 of itself at most, and no quotient of float32 is nearer than 2^-49 to where rounding turns.)
    """
    return (logit.to(gl.float64) * inverse).to(gl.float32)


@gluon.jit
def weights_of_rows(logits, at, rows, inverse, best, least, LAYOUT: gl.constexpr, SIZE: gl.constexpr):
    """SIZE rows of logits (words of float32) from `at` on: over the temperature, float32, and what they weigh, int64; 0
    from `rows` on."""
    row = at + gl.arange(0, SIZE, layout=LAYOUT)
    logit = gl.load(logits + row, mask=row < rows, other=0, cache_modifier=".cg").to(gl.float32, bitcast=True)
    scaled = over(logit, inverse)
    return scaled, gl.where(row < rows, weights_of(scaled, best, least), 0.0).to(gl.int64)


@gluon.jit
def rounds_of(sets, number):
    """The sets of the rounds of the launch of that number."""
    behind = gl.num_programs(0) * 8 + 8
    return sets.to(gl.pointer_type(gl.int32)) + behind + (number & 1) * (gl.num_programs(0) * 128)


@gluon.jit
def clear_rounds(sets, number, block, XW: gl.constexpr):
    """Mark all of a block's packets of a launch as absent."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [XW], [0])
    lane = gl.arange(0, 128, layout=LANES)
    # Packet by packet of four sets of eight parts, which lie side by side.
    mine = rounds_of(sets, number) + lane // 4 * (gl.num_programs(0) * 4) + block * 4 + lane % 4
    gl.store(mine, gl.full([128], ABSENT, gl.int32, LANES))


@gluon.jit
def ordered(x):
    """float32 as whole numbers in the same order, none of them ABSENT."""
    bits = (x + 0.0).to(gl.int32, bitcast=True)  # of the two zeros the positive
    return bits ^ ((bits >> 31) & _BITS31)


@gluon.jit
def unordered(number):
    """The float32 of a number of `ordered`."""
    return (number ^ ((number >> 31) & _BITS31)).to(gl.float32, bitcast=True)


@gluon.jit
def bounds_of(low, high, best, whole, part):
    """Where parts begin, by their numbers: of an interval, which does not hold `high`, its lower end alone and then
    sevenths of what is left; of the whole, halves of what is left up to the best, near which most that weighs anything
    lies. Where a bound is rounded to does not matter, as long as all blocks round it alike: hence the fma."""
    zero = part.to(gl.float32) * 0
    halved = ((127 - part) << 23).to(gl.float32, bitcast=True)
    share = gl.where(whole > 0, halved, (part - 1).to(gl.float32) * (1 / 7))
    bound = gl.fma(share, zero + gl.where(whole > 0, -_SPAN, high - low), zero + gl.where(whole > 0, best, low))
    return gl.where((whole > 0) | (part < 1), bound, gl.maximum(bound, unordered(ordered(low) + 1)))


@gluon.jit
def four_words(first, second, third, fourth):
    """A last axis of four words of what is shaped [.., 8]."""
    return gl.join(gl.join(first, third), gl.join(second, fourth))


@gluon.jit
def words_apart(words, SHAPE: gl.constexpr):
    """The four words that four_words has put together. SHAPE: of words, with the last axis cut in two pairs."""
    even, odd = gl.split(gl.reshape(words, SHAPE))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def of_thread(values):
    """Sums of the four rows that a thread has, one part and then the next: [n, 8] -> [n / 4, 8]."""
    return gl.sum(gl.reshape(values, [values.shape[0] // 4, 4, 8]), axis=1)


@gluon.jit
def show_parts(
    mine, behind, low, high, whole, logits, rows, inverse, best, least, XW: gl.constexpr
):  # fmt: skip
    """Show what the block's rows have from each part of an interval on, at `mine`; then clear `behind`. Every thread
    looks at four rows, and all parts of them; a sum, or the least, of 32-bit numbers over a warp's lanes is one
    instruction."""
    PARTS: gl.constexpr = gl.BlockedLayout([4, 8], [32, 1], [XW, 1], [1, 0])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, PARTS)
    OF_PARTS: gl.constexpr = gl.SliceLayout(0, PARTS)
    SIZE: gl.constexpr = XW * 128
    # Four lanes add up a quarter each of the warps' sums of a part.
    WARPS: gl.constexpr = gl.BlockedLayout([XW // 4, 1, 4], [4, 8, 1], [XW, 1, 1], [2, 1, 0])
    OWN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, WARPS))
    part = gl.arange(0, 8, layout=OF_PARTS)
    bounds = bounds_of(low, high, best, whole, part)[None, :]
    sums = gl.zeros([8], gl.int64, OWN)
    counts = gl.zeros([8], gl.int32, OWN)
    leasts = gl.full([8], _BITS31, gl.int32, OWN)
    for at in range(0, rows, SIZE):
        scaled, weight = weights_of_rows(logits, at, rows, inverse, best, least, OF_ROWS, SIZE)
        counted = (weight > 0) & (scaled >= low) & (scaled < high)
        reached = gl.where(counted, scaled, float("nan"))[:, None] >= bounds
        # 15 bits and what is left: the sums of 1,024 of them fit 32 bits.
        first = of_thread(gl.where(reached, (weight & 32767).to(gl.int32)[:, None], 0))
        second = of_thread(gl.where(reached, ((weight >> 15) & 32767).to(gl.int32)[:, None], 0))
        third = of_thread(gl.where(reached, (weight >> 30).to(gl.int32)[:, None], 0))
        words = four_words(first, second, third, of_thread(reached.to(gl.int32)))
        of_warps = gl.sum(gl.reshape(words, [XW, 32, 8, 4]), axis=1)
        words = gl.sum(gl.convert_layout(of_warps, WARPS), axis=0)
        first, second, third, fourth = words_apart(words, [8, 2, 2])
        here = first.to(gl.int64) + (second.to(gl.int64) << 15) + (third.to(gl.int64) << 30)
        sums += gl.convert_layout(here, OWN, assert_trivial=True)
        counts += gl.convert_layout(fourth, OWN, assert_trivial=True)
        found = gl.where(reached, ordered(scaled)[:, None], _BITS31)
        of_warps = gl.min(gl.reshape(found, [XW, SIZE // XW, 8]), axis=1)
        leasts = gl.minimum(leasts, gl.min(gl.convert_layout(of_warps, gl.SliceLayout(2, WARPS)), axis=0))
    packets = gl.reshape(four_words((sums & _BITS31).to(gl.int32), (sums >> 31).to(gl.int32), counts, leasts), [8, 4])
    part = gl.arange(0, 8, layout=gl.SliceLayout(1, packets.type.layout))[:, None]
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, packets.type.layout))[None, :]
    where = part * (gl.num_programs(0) * 4) + word
    gl.store(mine + where, packets)
    # While the others' packets are on their way. The fence is for the next round's packet, which the same thread shows.
    gl.store(behind + where, packets | ABSENT)
    fence()


@gluon.jit
def read_parts(shown, watch, block, step, KEPT: gl.constexpr, XW: gl.constexpr):
    """Read all blocks' sums of each part, put together: int32 [8, 4], a packet each. A warp reads a part's."""
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [XW, 1], [1, 0])
    part = gl.arange(0, 8, layout=gl.SliceLayout(1, WORDS))[:, None]
    word = gl.arange(0, XW * 128, layout=gl.SliceLayout(0, WORDS))[None, :]
    pointers = (shown + part * (gl.num_programs(0) * 4) + word).to(gl.int64)
    words = poll_words(gl.where(word // 4 < gl.num_programs(0), pointers, 0), watch, block, step, 32)
    lows, highs, counts, leasts = words_apart(words, [8, XW * 32, 2, 2])
    sums = gl.sum((highs.to(gl.int64) << 31) + lows, axis=1)
    least = gl.min(gl.where(counts > 0, leasts, _BITS31), axis=1)
    count = gl.sum(counts, axis=1)
    OF_PARTS: gl.constexpr = gl.SliceLayout(1, KEPT)
    low_bits = gl.convert_layout((sums & _BITS31).to(gl.int32), OF_PARTS, assert_trivial=True)[:, None]
    high_bits = gl.convert_layout((sums >> 31).to(gl.int32), OF_PARTS, assert_trivial=True)[:, None]
    count = gl.convert_layout(count, OF_PARTS, assert_trivial=True)[:, None]
    least = gl.convert_layout(least, OF_PARTS, assert_trivial=True)[:, None]
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, KEPT))[None, :]
    return gl.where(word == 0, low_bits, gl.where(word == 1, high_bits, gl.where(word == 2, count, least)))


@gluon.jit
def narrowed(
    sets, logits, rows, inverse, best, least, top_k, top_p, uniform, number, watch, block, step, XW: gl.constexpr
):  # fmt: skip
    """Search for a row's token. logits, rows: the block's share. best, least: as in weights_of; inverse: as in over;
    top_k, int64, 0 for none; top_p, uniform: float64. number: of the launch.

    Returns the token's logit over the temperature; how much its equals that are kept weigh before it (int64, below what
    they weigh together); and whether it has none.
    """
    # A warp keeps a part; what is to be decided every thread works out by itself.
    KEPT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [XW, 1], [1, 0])
    WHOLE: gl.constexpr = gl.BlockedLayout([8, 4], [32, 1], [XW, 1], [1, 0])
    packets_of = rounds_of(sets, number)
    no_sum = best.to(gl.int64) * 0
    packets = gl.zeros([8, 4], gl.int32, KEPT)
    first_packets = packets
    rounds = 0
    search = -1  # 0: top_k, 1: top_p, 2: the token; before them the first round
    whole = 1
    low = best - _SPAN
    high = unordered(ordered(best) + 1)
    counted = no_sum  # tokens above the interval, and what they weigh
    weighed = no_sum
    goal = no_sum
    total = no_sum  # weight of the tokens kept so far
    alone = 0
    while (search < 3) & (rounds < _MAX_ROUNDS):
        if (search < 0) | (whole == 0):
            shown = packets_of + (rounds & 3) * (gl.num_programs(0) * 32)
            behind = packets_of + ((rounds + 2) & 3) * (gl.num_programs(0) * 32) + block * 4
            show_parts(shown + block * 4, behind, low, high, whole, logits, rows, inverse, best, least, XW)
            packets = read_parts(shown, watch, block, step, KEPT, XW)
            rounds += 1
        else:
            packets = first_packets
        lows, highs, counts, leasts = words_apart(gl.convert_layout(packets, WHOLE), [8, 2, 2])
        sums = (highs.to(gl.int64) << 31) + lows
        part = gl.arange(0, 8, layout=lows.type.layout)
        ends = 1
        if search < 0:
            first_packets = packets
            total = gl.sum(gl.where(part == 0, sums, 0), axis=0)
            found = gl.sum(gl.where(part == 0, counts, 0), axis=0)
        else:
            before = gl.where(search == 0, goal - counted, goal - weighed)
            chosen = 7 - gl.sum((gl.where(search == 0, counts.to(gl.int64), sums) <= before).to(gl.int32), axis=0)
            above = gl.sum(gl.where(part == chosen + 1, counts, 0), axis=0)
            found = gl.sum(gl.where(part == chosen, counts, 0), axis=0) - above
            counted += above.to(gl.int64)
            weighed += gl.sum(gl.where(part == chosen + 1, sums, 0), axis=0)
            alone = gl.where(found == 1, 1, 0)
            high = gl.where(chosen < 7, bounds_of(low, high, best, whole, chosen + 1), high)
            low = unordered(gl.min(gl.where(part == chosen, leasts, _BITS31), axis=0))
            # One token; the lower end alone; or nothing but the best.
            ends = gl.where((found <= 1) | ((whole == 0) & (chosen <= 0)) | (low >= best), 1, 0)
            whole = 0
        if ends > 0:
            equal = gl.maximum(weights_of(low, best, least).to(gl.int64), 1)
            if search == 0:
                total = weighed + (goal + 1 - counted) * equal
            if search == 1:
                total = weighed + ((goal - weighed) // equal + 1) * equal
            goal = gl.where(search == 2, goal - weighed, goal)
            search += 1
            if search == 0:
                goal = top_k - 1
                search = gl.where((top_k > 0) & (top_k < found), 0, 1)
            search = gl.where((search == 1) & (top_p >= 1), 2, search)
            if search == 1:
                wanted = top_p * total.to(gl.float64)
                limit = wanted.to(gl.int64)
                limit += gl.where(limit.to(gl.float64) < wanted, 1, 0)
                goal = gl.minimum(limit, total) - 1
            if search == 2:
                # Rounding may carry the product up to the total itself, where no token is.
                goal = gl.minimum((uniform * total.to(gl.float64)).to(gl.int64), total - 1)
            # Logits that are no numbers all weigh nothing.
            search = gl.where(total > 0, search, 3)
            if search < 3:
                whole = 1
                low = best - _SPAN
                high = unordered(ordered(best) + 1)
                counted = no_sum
                weighed = no_sum
    return low, gl.where(total > 0, goal, 0), gl.where(total > 0, alone, 0)
