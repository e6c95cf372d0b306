"""Bring step records to shared memory by TMA, ahead of the exchange partition, and read them there.

Why: beside the weight stream, a load from device memory or L2 takes longer than most of a step. L1 is too small and too
busy to keep a record for the length of a step. A decode step also brings `places`, the launch's pointers. The multiply
partition reads its few words from device memory: a hand-off hides those loads.

Records come in groups of TOGETHER. Group n of a thread block lies in place n % GROUPS, which has its own mbarrier. The
first GROUPS - 1 groups are requested before the partitions part. At the end of a group's first step, the exchange
partition requests the group GROUPS - 1 further on. It replaces the group before, which nothing has read since that step
began; a fence orders those reads before TMA's writes. So at any step the records of RECORDS_AHEAD steps ahead are
requested.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from onewave.wave.kernel.words import RECORD_SIZE
from onewave.wave.plan.layout import GROUPS, POINTERS, STEP_WORDS, TOGETHER

_POINTERS = gl.constexpr(POINTERS)
_TOGETHER = gl.constexpr(TOGETHER)
_GROUPS = gl.constexpr(GROUPS)
_BYTES = gl.constexpr(TOGETHER * STEP_WORDS * 4)


@gluon.jit
def records_memory(box, PLACES: gl.constexpr):
    """Allocate shared memory for record groups and, if PLACES, for `places`; initialise the groups' mbarriers.

    Returns groups, places and mbarriers (parameters.Records). Without PLACES nothing is copied for `places`: Triton
    would give unread memory to the partitions' captures while TMA still writes to it.
    """
    groups = gl.allocate_shared_memory(gl.int32, [_GROUPS, _TOGETHER, RECORD_SIZE], box.layout)
    if PLACES:
        places = gl.allocate_shared_memory(gl.int32, [_TOGETHER, RECORD_SIZE], box.layout)
    else:
        places = groups  # not read as `places`
    full = gl.allocate_shared_memory(gl.int64, [_GROUPS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_GROUPS):
        mbarrier.init(full.index(i), count=1)
    return groups, places, full


@gluon.jit
def copy_group(records, group, place):
    """Request a group of the thread block's records for a place."""
    row = 1 + records.first_step + group * _TOGETHER
    where = records.groups.index(place)
    full = records.full.index(place)
    mbarrier.expect(full, _BYTES)
    tma.async_copy_global_to_shared(records.box, [row, 0], full, where)


@gluon.jit
def num_groups(num_steps):
    """Groups of so many step records."""
    return (num_steps + _TOGETHER - 1) // _TOGETHER


@gluon.jit
def copy_first_records(records, PLACES: gl.constexpr):
    """Request the thread block's first GROUPS - 1 groups and, if PLACES, `places` with the first group."""
    full = records.full.index(0)
    if records.num_steps > 0:
        if PLACES:
            mbarrier.expect(full, 2 * _BYTES)
            tma.async_copy_global_to_shared(records.box, [0, 0], full, records.places)
        else:
            mbarrier.expect(full, _BYTES)
        tma.async_copy_global_to_shared(records.box, [1 + records.first_step, 0], full, records.groups.index(0))
    for group in range(1, gl.minimum(num_groups(records.num_steps), _GROUPS - 1)):
        copy_group(records, group, group)


@gluon.jit
def fence_records(step):
    """At a group's first step, order all reads of the group before, which is replaced next, before TMA's writes."""
    if step % _TOGETHER == 0:
        fence_async_shared()


@gluon.jit
def copy_next_records(records, step):
    """At the end of a group's first step, request the group that replaces the one before it."""
    group = step // _TOGETHER + (_GROUPS - 1)
    if (step % _TOGETHER == 0) & (group < num_groups(records.num_steps)):
        copy_group(records, group, group % _GROUPS)


@gluon.jit
def record_of(step, records):
    """Wait for a step's record: of the current step, or of up to RECORDS_AHEAD steps ahead. Returns shared memory."""
    group = step // _TOGETHER
    mbarrier.wait(records.full.index(group % _GROUPS), (group // _GROUPS) & 1)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows = records.groups._reinterpret(gl.int32, [_GROUPS * _TOGETHER, RECORD_SIZE], PLAIN)
    return rows.index(group % _GROUPS * _TOGETHER + step % _TOGETHER)


@gluon.jit
def record_word(record, number):
    """Load a word of a record from shared memory."""
    cells = record._reinterpret(gl.int32, [RECORD_SIZE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return cells.index(number).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])).item()


@gluon.jit
def place_word(places, number):
    """Load an int64 of `places` (layout.Place) from shared memory."""
    cells = places._reinterpret(gl.int64, [_POINTERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return cells.index(number).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])).item()


@gluon.jit
def place_pointer(places, number: gl.constexpr, TYPE: gl.constexpr):
    """Load a pointer of `places`."""
    return place_word(places, number).to(gl.pointer_type(TYPE))


@gluon.jit
def aligned_pointer(places, number: gl.constexpr, TYPE: gl.constexpr):
    """Load a pointer of `places` to a tensor that is 16-byte aligned."""
    return gl.multiple_of(place_word(places, number).to(gl.pointer_type(TYPE)), 16)
