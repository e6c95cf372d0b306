"""Launches the persistent product: describes x, the weights and the result to TMA."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from onewave.gpu.dependent_launch import overlapping
from onewave.gpu.descriptors import describable, describe_matrix
from onewave.gpu.launch import launch_kernel
from onewave.ops.linear.choose import LinearCall, ProductChoice
from onewave.ops.linear.hopper.kernel import gemm_kernel


def run(call: LinearCall, choice: ProductChoice) -> Tensor:
    """Launch the kernel that was chosen; return [tokens, rows] in out_dtype."""
    x, weight, bias = describable(call.x), call.weight, call.bias
    tokens, (rows, cols) = x.shape[0], weight.shape
    rows = rows // 2 if choice.gated else rows
    out = torch.empty((tokens, rows), dtype=call.out_dtype or x.dtype, device=x.device)
    extra, columns = choice.extra, choice.columns - choice.extra
    launch_kernel(
        gemm_kernel, (choice.num_programs,),
        describe_matrix(x, choice.box_rows, 64), describe_matrix(weight, columns, 64),
        describe_matrix(weight, extra, 64) if extra else None,
        describe_matrix(out, 64, min(columns, 64)) if choice.to_map else out,
        None if bias is None else bias.contiguous(),
        tokens, rows, choice.row_blocks, choice.column_blocks, -(-cols // (64 * choice.slices)),
        DTYPE=gl.bfloat16 if x.dtype is torch.bfloat16 else gl.float16, BOX_ROWS=choice.box_rows,
        COLUMNS=columns, EXTRA=extra, WARPGROUPS=choice.warpgroups, STAGES=choice.stages, SLICES=choice.slices,
        BAND=choice.band, GATED=choice.gated, TO_MAP=choice.to_map, num_warps=4, **overlapping(choice.starts_early),
    )  # fmt: skip
    return out
