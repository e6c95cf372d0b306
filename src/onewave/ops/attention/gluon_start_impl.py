"""How a warpgroup of gluon_kernel_impl begins a tile, and hands its output over."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingTypeStubs=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportPrivateUsage=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportUntypedFunctionDecorator=false, reportUntypedClassDecorator=false
# pyright: reportConstantRedefinition=false, reportReturnType=false, reportAssignmentType=false
# (Triton ships no type information.)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from onewave.ops.attention.gluon_softmax_impl import capped, hidden, lazy_softmax, partial_sums
from onewave.ops.attention.gluon_tiles_impl import BEGIN, COUNT, FIRST, SHIFT, posted

__all__ = ["beside", "first_half", "first_one", "halves", "hand_over", "key_tiles_beyond"]


@gluon.jit
def key_tiles_beyond(wg: gl.constexpr, problem, slot):
    """Last key tiles of a posted tile that lie above a warpgroup's diagonal as a whole."""
    beyond = problem.shift * 0
    # Only with more rows than keys in a tile. Ping-pong wants equal steps.
    if problem.RIGHT and 64 * problem.WARPGROUPS > problem.BN and not problem.PING_PONG:
        begin = posted(problem, slot, BEGIN, 4)
        last = begin + posted(problem, slot, COUNT, 4) - 1
        end = posted(problem, slot, FIRST, 4) + wg * 64 + 63 + posted(problem, slot, SHIFT, 4) + problem.right
        own_last = gl.maximum(gl.minimum(last, gl.maximum(end, 0) // problem.BN), begin)
        beyond = last - own_last
    return beyond


@gluon.jit
def nothing_yet(problem):
    """Output, maximum and sums of a tile before its first key: (o [64, D], m [64], total [64, 4])."""
    BN: gl.constexpr = problem.BN
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, problem.D, 16])
    o = gl.zeros([64, problem.D], gl.float32, LO)
    m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, LS))
    return o, m, partial_sums(gl.zeros([64, BN], gl.float32, LS), BN)


@gluon.jit
def first_one(problem, s, j, unit, first, shift, num_keys, last, steps, cut_right, whole_steps):
    """A tile's first step: scores s of its last keys. Returns (o, m, total, p)."""
    BN: gl.constexpr = problem.BN
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, problem.D, 16])
    o, m, total = nothing_yet(problem)
    s = capped(problem, s)
    if (cut_right > 0) | (whole_steps <= 0):
        row_place = (first + shift + gl.arange(0, 64, layout=gl.SliceLayout(1, LS)))[:, None]
        lane = gl.arange(0, BN, layout=gl.SliceLayout(0, LS))[None, :]
        s = hidden(problem, s, row_place, last * BN + lane, num_keys)
    pn, m, total, _ = lazy_softmax(problem, s, m, total, unit, BN)
    p = gl.convert_layout(pn.to(problem.q.dtype), gl.DotOperandLayout(0, LO, 2))
    KS: gl.constexpr = problem.K_STAGES
    mbarrier.wait(problem.bk.index((j + 1) % KS), ((j + 1) // KS) & 1, pred=steps > 1)
    return o, m, total, p


@gluon.jit
def first_half(problem, s, j, unit, first, shift, num_keys, last, steps):
    """The same where no row sees more than the first half of the last key tile: scores s [64, BN / 2]."""
    BN: gl.constexpr = problem.BN
    HALF: gl.constexpr = BN // 2
    KS: gl.constexpr = problem.K_STAGES
    LH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, problem.D, 16])
    o, m, total = nothing_yet(problem)
    row = first + shift + gl.arange(0, 64, layout=gl.SliceLayout(1, LH))
    lane = gl.arange(0, HALF, layout=gl.SliceLayout(0, LH))[None, :]
    s = hidden(problem, capped(problem, s), row[:, None], last * BN + lane, num_keys)
    pn, m, total, _ = lazy_softmax(problem, s, gl.convert_layout(m, gl.SliceLayout(1, LH)), total, unit, HALF)
    p = beside(pn.to(problem.q.dtype), gl.zeros([64, HALF], problem.q.dtype, LH))
    mbarrier.wait(problem.bk.index((j + 1) % KS), ((j + 1) // KS) & 1, pred=steps > 1)
    return o, gl.convert_layout(m, gl.SliceLayout(1, LS)), total, gl.convert_layout(p, gl.DotOperandLayout(0, LO, 2))


@gluon.jit
def beside(left, right):
    """[64, N] twice -> [64, 2 N]; nothing leaves its thread."""
    return gl.permute(gl.join(left, right), [0, 2, 1]).reshape([64, 2 * left.shape[1]])


@gluon.jit
def halves(p):
    """[64, N] -> the first and the last N / 2 columns; nothing leaves its thread."""
    return gl.split(gl.permute(p.reshape([64, 2, p.shape[1] // 2]), [0, 2, 1]))


@gluon.jit
def hand_over(problem, buffer):
    """Give the output in Q's buffer to the warp that stores."""
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(problem.bo.index(buffer), count=1)
