"""Matrices in groups: GGUF's blocks opened up keep every value, and formats know their size."""

import numpy as np
import pytest
import torch

from onewave.base.blocks import BLOCK_FORMATS, open_blocks
from onewave.base.gguf_types import TYPES_BY_NAME
from onewave.base.grouped import Code, GroupedMatrix, GroupFormat, GroupNumbers, Offset, e4m3_values

CPU = torch.device("cpu")
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_blocks(qtype: str, rows: int, blocks: int) -> np.ndarray:
    """Random bytes with finite float16 numbers where the format has some, among them the smallest and largest."""
    kind = TYPES_BY_NAME[qtype]
    rng = np.random.default_rng(rows)
    data = rng.integers(0, 256, (rows, blocks, kind.block_bytes), dtype=np.uint8)
    for start in HALVES.get(qtype, (0,)):
        halves = rng.normal(size=(rows, blocks)).astype("<f2")
        halves.flat[:4] = (0, 2.0**-24, -65504, 65504)
        data[..., start : start + 2] = halves[..., None].view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("qtype", BLOCK_FORMATS)
def test_opened_blocks_are_the_gguf_librarys_values_bit_for_bit(qtype: str) -> None:
    gguf = pytest.importorskip("gguf")
    data = random_blocks(qtype, 7, 5)
    opened = open_blocks(data, qtype)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[qtype]).astype(np.float32)
    assert np.array_equal(opened.dequantize().view(np.uint32) << 1, expected.view(np.uint32) << 1)  # -0 is 0
    some = opened.select([6, 0])
    assert some.shape == (2, expected.shape[1])
    assert np.array_equal(some.dequantize(), expected[[6, 0]])


@pytest.mark.parametrize("qtype", BLOCK_FORMATS)
def test_tensors_are_opened_as_arrays_are(qtype: str) -> None:
    data = random_blocks(qtype, 7, 5)
    arrays = open_blocks(data, qtype).on(CPU)
    tensors = open_blocks(torch.from_numpy(data), qtype)
    assert tensors.is_finite
    pairs = [(tensors.codes, arrays.codes)]
    for one, other in ((tensors.scales, arrays.scales), (tensors.minima, arrays.minima)):
        assert (one is None) == (other is None)
        if one is not None:
            pairs += [(one.base, other.base), (one.steps, other.steps)]
    for found, expected in pairs:
        assert (found is None) == (expected is None)
        assert found is None or (found.dtype is expected.dtype and torch.equal(found, expected))


@pytest.mark.parametrize("qtype", BLOCK_FORMATS)
def test_a_formats_codes_have_its_bits(qtype: str) -> None:
    form = BLOCK_FORMATS[qtype]
    codes = open_blocks(random_blocks(qtype, 3, 2), qtype).codes.astype(int)
    lowest = -(1 << form.bits - 1) if form.code is Code.SIGNED else 0
    assert lowest <= codes.min() <= codes.max() < lowest + (1 << form.bits)


def test_zero_points_and_the_order_of_columns_count() -> None:
    form = GroupFormat(Code.UNSIGNED, 4, 2, Offset.ZERO_POINT)
    codes, scales = np.array([[1, 2, 3, 15]], np.uint8), GroupNumbers(np.array([[0.5, 2]], np.float32))
    zeros, columns = np.array([[8, 1]], np.uint8), np.array([2, 0, 3, 1])
    assert GroupedMatrix(form, (1, 4), codes, scales, zeros).dequantize().tolist() == [[-3.5, -3, 4, 28]]
    moved = GroupedMatrix(form, (1, 4), codes, scales, zeros, columns=columns)
    assert moved.dequantize().tolist() == [[-3, 28, -3.5, 4]]


def test_e4m3_is_torchs() -> None:
    expected = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(e4m3_values(), expected, equal_nan=True)
