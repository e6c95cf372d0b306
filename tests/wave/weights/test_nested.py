"""Weights with nested scales and minima: checkpoints' values exactly, and their tiles in a stream."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kit.models.tiny_gguf import k_blocks
from kit.operands.nested import float_rows, nested_rows
from onewave.base.blocks import BLOCK_FORMATS, open_blocks
from onewave.base.grouped import Code, GroupedMatrix, GroupFormat, GroupNumbers, Offset
from onewave.base.weight_formats import NESTED, NIBBLES, mixed
from onewave.engine.load import kept
from onewave.ops.embedding import embedding
from onewave.wave.kernel.words import copied_rows, group_of, has_minima, is_nested, scale_rows, tile_bytes, wide_group
from onewave.wave.plan.layout import tile_shape
from onewave.wave.weights.formats import tile_format
from onewave.wave.weights.formats.nested import restore_nested
from onewave.wave.weights.formats.tile_format import UnpackedRows
from onewave.wave.weights.pack_impl import look_up_rows
from onewave.wave.weights.row_table import RowTable

FORM, CPU = mixed(NESTED, {"down0": 2}), torch.device("cpu")


def matrix_of(kind: str) -> GroupedMatrix:
    """Random rows of a GGUF type, or of 4 or 8 bits with zero points for 128 columns."""
    dice = np.random.default_rng(5)
    if kind.endswith("_K"):
        return open_blocks(k_blocks(dice.standard_normal((6, 512), np.float32), kind), kind)
    if kind in BLOCK_FORMATS:
        import gguf

        qtype = gguf.GGMLQuantizationType[kind]
        return open_blocks(gguf.quants.quantize(dice.standard_normal((6, 512), np.float32), qtype), kind)
    bits, code = int(kind[0]), Code.SIGNED if "signed" in kind else Code.UNSIGNED
    low, high = (-(1 << bits - 1), 1 << bits - 1) if code is Code.SIGNED else (0, 1 << bits)
    kind_of: Any = np.int8 if code is Code.SIGNED else np.uint8
    codes = dice.integers(low, high, (6, 640)).astype(kind_of)
    zeros = dice.integers(max(low, 1 if bits == 8 else low), high, (6, 5)).astype(kind_of)
    scales = dice.uniform(1e-4, 1e-1, (6, 5)).astype(np.float16).astype(np.float32)
    form = GroupFormat(code, bits, 128, Offset.ZERO_POINT)
    return GroupedMatrix(form, codes.shape, codes, GroupNumbers(scales), zeros)


@pytest.mark.parametrize(("kind", "width"), [
    ("Q4_K", 1), ("Q4_K", 2), ("Q5_K", 2), ("Q6_K", 2), ("Q8_0", 2), ("Q5_0", 2), ("Q5_1", 2), ("Q4_0", 2),
    ("Q4_1", 2), ("4 bits", 1), ("4 bits", 2), ("8 bits", 2), ("8 bits signed", 2),
])  # fmt: skip
def test_nested_rows_have_the_very_values_of_the_checkpoint(kind: str, width: int) -> None:
    matrix = matrix_of(kind)
    fits = (kept._fits_nibbles, kept._fits_bytes)[width - 1]
    assert fits(matrix.format, FORM)
    rows, exact = kept._nested(matrix.on(CPU), FORM, width)
    assert exact
    assert torch.equal(restore_nested(rows, 4 * width, torch.float32), torch.from_numpy(matrix.dequantize()))


def test_what_no_signed_byte_holds_is_told() -> None:
    matrix = matrix_of("8 bits")
    zeros = matrix.zero_points.copy()
    zeros[2, 1] = 0
    assert not kept._nested(replace(matrix, zero_points=zeros).on(CPU), FORM, 2)[1]
    for form in (BLOCK_FORMATS["Q4_1"], BLOCK_FORMATS["Q6_K"], GroupFormat(Code.UNSIGNED, 4, 64, Offset.ZERO_POINT)):
        assert not kept._fits_nibbles(form, FORM)


@pytest.mark.parametrize(("width", "batch", "images", "cols"), [
    (1, 1, 4, 2080), (1, 4, 2, 600), (2, 1, 4, 1504), (2, 8, 2, 160),
])  # fmt: skip
def test_packed_rows_come_back_by_plain_indexing_and_by_the_kernel(
    width: int, batch: int, images: int, cols: int
) -> None:
    shape = tile_shape(batch, weight_bytes=FORM.weight_bytes, images=images)
    tiles = tile_format(FORM, shape, torch.float16, width)
    made = nested_rows(2 * shape.rows, cols, 4 * width)
    packed = tiles.pack_groups(made)
    assert packed.images.shape[1] == tiles.shape.tile_bytes == shape.tile_bytes
    expected = restore_nested(made, 4 * width, torch.float16)
    assert torch.equal(tiles.restore(packed, cols), expected)
    out = torch.full((1, 2 * shape.rows, cols), torch.nan, dtype=torch.float16)
    tiles.unpack(packed, torch.arange(len(packed.images)).int(), UnpackedRows(out, 1, 0, 0, 2))
    assert torch.equal(out[0], expected)


@pytest.mark.parametrize("block", [None, 128])
def test_fp8_rows_have_the_very_values_of_the_checkpoint_and_come_back(block: int | None) -> None:
    form = mixed(NIBBLES[128, False], {"down0": 2}, floats=True)
    shape = tile_shape(2, weight_bytes=form.weight_bytes, images=4)
    codes = float_rows(2 * shape.rows, 640).codes.numpy()
    scales = np.random.default_rng(1).uniform(1e-5, 1e-2, (len(codes), 5 if block else 1)).astype(np.float32)
    matrix = GroupedMatrix(GroupFormat(Code.E4M3, 8, block, number="F32"), codes.shape, codes, GroupNumbers(scales))
    assert kept._fits_bytes(matrix.format, form)
    rows, exact = kept._plain(matrix.on(CPU), form, 2)
    assert exact
    expected = torch.from_numpy(matrix.dequantize()).half()
    tiles = tile_format(form, shape, torch.float16, 2)
    packed = tiles.pack_groups(rows)
    assert packed.images.shape[1] == tiles.shape.tile_bytes == shape.tile_bytes
    assert torch.equal(tiles.restore(packed, 640), expected)
    out = torch.full((1, *expected.shape), torch.nan, dtype=torch.float16)
    tiles.unpack(packed, torch.arange(len(packed.images)).int(), UnpackedRows(out, 1, 0, 0, 2))
    assert torch.equal(out[0], expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_a_table_are_looked_up_by_plain_indexing_and_by_the_kernel(bits: int) -> None:
    rows = nested_rows(50, 1120, bits)
    table = RowTable(rows, bits, torch.float16)
    ids = torch.tensor([3, 49, 0, 3])
    expected = restore_nested(rows, bits, torch.float16)[ids]
    assert torch.equal(embedding(ids, table), expected)
    out = torch.full((4, 1120), torch.nan, dtype=torch.float16)
    look_up_rows(table, ids, out)
    assert torch.equal(out, expected)


def test_host_and_kernel_agree_on_nested_formats() -> None:
    number = FORM.number
    assert is_nested.fn(number)
    assert (group_of.fn(number), has_minima.fn(number)) == (NESTED.group, NESTED.minima)
    assert (scale_rows.fn(number), wide_group.fn(number)) == (FORM.beside_rows, FORM.wide_group)
    assert copied_rows.fn(FORM.beside_rows) == FORM.copied_rows == 2
    assert tile_bytes.fn(number, 4) == tile_shape(1, weight_bytes=FORM.weight_bytes, images=4).tile_bytes
