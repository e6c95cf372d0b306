"""Launch the Hopper kernel: describe tensors to TMA, deal tiles as the Choice's Schedule says."""

from contextlib import nullcontext

import torch
from torch import Tensor

from onewave.gpu.descriptors import describe, describe_pages
from onewave.gpu.launch import launch_kernel
from onewave.gpu.scratch import held
from onewave.ops.attention.call import AttentionCall
from onewave.ops.attention.empty import write_zeros
from onewave.ops.attention.hopper.kernel import attention_kernel
from onewave.ops.attention.hopper.order import order_of
from onewave.ops.attention.hopper.plan import box_columns, config, knows_limit
from onewave.ops.attention.masks import MAX_KEYS
from onewave.ops.attention.plan import AttentionChoice

# Exponents of two that P may reach before its row is rescaled. float16 ends at 2^16; with bf16, P, sums and P V stay
# within float32 for any |v| below 2^60 (and begin below 1: hopper/softmax.py).
_HEADROOM = {torch.float16: 12, torch.bfloat16: 40}


def run(call: AttentionCall, choice: AttentionChoice) -> Tensor:
    """Write and return the output, and call.lse."""
    plan, wanted, packed = choice.schedule, call.options, call.packed
    assert plan is not None
    result = call.output()
    out, lse, q, k, v = call.rows(result)
    if q.numel() == 0:
        return result
    work, table = plan.work, None if packed is None else packed.block_table
    num_keys, first_key = work.num_keys, 0
    if packed is None:
        # Keys that no query sees may hold NaN: the descriptor leaves them out, and zeros stand in for them.
        if wanted.left is not None:
            first_key = min(max(0, work.shift - wanted.left), max(0, num_keys - 1))
        k, v = (tensor[:, :, first_key:num_keys] for tensor in (k, v))
    else:
        num_keys = k.shape[2] if table is None else table.shape[1] * k.shape[1]
        if k.numel() == 0:
            # No memory to describe; no sequence has keys, so nothing is read.
            k = v = q if table is None else k.new_empty(1, *k.shape[1:])
        elif num_keys == 0:
            return write_zeros(call, result)
    columns, constants = choice.width, config(choice.width, choice.block_m)
    box = box_columns(columns)
    sequences, (left, right) = work.sequences or 0, wanted.sides
    longest = MAX_KEYS if packed is None else packed.max_seqlen_q
    limits = wanted.right is not None or knows_limit(columns, choice.block_m, packed=packed is not None)
    # The kernel that sorts packed tiles leaves their order in the scratch.
    with held(q.device) if plan.order == "sorted" else nullcontext():
        order, which, rounds = order_of(plan, call, queue=True)
        keys_and_values = (
            describe(t, constants["BN"], box, packed is not None) if table is None
            else describe_pages(t, constants["BN"])
            for t in (k, v)
        )  # fmt: skip
        launch_kernel(
            attention_kernel, (plan.programs,),
            describe(q, 64, box, packed is not None), *keys_and_values, describe(out, 64, box, packed is not None),
            *(q if each is None else each for each in (lse, call.dense_sinks, *call.starts, order, table)),
            0 if table is None else table.stride(0),
            *((0 if table is None else t.stride(0) // t.stride(1)) for t in (k, v)),
            *((0, 0) if lse is None else lse.stride()[:2]), q.shape[1], work.group, plan.section,
            min(longest, work.num_queries), num_keys, first_key, sequences, sequences.bit_length() + 1,
            plan.slots, plan.tiles, rounds, work.shift, left, MAX_KEYS if wanted.right is None else right, 2,
            *wanted.factors,
            D=columns, HEADROOM=_HEADROOM[q.dtype], ORDER=which, PAGE=0 if table is None else k.shape[1], num_warps=4,
            **call.flags | {"RIGHT": limits}, **constants,
        )  # fmt: skip
    return result
