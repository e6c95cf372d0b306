"""Warpgroups of Hopper's attention kernels towards each other: their numbers, turns, votes, and one code."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onewave.gpu.ptx.shared_warpgroups import NUMBER, ONLY, SHARED_WARPGROUPS

SHARES = gl.constexpr(SHARED_WARPGROUPS.applies())
"""Whether warpgroups that do the same can run one copy of their code (gpu/ptx/shared_warpgroups.py)."""

# Named barriers from 10 on: Triton's own and those of one_code have lower numbers.
_SYNC = gl.constexpr("bar.sync $1, 256; mov.u32 $0, 0;")
_ARRIVE = gl.constexpr("bar.arrive $1, 256; mov.u32 $0, 0;")
_REGISTERS = gl.constexpr("=r,r")
# A vote whose result is every thread's own register, which the last statement hands on as a scalar; Triton's
# reduction goes through shared memory three times. On an H200 the barrier was faster on every shape tried.
_DECLARE = gl.constexpr(".reg .b32 onewave_vote_{0}; mov.b32 onewave_vote_{0}, 0; mov.b32 $0, 0;")
_BALLOT = gl.constexpr("mov.b32 onewave_vote_{0}, $1; mov.b32 $0, 0;")
_VOTE = gl.constexpr(
    "{{ .reg .pred mine, any; setp.ne.s32 mine, onewave_vote_{0}, 0; barrier.cta.red.or.pred any, $1, 128, mine;"
    " selp.b32 onewave_vote_{0}, 1, 0, any; mov.b32 $0, 0; }}"
)
_RESULT = gl.constexpr(
    "{{ .reg .pred any; setp.ne.s32 any, onewave_vote_{0}, 0; vote.sync.any.pred any, any, 0xffffffff;"
    " selp.b32 $0, 1, 0, any; }}"
)
_VOTE_BARRIER = gl.constexpr(10)
_NUMBER, _ONLY = gl.constexpr(NUMBER), gl.constexpr(ONLY)


@gluon.jit
def barrier_sync(number):
    gl.inline_asm_elementwise(_SYNC, _REGISTERS, [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def barrier_arrive(number):
    gl.inline_asm_elementwise(_ARRIVE, _REGISTERS, [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def written(pattern, copy):
    return pattern.format(copy)


@gluon.constexpr_function
def numbering(pattern, warpgroups, registers):
    return pattern.format(warpgroups=warpgroups, registers=registers)


@gluon.jit
def declare_vote(COPY: gl.constexpr):
    """COPY: the number of the code's copy, one for all warpgroups that run it."""
    code: gl.constexpr = written(_DECLARE, COPY)
    gl.inline_asm_elementwise(code, _REGISTERS, [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def cast_ballots(COPY: gl.constexpr, ballots):
    """Each thread keeps its one of the warpgroup's [4, 8, 4] ballots."""
    code: gl.constexpr = written(_BALLOT, COPY)
    gl.inline_asm_elementwise(code, _REGISTERS, [ballots], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def vote(wg, COPY: gl.constexpr):
    """Look for one that is not 0 among the ballots cast; a barrier of the warpgroup."""
    code: gl.constexpr = written(_VOTE, COPY)
    gl.inline_asm_elementwise(code, _REGISTERS, [_VOTE_BARRIER + wg], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def voted(COPY: gl.constexpr):
    """1 if the vote found one."""
    code: gl.constexpr = written(_RESULT, COPY)
    return gl.inline_asm_elementwise(code, _REGISTERS, [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def own_warpgroup(WARPGROUPS: gl.constexpr, REGISTERS: gl.constexpr):
    """The number of the warpgroup that runs the first partition's code, of so many that do; registers: a thread's."""
    code: gl.constexpr = numbering(_NUMBER, WARPGROUPS, REGISTERS)
    return gl.inline_asm_elementwise(code, _REGISTERS, [0], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def only_warpgroup(wg: gl.constexpr):
    """Told where no other warpgroup goes on, amid what all run: barriers from here on have constants for numbers."""
    code: gl.constexpr = written(_ONLY, wg)
    gl.inline_asm_elementwise(code, _REGISTERS, [0], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def twin():
    """The partition of a warpgroup that runs the first one's code instead."""
