"""How a warpgroup of hopper/kernel.py begins a tile, ends it and hands its output over."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from onewave.ops.attention.hopper.columns import output_comes, place_in, queries, scores, store_output, times
from onewave.ops.attention.hopper.softmax import capped, hidden, lazy_softmax, partial_sums
from onewave.ops.attention.hopper.tiles import (
    BATCH,
    BEGIN,
    COUNT,
    EXISTS,
    FIRST,
    HEAD,
    NUM_KEYS,
    ROWS,
    SHIFT,
    START_Q,
    WARPGROUP_THREADS,
    posted,
)

_LN2 = gl.constexpr(0.6931471805599453)
_LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def key_tiles_beyond(wg, problem, slot):
    """Last key tiles of a posted tile that lie above a warpgroup's diagonal as a whole."""
    beyond = problem.shift * 0
    # Only with more rows than keys in a tile. Ping-pong wants equal steps.
    if problem.RIGHT and 64 * problem.WARPGROUPS > problem.BN and not problem.PING_PONG:
        begin = posted(problem.posts, slot, BEGIN, 4)
        last = begin + posted(problem.posts, slot, COUNT, 4) - 1
        last_row = posted(problem.posts, slot, FIRST, 4) + wg * 64 + 63
        end = last_row + posted(problem.posts, slot, SHIFT, 4) + problem.right
        own_last = gl.maximum(gl.minimum(last, gl.maximum(end, 0) // problem.BN), begin)
        beyond = last - own_last
    return beyond


@gluon.jit
def tile_comes(wg, problem, tile, j):
    """Wait for a tile's post and Q, release the keys that lie beyond unread, and wait for the first that are read.

    j: the place in the ring where the tile's keys begin. Returns (whether there is such a tile, place of those keys).
    """
    W: gl.constexpr = problem.WARPGROUPS
    KS: gl.constexpr = problem.K_STAGES
    QS: gl.constexpr = problem.Q_STAGES
    bk = problem.bk
    slot = tile % QS
    mbarrier.wait(problem.bq.index(slot * W + wg), (tile // QS) & 1)
    exists = posted(problem.posts, slot, EXISTS, 4)
    for _ in range(key_tiles_beyond(wg, problem, slot)):
        mbarrier.wait(bk.index(j % KS), (j // KS) & 1)
        mbarrier.arrive(bk.index(KS + j % KS), count=1)
        j += 1
    mbarrier.wait(bk.index(j % KS), (j // KS) & 1, pred=exists != 0)
    return exists, j


@gluon.jit
def pass_values_beyond(wg, problem, slot, j):
    """Release the values that lie beyond unread. j: the place of the first that is read."""
    VS: gl.constexpr = problem.V_STAGES
    beyond = key_tiles_beyond(wg, problem, slot)
    for i in range(beyond):
        v = j - beyond + i
        mbarrier.wait(problem.bv.index(v % VS), (v // VS) & 1)
        mbarrier.arrive(problem.bv.index(VS + v % VS), count=1)


@gluon.jit
def first_product(wg, problem, NARROW: gl.constexpr, slot, j):
    """Begin a posted tile's first product, with its last tile of keys or, if NARROW, half of it; both have come."""
    KS: gl.constexpr = problem.K_STAGES
    N: gl.constexpr = problem.BN // 2 if NARROW else problem.BN
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    keys = place_in(problem, problem.sk, j % KS)
    if NARROW:
        keys = keys.slice(0, N).permute([1, 0])
        q = queries(problem, slot * problem.WARPGROUPS + wg)
        s = warpgroup_mma(q, keys, gl.zeros([64, N], gl.float32, layout), use_acc=False, is_async=True)
    else:
        s = scores(problem, queries(problem, slot * problem.WARPGROUPS + wg), keys)
    return s


@gluon.jit
def first_step(wg, problem, NARROW: gl.constexpr, slot, s, j, unit):
    """Read a posted tile for a warpgroup and do its first step, from first_product's scores s; releases the keys.

    Returns (first row, shift, number of keys, last key tile, key tiles, those that the limit to the right cuts, those
    that need a maximum, those before the first that a limit to the left cuts; m [64], total [64, 4], P [64, BN], all
    float32). Key tiles are counted from the last one.
    """
    BN: gl.constexpr = problem.BN
    HALF: gl.constexpr = BN // 2
    KS: gl.constexpr = problem.K_STAGES
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    first = posted(problem.posts, slot, FIRST, 4) + wg * 64
    num_keys = posted(problem.posts, slot, NUM_KEYS, 4)
    shift = posted(problem.posts, slot, SHIFT, 4)
    steps = posted(problem.posts, slot, COUNT, 4)
    beyond = key_tiles_beyond(wg, problem, slot)
    last = posted(problem.posts, slot, BEGIN, 4) + steps - 1 - beyond
    steps -= beyond
    whole_end = num_keys // BN
    if problem.RIGHT:
        whole_end = gl.minimum(whole_end, gl.maximum(first + shift + problem.right + 1, 0) // BN)
    cut_right = gl.maximum(last + 1 - whole_end, 0)
    # After the first tile, unless some row saw none of it, no row's m is -inf.
    slow = gl.maximum(cut_right, 1)
    if problem.RIGHT:
        slow = gl.where(last * BN > first + shift + problem.right, cut_right + 1, slow)
    whole_steps = steps
    if problem.LEFT:
        whole_start = (gl.maximum(first + 63 + shift - problem.left, 0) + BN - 1) // BN
        whole_steps = gl.minimum(steps, last + 1 - whole_start)
    if NARROW:
        seen_end = gl.minimum(num_keys, first + 64 + shift + problem.right)
        if seen_end <= last * BN + HALF:
            mbarrier.arrive(problem.bk.index(KS + j % KS), count=1)
            m, total, pn = first_half(problem, s, unit, first, shift, num_keys, last)
        else:
            LH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
            keys = problem.sk.index(j % KS).slice(HALF, HALF).permute([1, 0])
            # From registers: where loops share the descriptor of Q in shared memory with this branch, ptxas 12.8 leaves
            # part of it unset in the other one.
            q = problem.sq.index(slot * problem.WARPGROUPS + wg).load(gl.DotOperandLayout(0, LS, 2))
            rest = warpgroup_mma(q, keys, gl.zeros([64, HALF], gl.float32, LH), use_acc=False, is_async=True)
            rest = warpgroup_mma_wait(0, deps=[rest])
            mbarrier.arrive(problem.bk.index(KS + j % KS), count=1)
            whole = gl.convert_layout(beside(s, rest), LS)
            m, total, pn = first_one(problem, whole, unit, first, shift, num_keys, last, cut_right, whole_steps)
    else:
        mbarrier.arrive(problem.bk.index(KS + j % KS), count=1)
        m, total, pn = first_one(problem, s, unit, first, shift, num_keys, last, cut_right, whole_steps)
    mbarrier.wait(problem.bk.index((j + 1) % KS), ((j + 1) // KS) & 1, pred=steps > 1)
    return first, shift, num_keys, last, steps, cut_right, slow, whole_steps, m, total, pn


@gluon.jit
def nothing_yet(problem):
    """Maximum and sums of a tile before its first key: (m [64], total [64, 4])."""
    BN: gl.constexpr = problem.BN
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, LS))
    return m, partial_sums(gl.zeros([64, BN], gl.float32, LS), BN)


@gluon.jit
def first_one(problem, s, unit, first, shift, num_keys, last, cut_right, whole_steps):
    """Scores s of a tile's last keys -> (m, total, P)."""
    BN: gl.constexpr = problem.BN
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    m, total = nothing_yet(problem)
    s = capped(problem, s)
    if (cut_right > 0) | (whole_steps <= 0):
        row_place = (first + shift + gl.arange(0, 64, layout=gl.SliceLayout(1, LS)))[:, None]
        lane = gl.arange(0, BN, layout=gl.SliceLayout(0, LS))[None, :]
        s = hidden(problem, s, row_place, last * BN + lane, num_keys)
    pn, m, total, _ = lazy_softmax(problem, s, m, total, unit, BN)
    return m, total, pn


@gluon.jit
def first_half(problem, s, unit, first, shift, num_keys, last):
    """The same where no row sees more than the first half of the last key tile: scores s [64, BN / 2]."""
    BN: gl.constexpr = problem.BN
    HALF: gl.constexpr = BN // 2
    LH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    m, total = nothing_yet(problem)
    row = first + shift + gl.arange(0, 64, layout=gl.SliceLayout(1, LH))
    lane = gl.arange(0, HALF, layout=gl.SliceLayout(0, LH))[None, :]
    s = hidden(problem, capped(problem, s), row[:, None], last * BN + lane, num_keys)
    pn, m, total, _ = lazy_softmax(problem, s, gl.convert_layout(m, gl.SliceLayout(1, LH)), total, unit, HALF)
    pn = beside(pn, gl.zeros([64, HALF], gl.float32, LH))
    return gl.convert_layout(m, gl.SliceLayout(1, LS)), total, gl.convert_layout(pn, LS)


@gluon.jit
def finish(wg, problem, slot, o, m, total):
    """Divide a posted tile's output by its sums, write it where its Q was, and its log-sums to memory."""
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, problem.BN, 16])
    sum_of_row = gl.convert_layout(gl.sum(total, axis=1), gl.SliceLayout(1, LS))
    # A row that sees no key gives 0 and -inf, sink or not.
    empty = sum_of_row == 0.0
    share = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, LS))
    if problem.SINKS:
        # One more key, of this score and with a value of zero.
        sink = gl.load(problem.sinks + posted(problem.posts, slot, HEAD, 4)).to(gl.float32) * _LOG2E
        higher = gl.where(empty, 0.0, gl.maximum(m, sink))
        share = gl.exp2(m - higher)
        sum_of_row = sum_of_row * share + gl.exp2(sink - higher)
        m = higher
    share = gl.where(empty, 0.0, share / gl.where(empty, 1.0, sum_of_row))
    if problem.LSE:
        lse = gl.where(empty, -float("inf"), (m + gl.log2(gl.where(empty, 1.0, sum_of_row))) * _LN2)
        base = posted(problem.posts, slot, HEAD, 4).to(gl.int64) * problem.lse_head
        if problem.RAGGED:
            base += posted(problem.posts, slot, START_Q, 4)
        else:
            base += posted(problem.posts, slot, BATCH, 4).to(gl.int64) * problem.lse_batch
        row = posted(problem.posts, slot, FIRST, 4) + wg * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LS))
        gl.store(problem.lse + base + row, lse, mask=row < posted(problem.posts, slot, ROWS, 4))
    store_output(problem, queries(problem, slot * problem.WARPGROUPS + wg), times(problem, o, share))


@gluon.jit
def beside(left, right):
    """[64, N] twice -> [64, 2 N]; nothing leaves its thread."""
    return gl.permute(gl.join(left, right), [0, 2, 1]).reshape([64, 2 * left.shape[1]])


@gluon.jit
def halves(p):
    """[64, N] -> the first and the last N / 2 columns; nothing leaves its thread."""
    return gl.split(gl.permute(p.reshape([64, 2, p.shape[1] // 2]), [0, 2, 1]))


@gluon.jit
def end(wg, problem, slot, v, o, m, total, PENDING: gl.constexpr):
    """Wait for a posted tile's last product, under way as all but PENDING ones, release its values, those at place v,
    and give its output to the warp that stores. Returns what the product was."""
    o = output_comes(problem, o, PENDING)
    mbarrier.arrive(problem.bv.index(problem.V_STAGES + v), count=1)
    finish(wg, problem, slot, o, m, total)
    hand_over(problem, slot * problem.WARPGROUPS + wg)
    return o


@gluon.jit
def hand_over(problem, buffer):
    """Give the output in Q's buffer to the warp that stores."""
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(problem.bo.index(buffer), count=WARPGROUP_THREADS)
