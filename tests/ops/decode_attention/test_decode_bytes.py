"""Hopper's decode kernel over a cache in 8 bits: the whole in NumPy, and its widening instructions for every byte."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from kit.operands.decode_in_numpy import Gpu, attend, case
from kit.ptx.ptx_text import executed
from onewave.ops.decode_attention.hopper import launch as gluon_impl
from onewave.ops.decode_attention.hopper.widen import widening
from onewave.ops.decode_attention.reference import decode_attention as reference


@pytest.mark.parametrize(
    ("dtype", "kind", "neighbours"),
    [
        (torch.int8, np.float16, True),
        (torch.int8, ml_dtypes.bfloat16, True),
        (torch.int8, ml_dtypes.bfloat16, False),
        (torch.int8, np.float16, False),
        (torch.float8_e4m3fn, np.float16, False),
        (torch.float8_e4m3fn, ml_dtypes.bfloat16, True),
        (torch.float8_e4m3fn, ml_dtypes.bfloat16, False),
    ],
)
def test_every_byte_has_its_value_in_every_place(dtype: torch.dtype, kind: Any, neighbours: bool) -> None:
    dice = np.random.default_rng(0)
    places = dice.permuted(np.tile(np.arange(256, dtype=np.uint8), (4, 1)), axis=1).T
    known = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()  # e4m3's NaN among them
    text = widening(1 if dtype is torch.int8 else 2, kind is np.float16, neighbours)
    registers = executed(text, {"$2": np.ascontiguousarray(places).view(np.uint32)[:, 0]})
    pairs = [
        np.ascontiguousarray(registers[name]).view(kind).reshape(-1, 2).astype(np.float32) for name in ("$0", "$1")
    ]
    order = [[0, 1], [2, 3]] if neighbours else [[0, 2], [1, 3]]
    for found, of in zip(pairs, order, strict=True):
        np.testing.assert_array_equal(found, known[places[:, of]])


SCALES = {"k_scale": torch.tensor([0.02, 0.03]), "v_scale": torch.tensor([0.5, 0.01])}


def in_bytes(dtype: torch.dtype, cache: Tensor) -> Tensor:
    """A cache in 8 bits, with the largest number of its dtype behind each row's keys."""
    return (cache * 40).nan_to_num(448 if dtype.is_floating_point else 127).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "page", "options"),
    [
        (torch.int8, 4, 128, None, SCALES),
        (torch.float8_e4m3fn, 4, 96, 64, SCALES),
        (torch.float8_e4m3fn, 4, 128, 16, {"scale": 0.002, "window": 70}),
        (torch.float8_e4m3fn, 28, 64, None, SCALES),
        (torch.int8, 4, 48, 16, {"scale": 0.002, "window": 70}),
    ],
)
def test_a_cache_in_8_bits_is_widened_and_scaled(
    dtype: torch.dtype,
    heads: int,
    dim: int,
    page: int | None,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gluon_impl, "stream_kernel", Gpu())
    lengths = [1, 63, 64, 520, 0, 300]
    q, k, v, seq_lens = case(lengths, heads, dim, capacity=576)
    k, v = (in_bytes(dtype, cache) for cache in (k, v))
    right = reference(q.double(), k, v, seq_lens, **options)[0]
    paged: dict[str, Any] = {}
    if page is not None:
        k, v = (cache.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1).contiguous() for cache in (k, v))
        paged["block_table"] = torch.arange(len(k), dtype=torch.int32).view(len(lengths), -1)
    out, lse = attend(q, k, v, seq_lens, **options, **paged)
    torch.testing.assert_close(out.double(), right, atol=1e-3 * float(right.abs().max()), rtol=4e-3)
    if page is not None:
        return
    for row in range(len(lengths)):
        alone = attend(*(part[row : row + 1] for part in (q, k, v, seq_lens)), **options)
        assert torch.equal(alone[0][0], out[row])
        assert torch.equal(alone[1][0], lse[row])
