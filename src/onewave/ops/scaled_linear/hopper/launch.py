"""Launches Hopper's one-byte product: describes x, the weights and the result to TMA."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from onewave.gpu.dependent_launch import overlapping
from onewave.gpu.descriptors import describable, describe_matrix
from onewave.gpu.launch import launch_kernel
from onewave.ops.scaled_linear.call import ScaledCall
from onewave.ops.scaled_linear.choose import HopperChoice
from onewave.ops.scaled_linear.hopper.kernel import scaled_kernel
from onewave.ops.scaled_linear.triton_impl import epilogue_constants, epilogue_tensors, factor_of

_DTYPES = {torch.int8: gl.int8, torch.float8_e4m3fn: gl.float8e4nv}


def run(call: ScaledCall, choice: HopperChoice) -> Tensor:
    """Launch the kernel that was chosen; return [tokens, rows] in out_dtype."""
    x, weight, out = describable(call.x), call.weight, call.output()
    (tokens, cols), rows = x.shape, weight.shape[0]
    extra, columns = choice.extra, choice.columns - choice.extra
    launch_kernel(
        scaled_kernel, (choice.num_programs,),
        describe_matrix(x, choice.box_rows, 128), describe_matrix(weight, columns, 128),
        describe_matrix(weight, extra, 128) if extra else None,
        describe_matrix(out, 64, min(columns, 64)) if choice.to_map else out,
        *epilogue_tensors(call), factor_of(call),
        tokens, rows, choice.row_blocks, choice.column_blocks, -(-cols // (128 * choice.slices)),
        DTYPE=_DTYPES[x.dtype], OUT_DTYPE=gl.float16 if call.out_dtype is torch.float16 else gl.bfloat16,
        BOX_ROWS=choice.box_rows, COLUMNS=columns, EXTRA=extra, WARPGROUPS=choice.warpgroups, STAGES=choice.stages,
        SLICES=choice.slices, BAND=choice.band, TO_MAP=choice.to_map, **epilogue_constants(call), num_warps=4,
        **overlapping(choice.starts_early),
    )  # fmt: skip
    return out
