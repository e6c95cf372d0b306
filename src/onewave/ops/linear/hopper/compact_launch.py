"""Launches the product with a matrix in a compact stream: describes x and the result to TMA."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from onewave.gpu.descriptors import describe_matrix
from onewave.gpu.launch import launch_kernel
from onewave.ops.linear.choose import CompactChoice
from onewave.ops.linear.hopper.compact_kernel import compact_gemm_kernel
from onewave.ops.linear.hopper.launch import can_describe
from onewave.wave.weights.pack import TileMatrix


def run(
    x: Tensor, matrix: TileMatrix, bias: Tensor | None, out_dtype: torch.dtype | None, choice: CompactChoice
) -> Tensor:
    """Launch the kernel that was chosen; return [tokens, rows] in out_dtype."""
    if not can_describe(x):
        x = x.clone(memory_format=torch.contiguous_format)
    rows = matrix.rows // 2 if choice.gated else matrix.rows
    out = torch.empty((x.shape[0], rows), dtype=out_dtype or x.dtype, device=x.device)
    early = {"PDL": True, "launch_pdl": True} if choice.starts_early else {"PDL": False}
    launch_kernel(
        compact_gemm_kernel, (choice.num_programs,),
        describe_matrix(x, choice.box_rows, 64), matrix.words, matrix.lists, matrix.places, matrix.scales,
        matrix.first_place, matrix.first_scale,
        describe_matrix(out, 64, choice.piece) if choice.to_map else out, None if bias is None else bias.contiguous(),
        x.shape[0], rows, choice.row_blocks, choice.column_blocks, -(-x.shape[1] // (64 * choice.slices)),
        matrix.tiles, matrix.blocks, int(matrix.listed),
        DTYPE=gl.bfloat16, BOX_ROWS=choice.box_rows, COLUMNS=choice.columns, WARPGROUPS=choice.warpgroups,
        STAGES=choice.stages, SLICES=choice.slices, BAND=choice.band, GATED=choice.gated, TO_MAP=choice.to_map,
        R=choice.tile_rows, IMAGES=choice.images, LOOK_AHEAD=choice.look_ahead, REGISTERS=choice.registers,
        num_warps=4, **early,
    )  # fmt: skip
    return out
