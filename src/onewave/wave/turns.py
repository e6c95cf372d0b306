"""The turns in which the wave kernel's multiply partition makes a step's products.

A turn is G row blocks over all of K. Where activations do not fit shared memory at once they pass through it, and a
turn is all of the step's row blocks, at most G, over one chunk of them; program.py orders the tiles alike. PASSES:
whether any step's activations do not fit; programs without such a step have no instruction of this.
"""
# ruff: noqa: RET505
# (A branch on a constant is taken when the kernel is compiled, so both of its sides stand as they are.)
# pyright: reportUnknownVariableType=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportMissingTypeStubs=false
# (Triton ships no type information.)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

__all__ = ["ends_in", "let_go", "part_of", "turns_of"]


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
