"""Launches the product with a matrix in a packed stream: describes x and the result to TMA."""

import torch
from torch import Tensor

from onewave.gpu.descriptors import describe_matrix
from onewave.gpu.launch import launch_kernel
from onewave.ops.linear.choose import PackedChoice
from onewave.ops.linear.hopper.launch import can_describe
from onewave.ops.linear.hopper.packed_kernel import packed_gemm_kernel
from onewave.wave.weights.pack import TileMatrix


def run(
    x: Tensor, matrix: TileMatrix, bias: Tensor | None, out_dtype: torch.dtype | None, choice: PackedChoice
) -> Tensor:
    """Launch the kernel that was chosen; return [tokens, rows] in out_dtype."""
    if not can_describe(x):
        x = x.clone(memory_format=torch.contiguous_format)
    rows = matrix.rows // 2 if choice.gated else matrix.rows
    out = torch.empty((x.shape[0], rows), dtype=out_dtype or x.dtype, device=x.device)
    launch_kernel(
        packed_gemm_kernel, (choice.num_programs,),
        describe_matrix(x, choice.tokens, 64), matrix.words, matrix.lists, matrix.longest, matrix.places,
        matrix.scales, matrix.first_place, matrix.first_scale,
        describe_matrix(out, choice.piece, 32 if choice.gated else 64) if choice.to_map else out,
        None if bias is None else bias.contiguous(),
        x.shape[0], rows, choice.token_blocks, choice.row_blocks, matrix.tiles, matrix.blocks,
        TOKENS=choice.tokens, ROWS=choice.rows, STAGES=choice.stages, BAND=choice.band, GATED=choice.gated,
        TO_MAP=choice.to_map, FORMAT=choice.form, WORDS=choice.word_slots, R=choice.tile_rows, IMAGES=choice.images,
        PDL=True, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return out
