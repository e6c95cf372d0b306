"""Packed CPU weights: bit-exact storage, float32 products, results that ignore the batch."""

from importlib import import_module

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from onewave.base.errors import ShapeError, UnsupportedError
from onewave.base.own_blocks import OWN_BLOCK_BYTES
from onewave.base.quantized import QuantizedRows, dequantize_rows
from onewave.ops.embedding import embedding
from onewave.ops.linear import PackedWeight, can_pack, linear, pack, pack_dense, stack
from onewave.ops.linear.packed import FORMATS

pytest.importorskip("gguf")

from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize


def packed(kind: str, rows: int, cols: int) -> tuple[PackedWeight, torch.Tensor]:
    """A packed random matrix and the float32 matrix that the gguf library (or torch) says it is."""
    values = np.random.default_rng(rows * cols).standard_normal((rows, cols)).astype(np.float32)
    if kind in ("BF16", "F16", "F32"):
        dense = torch.from_numpy(values).to({"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[kind])
        return pack_dense(dense), dense.float()
    if kind in OWN_BLOCK_BYTES:
        data = random_own_blocks(kind, rows, cols // 32)
        return pack(QuantizedRows(kind, data, (rows, cols))), torch.from_numpy(dequantize_rows(data, kind))
    type_id = GGMLQuantizationType[kind]
    # The gguf library quantises to no K-quant.
    quantized = random_k_blocks(kind, rows, cols // 256) if kind in K_KINDS else quantize(values, type_id)
    return pack(QuantizedRows(kind, quantized, (rows, cols))), torch.from_numpy(dequantize(quantized, type_id))


def random_k_blocks(kind: str, rows: int, blocks: int) -> NDArray[np.uint8]:
    """Any bits of codes and steps, and fp16 numbers of the size that trained models have."""
    rng = np.random.default_rng(rows)
    form = FORMATS[kind]
    data = rng.integers(0, 256, (rows, blocks, form.row_bytes), dtype=np.uint8)
    for byte in form.halves:
        data[..., byte : byte + 2] = rng.uniform(1e-5, 1e-3, (rows, blocks, 1)).astype("<f2").view(np.uint8)
    return data.reshape(rows, -1)


def random_own_blocks(kind: str, rows: int, blocks: int) -> NDArray[np.uint8]:
    """Any codes but e4m3's NaN, and numbers of the size that trained models have."""
    rng = np.random.default_rng(rows)
    data = rng.integers(0, 256, (rows, blocks, OWN_BLOCK_BYTES[kind]), dtype=np.uint8) & 0xF7
    for start in {"G4Z": (), "G8": (0, 4), "GF8": (0,)}[kind]:
        data[..., start : start + 4] = rng.uniform(1e-3, 1e-2, (rows, blocks, 1)).astype("<f4").view(np.uint8)
    if kind == "G4Z":
        data[..., :2] = rng.uniform(1e-3, 1e-2, (rows, blocks, 1)).astype("<f2").view(np.uint8)
    return data.reshape(rows, -1)


KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "F32", *OWN_BLOCK_BYTES]
K_KINDS = ["Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("kind", KINDS + K_KINDS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 256), (131, 96), (33, 1536)])
def test_packing_keeps_every_value(kind: str, rows: int, cols: int) -> None:
    cols = -(-cols // FORMATS[kind].columns) * FORMATS[kind].columns
    weight, dense = packed(kind, rows, cols)
    assert weight.shape == (rows, cols)
    assert torch.equal(weight.dequantize(), dense)
    some = torch.tensor([rows - 1, 0, rows // 2])
    assert torch.equal(embedding(some, weight), dense[some])


@pytest.mark.parametrize("kind", ["BF16", "F16", "F32"])
def test_dense_formats_take_any_width(kind: str) -> None:
    weight, dense = packed(kind, 17, 45)
    x = torch.randn(2, 45, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(linear(x, weight), x @ dense.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS + K_KINDS)
def test_products_are_float32_exact_and_ignore_the_batch(kind: str) -> None:
    # 13 tokens: eight, four and one from a room; alone and in pairs straight from the bytes. 352: a chunk and a part.
    tokens, cols = 13, 768 if kind in K_KINDS else 352
    weight, dense = packed(kind, 131, cols)
    x = torch.randn(tokens, cols, generator=torch.Generator().manual_seed(1))
    bias = torch.randn(131, generator=torch.Generator().manual_seed(2))
    out = linear(x, weight, bias)
    exact = x.double() @ dense.double().T + bias.double()
    baseline = (x @ dense.T + bias).double()
    assert (out - exact).abs().max() <= 2 * (baseline - exact).abs().max() + 1e-5
    for count in (1, 2, 3):
        for token in range(tokens - count):
            assert torch.equal(linear(x[token : token + count], weight, bias), out[token : token + count])


def test_fp16_scales_below_the_normal_range_are_exact() -> None:
    data = np.zeros((16, 34), np.uint8)
    data[:, 0] = 3  # the third subnormal: 3 * 2^-24
    data[:, 2:] = 7
    weight = pack(QuantizedRows("Q8_0", data, (16, 32)))
    out = linear(torch.ones(1, 32), weight)
    assert torch.equal(out, torch.full((1, 16), 32 * 7 * 3 * 2.0**-24))


def test_what_fp16_can_not_hold_stays_infinite_or_nan() -> None:
    weight = torch.ones(16, 32, dtype=torch.float16)
    weight[0, 3], weight[1, 4], weight[2, 5] = torch.inf, -torch.inf, torch.nan
    out = linear(torch.ones(1, 32), pack_dense(weight))[0]
    assert out[:2].tolist() == [torch.inf, -torch.inf]
    assert out[2].isnan()
    assert (out[3:] == 32).all()
    data = np.ones((16, 34), np.uint8)
    data[:, :2] = np.full((16, 1), np.inf, np.float16).view(np.uint8)
    assert torch.isinf(linear(torch.ones(1, 32), pack(QuantizedRows("Q8_0", data, (16, 32))))).all()


def test_pieces_of_several_formats_are_one_matrix_below_another() -> None:
    parts = [packed(kind, rows, 256) for kind, rows in (("Q4_1", 17), ("Q6_K", 32), ("F16", 5))]
    weight, dense = stack([part for part, _ in parts]), torch.cat([values for _, values in parts])
    assert weight.shape == (54, 256)
    assert torch.equal(weight.dequantize(), dense)
    some = torch.tensor([50, 0, 20, 16, 17, 49])
    assert torch.equal(embedding(some, weight), dense[some])
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(3))
    assert torch.equal(linear(x, weight), torch.cat([linear(x, part) for part, _ in parts], dim=1))


def test_every_loop_has_a_name_of_its_own_in_the_linker() -> None:
    """Kernels that different runs compiled and kept are linked by name: one format would run another's loop."""
    implementation = import_module("onewave.ops.linear.numba_impl")
    tables = (implementation._DIRECT, implementation._UNPACK, implementation._ROOMS)
    loops = [loop._function.__qualname__ for table in tables for loop in table.values()]
    assert len(set(loops)) == len(loops) == 2 * len(FORMATS) + 2


def test_no_tokens_are_no_rows() -> None:
    weight, _ = packed("Q8_0", 16, 32)
    assert embedding(torch.empty(2, 0, dtype=torch.int64), weight).shape == (2, 0, 32)


def test_what_can_not_be_packed_is_refused_by_name() -> None:
    assert not can_pack("Q2_K")
    with pytest.raises(UnsupportedError, match=r"Q2_K.*Q4_1"):
        pack(QuantizedRows("Q2_K", np.zeros((1, 84), np.uint8), (1, 256)))
    with pytest.raises(ShapeError, match="packing Q8_0"):
        pack(QuantizedRows("Q8_0", np.zeros((4, 33), np.uint8), (4, 32)))
    weight, _ = packed("Q8_0", 16, 32)
    with pytest.raises(UnsupportedError, match="float32"):
        linear(torch.ones(1, 32, dtype=torch.bfloat16), weight)
    with pytest.raises(ShapeError, match="32"):
        linear(torch.ones(1, 31), weight)
    with pytest.raises(UnsupportedError, match="require grad"):
        linear(torch.ones(1, 32, requires_grad=True), weight)
