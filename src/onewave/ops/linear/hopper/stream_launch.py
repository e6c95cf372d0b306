"""Launches the products with a matrix in a wave's stream: describes x and the result to TMA."""

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from onewave.gpu.dependent_launch import overlapping
from onewave.gpu.descriptors import describable, describe_matrix
from onewave.gpu.launch import launch_kernel
from onewave.ops.linear.choose import CompactChoice, PackedChoice
from onewave.ops.linear.hopper.compact_kernel import compact_gemm_kernel
from onewave.ops.linear.hopper.packed_kernel import packed_gemm_kernel
from onewave.wave.weights.pack import TileMatrix


def run(
    x: Tensor, matrix: TileMatrix, bias: Tensor | None, out_dtype: torch.dtype | None,
    choice: CompactChoice | PackedChoice,
) -> Tensor:  # fmt: skip
    """Launch the kernel that was chosen; return [tokens, rows] in out_dtype."""
    x = describable(x)
    rows = matrix.rows // 2 if choice.gated else matrix.rows
    out = torch.empty((x.shape[0], rows), dtype=out_dtype or x.dtype, device=x.device)
    bias = None if bias is None else bias.contiguous()
    if isinstance(choice, CompactChoice):
        _compact(x, matrix, bias, out, choice)
    else:
        _packed(x, matrix, bias, out, choice)
    return out


def _compact(x: Tensor, matrix: TileMatrix, bias: Tensor | None, out: Tensor, choice: CompactChoice) -> None:
    launch_kernel(
        compact_gemm_kernel, (choice.num_programs,),
        describe_matrix(x, choice.box_rows, 64), matrix.words, matrix.lists, matrix.places, matrix.scales,
        matrix.first_place, matrix.first_scale,
        describe_matrix(out, 64, choice.piece) if choice.to_map else out, bias,
        *out.shape, choice.row_blocks, choice.column_blocks, -(-x.shape[1] // (64 * choice.slices)),
        matrix.tiles, matrix.blocks, int(matrix.listed),
        DTYPE=gl.bfloat16, BOX_ROWS=choice.box_rows, COLUMNS=choice.columns, WARPGROUPS=choice.warpgroups,
        STAGES=choice.stages, SLICES=choice.slices, BAND=choice.band, GATED=choice.gated, TO_MAP=choice.to_map,
        R=choice.tile_rows, IMAGES=choice.images, LOOK_AHEAD=choice.look_ahead, REGISTERS=choice.registers,
        num_warps=4, **overlapping(choice.starts_early),
    )  # fmt: skip


def _packed(x: Tensor, matrix: TileMatrix, bias: Tensor | None, out: Tensor, choice: PackedChoice) -> None:
    launch_kernel(
        packed_gemm_kernel, (choice.num_programs,),
        describe_matrix(x, choice.tokens, 64), matrix.words, matrix.lists, matrix.longest, matrix.places,
        matrix.scales, matrix.first_place, matrix.first_scale,
        describe_matrix(out, choice.piece, 32 if choice.gated else 64) if choice.to_map else out, bias,
        *out.shape, choice.token_blocks, choice.row_blocks, matrix.tiles, matrix.blocks,
        TOKENS=choice.tokens, ROWS=choice.rows, STAGES=choice.stages, BAND=choice.band, GATED=choice.gated,
        TO_MAP=choice.to_map, FORMAT=choice.form, WORDS=choice.word_slots, R=choice.tile_rows, IMAGES=choice.images,
        num_warps=4, **overlapping(True),
    )  # fmt: skip
