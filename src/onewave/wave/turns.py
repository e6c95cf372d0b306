"""The turns in which the wave kernel's multiply partition makes a step's products, and their hand-over.

A turn is G row blocks over all of K. Where activations do not fit shared memory at once they pass through it, and a
turn is all of the step's row blocks, at most G, over one chunk of them; program.py orders the tiles alike. PASSES:
whether any step's activations do not fit; programs without such a step have no instruction of this.
"""
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

__all__ = ["ends_in", "hand_over", "let_go", "part_of", "turns_of"]


@gluon.jit
def turns_of(blocks, chunks, G: gl.constexpr, XS: gl.constexpr, PASSES: gl.constexpr):
    """How many turns a step takes."""
    turns = (blocks + G - 1) // G
    if PASSES:
        turns = gl.where((chunks > XS) & (blocks > 0), chunks, turns)
    return turns


@gluon.jit
def part_of(turn, tiles, chunks, G: gl.constexpr, XS: gl.constexpr, PER_CHUNK: gl.constexpr, PASSES: gl.constexpr):
    """A turn's first row block, its first tile of each and the one behind its last, and whether its first row block
    waits for activations. PER_CHUNK: tiles a chunk."""
    block = turn * G
    first = turn * 0  # a tensor, as below
    end = tiles
    waits = turn == 0
    if PASSES:
        passing = chunks > XS
        block = gl.where(passing, 0, block)
        first = gl.where(passing, turn * PER_CHUNK, 0)
        end = gl.where(passing, gl.minimum(first + PER_CHUNK, tiles), tiles)
        waits = waits | passing
    return block, first, end, waits


@gluon.jit
def ends_in(turn, chunks, XS: gl.constexpr, PASSES: gl.constexpr):
    """Whether the turn's row blocks are finished, and handed over, with it."""
    if PASSES:
        return (chunks <= XS) | (turn + 1 == chunks)
    else:
        return True


@gluon.jit
def let_go(turn, blocks, chunks, chunks_before, xempty, G: gl.constexpr, XS: gl.constexpr, PASSES: gl.constexpr):
    """Let the activations go that no later turn uses: all with the last one, or, as they pass, the turn's own."""
    first = gl.where((turn + 1) * G >= blocks, 0, chunks)
    end = chunks
    if PASSES:
        passing = chunks > XS
        first = gl.where(passing, turn, first)
        end = gl.where(passing, turn + 1, end)
    for used in range(first, end):
        mbarrier.arrive(xempty.index((chunks_before + used) % XS), count=1)


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
    place = results % 2
    mbarrier.wait(pempty.index(place), ((results // 2) & 1) ^ 1)
    PARTS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    where = parts.index(place)._reinterpret(gl.float32, [NB, 64 // R, G, R], PARTS)
    where.store(gl.permute(gl.reshape(result, [64 // R, R, NB, G]), (2, 0, 3, 1)))
    gl.thread_barrier()
    mbarrier.arrive(pfull.index(place), count=1)


@gluon.jit
def wanted_part(acc, NB: gl.constexpr, R: gl.constexpr):
    """Of a block's product the part that is wanted, [64, NB]: see layout.py."""
    Q: gl.constexpr = 64 // R
    if Q > 1:
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, acc.type.layout))
        column = gl.arange(0, Q * NB, layout=gl.SliceLayout(0, acc.type.layout))
        wanted = (row // R)[:, None] == (column // NB)[None, :]
        return gl.sum(gl.reshape(gl.where(wanted, acc, 0.0), [64, Q, NB]), axis=1)
    else:
        return acc
