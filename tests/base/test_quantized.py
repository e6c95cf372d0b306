"""Dequantising: our fast paths and the gguf library must agree bit for bit."""

import sys

import numpy as np
import pytest

from onewave.base.blocks import BLOCK_FORMATS
from onewave.base.errors import UnsupportedError
from onewave.base.gguf_types import GGUF_TYPES, TYPES_BY_NAME
from onewave.base.quantized import QuantizedRows

QUANTIZED = [kind.name for kind in GGUF_TYPES.values() if kind.is_quantized]


def random_rows(qtype: str, rows: int, blocks: int, seed: int = 0) -> QuantizedRows:
    """Return rows of random bytes whose leading scales, where the format has them, are finite."""
    kind = TYPES_BY_NAME[qtype]
    halves = {"Q4_0": 1, "Q4_1": 2, "Q5_0": 1, "Q5_1": 2, "Q8_0": 1, "Q4_K": 2, "Q5_K": 2}.get(qtype, 0)
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows * blocks, kind.block_bytes), dtype=np.uint8)
    data[:, : 2 * halves] = rng.normal(size=(rows * blocks, halves)).astype("<f2").view(np.uint8)
    return QuantizedRows(qtype, data.reshape(rows, -1), (rows, blocks * kind.block_elements))


def with_gguf(rows: QuantizedRows) -> np.ndarray:
    gguf = pytest.importorskip("gguf")
    return gguf.quants.dequantize(rows.data, gguf.GGMLQuantizationType[rows.qtype]).astype(np.float32)


@pytest.mark.parametrize("qtype", [*QUANTIZED, "F16", "BF16"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_type_expands_as_the_gguf_library_does(qtype):
    for shape in [(1, 1), (3, 5), (17, 2)]:
        rows = random_rows(qtype, *shape)
        ours = rows.dequantize()
        assert ours.dtype == np.float32
        assert ours.shape == rows.shape
        assert np.array_equal(ours, with_gguf(rows), equal_nan=True)


@pytest.mark.parametrize("qtype", ["Q4_0", "Q8_0", "Q5_K"])
def test_a_matrix_larger_than_one_chunk_expands_the_same(qtype):
    rows = random_rows(qtype, 301, 9)
    assert np.array_equal(rows.dequantize(), with_gguf(rows))


def test_the_common_types_need_no_gguf_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    for qtype in ("F32", "F16", "BF16", *BLOCK_FORMATS):
        with np.errstate(all="ignore"):
            random_rows(qtype, 2, 3).dequantize()


def test_other_types_without_the_gguf_library_say_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedError, match=r"Q2_K.*pip install gguf"):
        random_rows("Q2_K", 1, 1).dequantize()


def test_a_type_that_the_gguf_library_does_not_know_is_refused():
    pytest.importorskip("gguf")
    with pytest.raises(UnsupportedError, match="Q9_Z"):
        QuantizedRows("Q9_Z", np.zeros((1, 32), np.uint8), (1, 32)).dequantize()


def test_selected_rows_expand_to_the_selected_rows():
    rows = random_rows("Q4_1", 7, 2)
    whole = rows.dequantize()
    assert rows.select(slice(2, 5)).shape == (3, 64)
    assert np.array_equal(rows.select(slice(2, 5)).dequantize(), whole[2:5])
    assert np.array_equal(rows.select([6, 0, 0]).dequantize(), whole[[6, 0, 0]])
    assert np.shares_memory(rows.select(slice(2, 5)).data, rows.data)


def test_our_block_sizes_are_those_of_the_gguf_library():
    gguf = pytest.importorskip("gguf")
    for kind in GGUF_TYPES.values():
        known = gguf.GGMLQuantizationType.__members__.get(kind.name)
        if known is not None:
            assert known.value == kind.id
            assert gguf.GGML_QUANT_SIZES[known] == (kind.block_elements, kind.block_bytes)


def test_every_type_that_the_gguf_library_dequantises_is_readable():
    gguf = pytest.importorskip("gguf")
    from gguf.quants import _type_traits

    assert {kind.name for kind in _type_traits} <= {kind.name for kind in GGUF_TYPES.values()}
    assert gguf.GGMLQuantizationType.Q4_1 in _type_traits
