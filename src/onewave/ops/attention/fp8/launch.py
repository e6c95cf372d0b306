"""Launch the float8 kernel: turn the values, describe tensors to TMA."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from onewave.gpu.descriptors import describe
from onewave.gpu.grid import grid_of
from onewave.gpu.launch import launch_kernel
from onewave.gpu.scratch import held, scratch
from onewave.ops.attention.empty import write_zeros
from onewave.ops.attention.fp8.call import Fp8Call
from onewave.ops.attention.fp8.kernel import fp8_kernel, turn_values
from onewave.ops.attention.fp8.plan import COLUMNS, FP8_TILE, KEYS, ROWS, WARPGROUPS
from onewave.ops.attention.hopper.order import order_of
from onewave.ops.attention.masks import MAX_KEYS
from onewave.ops.attention.plan import AttentionChoice

_FLOAT_BYTES = 4


def run(call: Fp8Call, choice: AttentionChoice) -> Tensor:
    """Write and return the output, and call.lse. Takes Hkv * head_dim bytes of scratch a key, in whole tiles."""
    result, plan = call.output(), choice.schedule
    out, lse, q, k, v = call.rows(result)
    if q.numel() == 0:
        return result
    wanted, packed = call.options, call.packed
    if plan is None:
        return write_zeros(call, result)
    work, first_key = plan.work, 0
    num_queries, num_keys, shift, sequences = work.num_queries, work.num_keys, work.shift, work.sequences
    if packed is None and wanted.left is not None:
        first_key = min(max(0, shift - wanted.left), max(0, num_keys - 1))
    v_tiles = -(-num_keys // KEYS) if sequences is None else num_keys // KEYS + sequences
    if packed is None and wanted.left is not None:
        # Rows whose window begins beyond the last key have a tile of zeros there, and not another head's values.
        rows = ROWS * WARPGROUPS
        v_tiles = max(v_tiles, ((num_queries - 1) // rows * rows + shift - wanted.left) // KEYS + 1)
    left, right = wanted.sides
    steps = (sequences or 0).bit_length() + 1
    longest = MAX_KEYS if packed is None else packed.max_seqlen_q
    scales = call.filled_scales()
    with held(q.device):
        sizes = (num_keys, first_key, sequences or 0, steps, v_tiles, left, right)
        tiles = _turned(v, call, sizes)
        order, which, rounds = order_of(plan, call)
        if packed is None:
            k = k[:, :, first_key:num_keys]
        integers = scales[0].view(torch.int32)  # stand in for tensors that there are not
        launch_kernel(
            fp8_kernel, (plan.programs,),
            describe(q, ROWS, COLUMNS, packed is not None), describe(k, KEYS, COLUMNS, packed is not None), tiles,
            describe(out, ROWS, COLUMNS, packed is not None), *scales,
            *(scales[0] if each is None else each for each in (lse, call.dense_sinks)),
            *(integers if each is None else each for each in (*call.starts, order)), v_tiles,
            *((0, 0) if lse is None else lse.stride()[:2]), q.shape[1], work.group, plan.section,
            min(longest, num_queries), num_keys, first_key, sequences or 0, steps, plan.slots, plan.tiles, rounds,
            shift, left, right, *wanted.factors, ORDER=which, num_warps=4, **FP8_TILE, **call.flags,
        )  # fmt: skip
    return result


def _turned(v: Tensor, call: Fp8Call, sizes: tuple[int, ...]) -> TensorDescriptor:
    """Launch turn_values; the descriptor of what it writes. sizes: its arguments from num_keys to right."""
    batch, kv_heads, _, head_dim = v.shape
    v_tiles = sizes[4]
    rows = batch * kv_heads * v_tiles * COLUMNS
    turned = scratch(v.device, rows * KEYS // _FLOAT_BYTES, "turned values").view(torch.uint8)
    values = v.view(torch.uint8)
    grid, axis = grid_of(batch * v_tiles, kv_heads)
    flags = {name: call.flags[name] for name in ("RAGGED", "TOP_LEFT", "LEFT", "RIGHT")}
    launch_kernel(
        turn_values, grid,
        values, turned, *(values if each is None else each for each in call.starts), *v.stride()[:3], *sizes,
        head_dim=head_dim, D=COLUMNS, BN=KEYS, AXIS=axis, num_warps=4, **flags,
    )  # fmt: skip
    tiles = turned[: rows * KEYS].view(torch.float8_e4m3fn).view(rows, KEYS)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    return TensorDescriptor(tiles, [rows, KEYS], [KEYS, 1], [COLUMNS, KEYS], layout)
