"""Records of a block's steps in shared memory, brought there by the copy engine ahead of the exchange partition.

A step begins with its record: beside the stream of weights device memory, and the second-level cache too, take longer
to answer than most of what a step then does, and the first-level cache is too small, and too busy, to keep a line for
the length of a step. So the next records lie in shared memory, and in a decode step `places`, a launch's pointers. The
multiply partition reads its few words itself: it has the time that a hand-off takes.

Records come in groups of TOGETHER, numbered through the launch, group n in place n % GROUPS with a barrier of its own.
The block asks for the first GROUPS - 1 before its partitions part. At the end of a group's first step the exchange
partition asks for the group GROUPS - 1 further on, in place of the group before, which nobody has read since that step
began, with a fence that the copy engine's writes are ordered by. So at any step the records of NOTES more have been
asked for.
"""
# ruff: noqa: RET505, SIM108, RUF100
# (A branch on a constant is taken when the kernel is compiled, so both of its sides stand as they are.)
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingTypeStubs=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# (Triton ships no type information.)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from onewave.wave.kernel.words import RECORD_SIZE
from onewave.wave.plan.layout import GROUPS, POINTERS, STEP_WORDS, TOGETHER

__all__ = [
    "aligned_place",
    "bring_first",
    "bring_next",
    "let_go",
    "noted",
    "notes_memory",
    "place_of",
    "place_word",
    "record_of",
]

_POINTERS = gl.constexpr(POINTERS)
_TOGETHER = gl.constexpr(TOGETHER)
_GROUPS = gl.constexpr(GROUPS)
_BYTES = gl.constexpr(TOGETHER * STEP_WORDS * 4)


@gluon.jit
def notes_memory(records, PLACES: gl.constexpr):
    """Shared memory of records and, if PLACES, of `places`, and the barriers that say when they are there.

    What no partition reads must not be brought: its memory would be given to others, to what the partitions are passed
    among them, while the copy engine still writes to it.
    """
    notes = gl.allocate_shared_memory(gl.int32, [_GROUPS, _TOGETHER, RECORD_SIZE], records.layout)
    if PLACES:
        table = gl.allocate_shared_memory(gl.int32, [_TOGETHER, RECORD_SIZE], records.layout)
    else:
        table = notes  # which nobody reads as `places`
    nfull = gl.allocate_shared_memory(gl.int64, [_GROUPS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_GROUPS):
        mbarrier.init(nfull.index(i), count=1)
    return notes, table, nfull


@gluon.jit
def bring(records, row, where, full):
    mbarrier.expect(full, _BYTES)
    tma.async_copy_global_to_shared(records, [row, 0], full, where)


@gluon.jit
def groups_of(num_steps):
    """Groups that the records of so many steps are brought in."""
    return (num_steps + _TOGETHER - 1) // _TOGETHER


@gluon.jit
def bring_first(records, first_step, num_steps, notes, table, nfull, PLACES: gl.constexpr):
    """Bring the first groups of all the block's steps, with the first one `places`, if anybody reads them."""
    if num_steps > 0:
        if PLACES:
            mbarrier.expect(nfull.index(0), 2 * _BYTES)
            tma.async_copy_global_to_shared(records, [0, 0], nfull.index(0), table)
        else:
            mbarrier.expect(nfull.index(0), _BYTES)
        tma.async_copy_global_to_shared(records, [1 + first_step, 0], nfull.index(0), notes.index(0))
    for group in range(1, gl.minimum(groups_of(num_steps), _GROUPS - 1)):
        bring(records, 1 + first_step + group * _TOGETHER, notes.index(group), nfull.index(group))


@gluon.jit
def let_go(step):
    """At a step's beginning. If it is a group's first one, the group before it will be written to: behind its loads."""
    if step % _TOGETHER == 0:
        fence_async_shared()


@gluon.jit
def bring_next(records, first_step, num_steps, step, notes, nfull):
    """At the end of a group's first step: bring what comes in place of the group before, which is done with."""
    group = step // _TOGETHER + (_GROUPS - 1)
    if (step % _TOGETHER == 0) & (group < groups_of(num_steps)):
        place = group % _GROUPS
        bring(records, 1 + first_step + group * _TOGETHER, notes.index(place), nfull.index(place))


@gluon.jit
def record_of(step, notes, nfull):
    """The record of a step, as soon as it is there: of the one that is being done, or of up to NOTES steps ahead."""
    group = step // _TOGETHER
    mbarrier.wait(nfull.index(group % _GROUPS), (group // _GROUPS) & 1)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows = notes._reinterpret(gl.int32, [_GROUPS * _TOGETHER, RECORD_SIZE], PLAIN)
    return rows.index(group % _GROUPS * _TOGETHER + step % _TOGETHER)


@gluon.jit
def noted(record, number):
    """A word of a record in shared memory."""
    cells = record._reinterpret(gl.int32, [RECORD_SIZE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return cells.index(number).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])).item()


@gluon.jit
def place_word(places, number):
    """What stands at a place of `places` in shared memory, int64."""
    cells = places._reinterpret(gl.int64, [_POINTERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return cells.index(number).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])).item()


@gluon.jit
def place_of(places, number: gl.constexpr, TYPE: gl.constexpr):
    """The pointer that stands there."""
    return place_word(places, number).to(gl.pointer_type(TYPE))


@gluon.jit
def aligned_place(places, number: gl.constexpr, TYPE: gl.constexpr):
    """The pointer that stands there, of a tensor that begins at a multiple of 16 bytes."""
    return gl.multiple_of(place_word(places, number).to(gl.pointer_type(TYPE)), 16)
