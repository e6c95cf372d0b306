"""Several tokens in one launch of the wave kernel: each block's best logit, the next token, its place.

After the head every block shows, for each sequence, its best logit and that one's row; at the start of the next token
every block reads all of them and comes to the same token by itself, the first of equal ones. Block 0 keeps them for the
caller. Before a block shows its candidates it fences: whoever has read all candidates sees whatever anybody stored
before, the words cleared for the next token and the keys and values appended included.

several (layout.several_words): candidates, three sets by token of [blocks, NB] packets of four int32 words (the logit's
bits, the row, 0, 0); then, in int64 words, the launch's tokens [TOKENS, NB]; then each block's own tokens [NB] and
positions [NB]. A block clears the set of the next token when it begins one: whoever reads there has read, and therefore
seen what was stored before, this block's candidates of the token between.
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

__all__ = ["begin_token", "candidates_of", "choose", "own_values", "produced_of", "show_best"]


@gluon.jit
def own_values(several, block, NB: gl.constexpr, TOKENS: gl.constexpr):
    """Where the block's tokens lie; its positions lie NB words on."""
    return produced_of(several, NB) + TOKENS * NB + block * (2 * NB)


@gluon.jit
def produced_of(several, NB: gl.constexpr):
    """Where the launch's tokens lie."""
    return several + gl.num_programs(0) * (NB * 6)


@gluon.jit
def candidates_of(several, number, NB: gl.constexpr):
    """The candidates of the token of that number, counted over all launches."""
    return several.to(gl.pointer_type(gl.int32)) + (number % 3) * (gl.num_programs(0) * NB * 4)


@gluon.jit
def begin_token(
    several, token, number, tokens, positions, batch, watch, block, step, NB: gl.constexpr, TOKENS: gl.constexpr,
    XW: gl.constexpr,
):  # fmt: skip
    """Fill in the block's tokens and positions for the launch's token of that number, `number` over all launches."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [XW], [0])
    lane = gl.arange(0, XW * 32, layout=LANES)
    own = own_values(several, block, NB, TOKENS)
    if token == 0:
        gl.store(own + lane, gl.load(tokens + lane, mask=lane < batch, other=0), mask=lane < batch)
    else:
        choose(several, token - 1, number - 1, batch, watch, block, step, NB, TOKENS, XW)
    position = gl.load(positions + lane, mask=lane < batch, other=0) + token
    gl.store(own + NB + lane, position, mask=lane < batch)
    # Those of two tokens before, which everybody has read by now.
    mine = candidates_of(several, number + 1, NB) + block * (NB * 4)
    gl.store(mine + lane, gl.full([XW * 32], ABSENT, gl.int32, LANES), mask=lane < NB * 4)
    gl.thread_barrier()


@gluon.jit
def choose(
    several, token, number, batch, watch, block, step, NB: gl.constexpr, TOKENS: gl.constexpr, XW: gl.constexpr,
):  # fmt: skip
    """Read all candidates of a token and keep the best of each sequence, in block 0 for the caller as well."""
    PACKETS: gl.constexpr = gl.BlockedLayout([4], [32], [XW], [0])
    word = gl.arange(0, XW * 128, layout=PACKETS)
    found = candidates_of(several, number, NB)
    own = own_values(several, block, NB, TOKENS)
    there = word // 4 < gl.num_programs(0)
    for b in range(batch):
        pointers = gl.where(there, (found + (word // 4 * NB + b) * 4 + word % 4).to(gl.int64), 0)
        words = poll_words(pointers, watch, block, step, 4)
        even, odd = gl.split(gl.reshape(words, [XW * 32, 2, 2]))
        bits, nothing = gl.split(even)
        row, nothing = gl.split(odd)
        blocks = gl.arange(0, XW * 32, layout=bits.type.layout)
        logit = gl.where(blocks < gl.num_programs(0), bits.to(gl.float32, bitcast=True), float("-inf"))
        best = gl.max(logit, axis=0)
        first = gl.min(gl.where(logit == best, row, 2147483647), axis=0)
        # A logit that is not a number is nobody's best, and a launch that gives up may have seen half a packet.
        chosen = gl.where((first < 0) | (first == 2147483647), 0, first).to(gl.int64)
        gl.store(own + b, chosen)
        if block == 0:
            gl.store(produced_of(several, NB) + token * NB + b, chosen)
    fence()


@gluon.jit
def show_best(best, rows, candidates, batch, NB: gl.constexpr, LAYOUT: gl.constexpr):
    """Show the block's best logits, each column's best and its row, float32 and int32 [NB, rows], of each sequence."""
    top = gl.max(best, axis=1)
    row = gl.min(gl.where(best == top[:, None], rows, 2147483647), axis=1)
    fence()
    gl.thread_barrier()
    b = gl.arange(0, NB, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    bits = top.to(gl.int32, bitcast=True)[:, None]
    values = gl.where(word == 0, bits, gl.where(word == 1, row[:, None], 0))
    gl.store(candidates + b * 4 + word, values, mask=(b < batch) & (word >= 0))
