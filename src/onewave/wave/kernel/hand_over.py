"""How the multiply partition hands finished row blocks over to the exchange partition."""
# ruff: noqa: RET505
# (A branch on a constant is taken when the kernel is compiled, so both of its sides stand as they are.)
# pyright: reportUnknownVariableType=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportMissingTypeStubs=false
# pyright: reportAssignmentType=false, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# (Triton ships no type information.)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

__all__ = ["hand_over", "hand_over_one"]


@gluon.jit
def hand_over(
    acc0, acc1, acc2, acc3, parts, pfull, pempty, results, NB: gl.constexpr, R: gl.constexpr, G: gl.constexpr
):  # fmt: skip
    """Give finished products of G row blocks, the first of these, to the exchange partition. results: such groups so
    far in this launch."""
    result = wanted_part(acc0, NB, R)
    if G == 2:
        result = gl.join(result, wanted_part(acc1, NB, R))
    if G == 4:
        last = gl.join(wanted_part(acc1, NB, R), wanted_part(acc3, NB, R))
        result = gl.join(gl.join(result, wanted_part(acc2, NB, R)), last)
    give(result, 0, parts, pfull, pempty, results, NB, R, G)


@gluon.jit
def hand_over_one(
    acc, own: gl.constexpr, parts, pfull, pempty, results, NB: gl.constexpr, R: gl.constexpr, G: gl.constexpr
):  # fmt: skip
    """hand_over of one of the group's row blocks, its `own`th, where other partitions give the others."""
    give(wanted_part(acc, NB, R), own, parts, pfull, pempty, results, NB, R, G)


@gluon.jit
def give(
    result, first: gl.constexpr, parts, pfull, pempty, results, NB: gl.constexpr, R: gl.constexpr, G: gl.constexpr
):  # fmt: skip
    """Store what is wanted of the group's row blocks from `first` on, [64, NB] of one or [64, NB, ..] of all, and tell
    the exchange partition."""
    COUNT: gl.constexpr = 1 if len(result.shape) == 2 else G
    place = results % 2
    mbarrier.wait(pempty.index(place), ((results // 2) & 1) ^ 1)
    PARTS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    where = parts.index(place)._reinterpret(gl.float32, [NB, 64 // R, G, R], PARTS)
    if COUNT < G:
        where = where.slice(first, COUNT, dim=2)
    where.store(gl.permute(gl.reshape(result, [64 // R, R, NB, COUNT]), (2, 0, 3, 1)))
    gl.thread_barrier()
    mbarrier.arrive(pfull.index(place), count=1)


@gluon.jit
def wanted_part(acc, NB: gl.constexpr, R: gl.constexpr):
    """Of a block's product, [64, N] or in parts (widen.parts_of), what is wanted, [64, NB]: see layout.py."""
    Q: gl.constexpr = 64 // R
    if len(acc.shape) == 3:
        P: gl.constexpr = acc.shape[0]
        if Q > P:
            rows = gl.arange(0, 64 // P, layout=gl.SliceLayout(0, gl.SliceLayout(2, acc.type.layout)))
            columns = gl.arange(0, Q // P * NB, layout=gl.SliceLayout(0, gl.SliceLayout(1, acc.type.layout)))
            meets = (rows // R)[None, :, None] == (columns // NB)[None, None, :]
            acc = gl.sum(gl.reshape(gl.where(meets, acc, 0.0), [P, 64 // P, Q // P, NB]), axis=2)
        return gl.reshape(acc, [64, NB])
    elif Q > 1:
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, acc.type.layout))
        column = gl.arange(0, Q * NB, layout=gl.SliceLayout(0, acc.type.layout))
        wanted = (row // R)[:, None] == (column // NB)[None, :]
        return gl.sum(gl.reshape(gl.where(wanted, acc, 0.0), [64, Q, NB]), axis=1)
    else:
        return acc
