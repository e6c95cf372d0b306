"""Which program of the Hopper kernel takes which tile, as memory on the device: dealt tables and sorted slots.

A table is made once a shape and stream and kept: it travels through pinned memory without a synchronisation. Where a
CUDA graph is recorded, one that an eager call made before is taken; without one the closed form serves. The program
of a tile changes no bit.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from onewave.gpu.launch import launch_kernel
from onewave.gpu.scratch import scratch
from onewave.gpu.tape import taken
from onewave.ops.attention.call import AttentionCall
from onewave.ops.attention.hopper.plan import Schedule, dealt

CLOSED, TABLE, SORTED, QUEUE = 0, 1, 2, 3
"""ORDER of hopper/kernel.py."""
_MAX_TABLES = 256
_SLOTS_A_PROGRAM = 32

_Key = tuple[object, ...]
# By shape, and then by stream: a stream must not read what another has not finished writing.
_tables: OrderedDict[_Key, dict[int, tuple[Tensor, Tensor]]] = OrderedDict()
# Tensors that a recorded graph may point at are never freed.
_recorded: dict[int, Tensor] = {}
_looking = threading.Lock()


def order_of(plan: Schedule, call: AttentionCall, *, queue: bool = False) -> tuple[Tensor | None, int, int]:
    """The kernel's (order, ORDER, rounds) for a schedule; launches sort_slots where that sorts packed sequences.

    order: int32, [programs, rounds] positions of a table, or [slots] sorted slots and a 0. Its memory is the operator's
    own. queue: sorted slots are taken by the next free program, one after another, instead of in turns.
    """
    device, wanted, packed = call.q.device, call.options, call.packed
    if plan.order == "table":
        table = taken(partial(_table, plan, device))
        if table is not None:
            return table, TABLE, table.shape[1]
    if plan.order == "sorted" and packed is not None:
        order = scratch(device, plan.slots + 1, "order of tiles").view(torch.int32)
        sequences = packed.num_sequences
        programs = -(-plan.slots // _SLOTS_A_PROGRAM)
        launch_kernel(
            sort_slots, (programs,),
            order, *call.starts, sequences, sequences.bit_length() + 1, plan.slots,
            min(packed.max_seqlen_q, plan.work.num_queries), *wanted.sides, BM=plan.rows, BN=plan.keys,
            TOP_LEFT=wanted.top_left, LEFT=wanted.left is not None, RIGHT=wanted.right is not None,
            MINE=_SLOTS_A_PROGRAM, OTHERS=128, num_warps=4,
        )  # fmt: skip
        if queue:
            return order, QUEUE, plan.tiles
        return order, SORTED, plan.turns
    return None, CLOSED, plan.turns


def _table(plan: Schedule, device: torch.device) -> Tensor | None:
    if device.type != "cuda":
        return _host_table(plan)
    key: _Key = (device, plan)
    with _looking:
        if torch.cuda.is_current_stream_capturing():
            # Recording begins with a synchronisation, so what an earlier call made is there on every stream.
            for table, _ in _tables.get(key, {}).values():
                return _recorded.setdefault(table.data_ptr(), table)
            return None
        made = _tables.setdefault(key, {})
        _tables.move_to_end(key)
        stream = torch.cuda.current_stream(device).cuda_stream
        if stream not in made:
            pinned = _host_table(plan).pin_memory()
            made[stream] = (pinned.to(device, non_blocking=True), pinned)
        if len(_tables) > _MAX_TABLES:
            _tables.popitem(last=False)
        return made[stream][0]


def _host_table(plan: Schedule) -> Tensor:
    return torch.tensor(dealt(plan), dtype=torch.int32, device="cpu")


@triton.jit
def work_of(
    slot, slots, starts_q, starts_k, sequences, search_steps, longest, left, right,
    BM: tl.constexpr, BN: tl.constexpr, TOP_LEFT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Key tiles of each slot's tile, 0 where it has none; as tile_of of hopper/tiles.py finds them."""
    low = slot * 0
    high = low + sequences
    for _ in range(search_steps):
        middle = (low + high) // 2
        below = tl.load(starts_q + middle) // BM + middle <= slot
        low = tl.where(below & (middle < high), middle, low)
        high = tl.where(below, high, middle)
    start_q, start_k = tl.load(starts_q + low), tl.load(starts_k + low)
    num_queries = tl.load(starts_q + low + 1) - start_q
    num_keys = tl.load(starts_k + low + 1) - start_k
    first = (slot - (start_q // BM + low)) * BM
    shift = low * 0 if TOP_LEFT else num_keys - num_queries
    end = num_keys
    begin = low * 0
    if RIGHT:
        end = tl.minimum(end, tl.minimum(first + BM, num_queries) + shift + right)
    if LEFT:
        begin = tl.maximum(first + shift - left, 0) // BN
    count = tl.maximum((tl.maximum(end, 0) + BN - 1) // BN - begin, 1)
    exists = (slot < slots) & (first >= 0) & (first < tl.minimum(num_queries, longest))
    return tl.where(exists, count, 0)


@triton.jit(do_not_specialize=["sequences", "search_steps", "slots", "longest", "left", "right"])
def sort_slots(
    order, starts_q, starts_k, sequences, search_steps, slots, longest, left, right, BM: tl.constexpr, BN: tl.constexpr,
    TOP_LEFT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, MINE: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """order[rank] = slot, from the longest tile to the shortest; -1 for slots without a tile, which come last; then 0.

    Each program ranks MINE slots against all: by the number of slots with more work, or as much and a higher number.
    """
    mine = tl.program_id(0) * MINE + tl.arange(0, MINE)
    work = work_of(
        mine, slots, starts_q, starts_k, sequences, search_steps, longest, left, right, BM, BN, TOP_LEFT, LEFT, RIGHT
    )
    rank = tl.zeros([MINE], tl.int32)
    for at in range(0, slots, OTHERS):
        other = at + tl.arange(0, OTHERS)
        others = work_of(
            other, slots, starts_q, starts_k, sequences, search_steps, longest, left, right, BM, BN, TOP_LEFT, LEFT,
            RIGHT,
        )  # fmt: skip
        more = others[None, :] > work[:, None]
        more |= (others[None, :] == work[:, None]) & (other[None, :] > mine[:, None]) & (other[None, :] < slots)
        rank += tl.sum(more.to(tl.int32), 1)
    tl.store(order + rank, tl.where(work > 0, mine, -1), mask=mine < slots)
    if tl.program_id(0) == 0:
        tl.store(order + slots, 0)
