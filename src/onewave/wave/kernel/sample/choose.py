"""Several tokens in one launch of the wave kernel: each block's best logit, the next token, its place, who goes on.

After the head every block shows, for each sequence, its best logit and that one's row; at the start of the next token
every block reads all of them and comes to the same token by itself, the first of equal ones. Block 0 keeps them for the
caller. Before a block shows its candidates it fences: whoever has read all candidates sees whatever anybody stored
before, the words cleared for the next token and the keys and values appended included.

A sequence has stopped once the token it is to be fed is one of its stop tokens (or negative: it had stopped before the
launch), or once its position is that of its last token. From then on a dummy takes its place, token 0 at position 0
that is kept in no cache, and -1 is reported. When all have stopped, or when the host has asked for the end (block 0
looks once a token and says so with its candidates), every block leaves: all decide by the same words. The exchange
partition decides; the others wait for it at the start of each token, which costs nothing, as no activation is there
before, and the loader only where it would be a whole ring ahead.

several (layout.several_words): candidates, three sets by token of [blocks, NB] packets of four int32 words (the logit's
bits, the row, whether the host has asked for the end, 0); what draw.py keeps; then, in int64 words, the launch's tokens
[TOKENS, NB]; then each block's own tokens [NB], positions [NB] and whether each has stopped [NB]; then what narrow.py
keeps. A block clears the set of the next token when it begins one: whoever reads there has read, and therefore seen
what was stored before, this block's candidates of the token between.

limits, int64 [batch, 8]: the position of the sequence's last token, then up to seven stop tokens, -1 for none
(layout.limit_words).
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

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from onewave.wave.kernel.across import by_warp, everywhere
from onewave.wave.kernel.sample.draw import clear_draws, draw_row
from onewave.wave.kernel.sample.narrow import clear_rounds
from onewave.wave.kernel.spin import ABSENT, fence, poll_words

__all__ = ["begin_token", "candidates_of", "has_stopped", "host_asks", "is_decided", "own_values", "show_best"]


@gluon.jit
def own_values(several, block, NB: gl.constexpr, TOKENS: gl.constexpr):
    """Where the block's tokens lie; its positions lie NB words on."""
    return produced_of(several, NB) + TOKENS * NB + block * (3 * NB)


@gluon.jit
def has_stopped(positions, b, NB: gl.constexpr):
    """Whether a dummy stands in a sequence's place: not 0. positions: the block's own."""
    return gl.load(positions + NB + b).to(gl.int32)


@gluon.jit
def produced_of(several, NB: gl.constexpr):
    """Where the launch's tokens lie."""
    return several + gl.num_programs(0) * (NB * 10) + NB * 4


@gluon.jit
def candidates_of(several, number, NB: gl.constexpr):
    """The candidates of the token of that number, counted over all launches."""
    return several.to(gl.pointer_type(gl.int32)) + (number % 3) * (gl.num_programs(0) * NB * 4)


@gluon.jit
def is_decided(decided, going, token, WARPS: gl.constexpr):
    """Whether the launch makes its token of that number, as soon as the block knows."""
    mbarrier.wait(decided.index(0), token & 1)
    return gl.max(going.load(gl.BlockedLayout([1], [32], [WARPS], [0])), axis=0)


@gluon.jit
def begin_token(
    several, limits, draws, head, out, out_stride, token, number, tokens, positions, batch, watch, block, step,
    decided, going, NB: gl.constexpr, R: gl.constexpr, TOKENS: gl.constexpr, DRAWS: gl.constexpr, XW: gl.constexpr,
):  # fmt: skip
    """Fill in the block's tokens and positions for the launch's token of that number, `number` over all launches, and
    decide whether the launch makes it: 1 or 0, which the other partitions hear too. DRAWS: whether any sequence's token
    may be drawn; if not, only block 0 has something to do after the last one. head: the record of the block's step that
    makes logits, in `out`."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [XW], [0])
    LIMITS: gl.constexpr = gl.BlockedLayout([8], [32], [XW], [0])
    lane = gl.arange(0, XW * 32, layout=LANES)
    which = gl.arange(0, 8, layout=LIMITS)
    own = own_values(several, block, NB, TOKENS)
    produced = produced_of(several, NB)
    live = 0
    told = 0
    rounds = 0
    if (token < TOKENS) | (block == 0) | DRAWS:
        # Where tokens are drawn, what is computed ahead of the loop would be spilled.
        for b in tl.range(batch, disable_licm=DRAWS):
            limit = gl.load(limits + b * 8 + which)
            position = gl.load(positions + b) + token
            before = gl.load(own + 2 * NB + b, mask=token > 0, other=0)
            chosen = gl.load(tokens + b)
            draws_it = token < 0
            if DRAWS:  # on its way while the candidates are waited for
                draws_it = (before == 0) & (gl.load(draws + b * (4 + TOKENS)) > 0)
            if token > 0:
                best, logit, told = best_of(several, number - 1, b, watch, block, step, NB, XW)
                if DRAWS:
                    if draws_it:
                        best, rounds = draw_row(
                            several, draws, head, out, out_stride, number - 1, token - 1, b, logit, rounds, watch,
                            block, step, NB, R, TOKENS, XW,
                        )  # fmt: skip
                chosen = gl.where(before > 0, -1, best)
                gl.store(produced + (token - 1) * NB + b, chosen, mask=block == 0)
            reached = ((which == 0) & (position >= limit)) | ((which > 0) & (chosen == limit))
            stopped = (chosen < 0) | (gl.max(reached.to(gl.int32), axis=0) > 0)
            gl.store(own + b, gl.where(stopped, 0, chosen))
            gl.store(own + NB + b, gl.where(stopped, 0, position))
            gl.store(own + 2 * NB + b, gl.where(stopped, 1, 0).to(gl.int64))
            live += gl.where(stopped, 0, 1)
        fence()
    goes = gl.where((live > 0) & (told == 0) & (token < TOKENS), 1, 0)
    # Those of two tokens before, which everybody has read by now.
    mine = candidates_of(several, number + 1, NB) + block * (NB * 4)
    gl.store(mine + lane, gl.full([XW * 32], ABSENT, gl.int32, LANES), mask=(lane < NB * 4) & (goes > 0))
    if DRAWS:
        clear_draws(several, number, goes > 0, block, NB, XW)
        clear_rounds(several, number, goes > 0, block, NB, TOKENS, XW)
    if (block == 0) & (goes == 0):
        for at in range(token * NB, TOKENS * NB, XW * 32):
            gl.store(produced + at + lane, gl.full([XW * 32], -1, gl.int64, LANES), mask=at + lane < TOKENS * NB)
    going.store(gl.full([1], goes, gl.int32, LANES))
    gl.thread_barrier()
    mbarrier.arrive(decided.index(0), count=1)
    return goes


@gluon.jit
def best_of(several, number, b, watch, block, step, NB: gl.constexpr, XW: gl.constexpr):
    """Read all candidates of a sequence's token. Returns the best one's row, int64, and logit, and whether the host
    asks for the launch's end (not 0)."""
    PACKETS: gl.constexpr = gl.BlockedLayout([4], [32], [XW], [0])
    word = gl.arange(0, XW * 128, layout=PACKETS)
    found = candidates_of(several, number, NB)
    pointers = gl.where(word // 4 < gl.num_programs(0), (found + (word // 4 * NB + b) * 4 + word % 4).to(gl.int64), 0)
    words = poll_words(pointers, watch, block, step, 4)
    even, odd = gl.split(gl.reshape(words, [XW * 32, 2, 2]))
    bits, asked = gl.split(even)
    row, nothing = gl.split(odd)
    blocks = gl.arange(0, XW * 32, layout=bits.type.layout)
    logit = gl.where(blocks < gl.num_programs(0), bits.to(gl.float32, bitcast=True), float("-inf"))
    best = gl.max(everywhere(gl.max(by_warp(logit, XW), axis=1), XW), axis=0)
    first = gl.where(logit == best, row, 2147483647)
    first = gl.min(everywhere(gl.min(by_warp(first, XW), axis=1), XW), axis=0)
    told = gl.max(everywhere(gl.max(by_warp(asked, XW), axis=1), XW), axis=0)
    # A logit that is not a number is nobody's best, and a launch that gives up may have seen half a packet.
    first = gl.where((first < 0) | (first == 2147483647), 0, first).to(gl.int64)
    return first, best, told


@gluon.jit
def host_asks(asked, wanted):
    """Whether the host asks launches to end, 1 or 0: its word in device memory, read only if wanted (else 0)."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.relaxed.sys.b32 $0, [$1]; }",
        "=&r,l,r",
        [asked.to(gl.int64), wanted.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def show_best(best, rows, asked, candidates, batch, NB: gl.constexpr, LAYOUT: gl.constexpr):
    """Show the block's best logits, each column's best and its row, float32 and int32 [NB, rows], of each sequence.
    asked: whether the host asks for the launch's end, as far as this block looks."""
    top = gl.max(best, axis=1)
    row = gl.min(gl.where(best == top[:, None], rows, 2147483647), axis=1)
    fence()
    gl.thread_barrier()
    b = gl.arange(0, NB, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    bits = top.to(gl.int32, bitcast=True)[:, None]
    values = gl.where(word == 0, bits, gl.where(word == 1, row[:, None], gl.where(word == 2, asked, 0)))
    gl.store(candidates + b * 4 + word, values, mask=(b < batch) & (word >= 0))
