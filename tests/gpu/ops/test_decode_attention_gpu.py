"""The split-KV kernel on a GPU, where Hopper's does not run: several queries over caches of every alignment."""

from typing import Any

import pytest
import torch
from torch import Tensor

from onewave.ops.attention.reference import attention as in_torch
from onewave.ops.decode_attention.op import decode_attention

pytestmark = pytest.mark.gpu
NAN = float("nan")
SHAPES = {64: (16, [64, 5, 63]), 1000: (8, [999]), 300: (16, [300, 130, 0, 1])}
"""Heads, and the rows' lengths, by capacity."""


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The same numbers in a frame of NaN: rows an odd number of elements apart, or beginning beside whole pieces."""
    rows, heads, keys, dim = values.shape
    if layout == "odd":
        frame = torch.full((rows, heads, keys, dim + 1), NAN, dtype=values.dtype, device="cuda")
        return frame[..., :dim].copy_(values)
    if layout == "shifted":
        flat = torch.full((values.numel() + 16,), NAN, dtype=values.dtype, device="cuda")
        return flat[3 : 3 + values.numel()].view(values.shape).copy_(values)
    return values


@pytest.mark.pairs
@pytest.mark.parametrize("queries", [3, 5, 8])
@pytest.mark.parametrize("layout", ["whole", "odd", "shifted", "pages"])
@pytest.mark.parametrize("head_dim", [24, 40, 64, 104, 128, 136, 256])
@pytest.mark.parametrize("capacity", SHAPES)
def test_several_queries_agree_with_float64(capacity: int, head_dim: int, layout: str, queries: int) -> None:
    heads, lengths = SHAPES[capacity]
    draw = torch.Generator("cuda").manual_seed(capacity)
    q, k, v = (
        torch.randn(len(lengths), count, rows, head_dim, device="cuda", generator=draw).half()
        for count, rows in ((heads, queries), (4, capacity), (4, capacity))
    )
    caches, given = [laid_out(cache, layout) for cache in (k, v)], dict[str, Any]()
    if layout == "pages":
        blocks = -(-capacity // 16)
        table = torch.arange(len(lengths) * blocks, dtype=torch.int32, device="cuda")
        padded = [torch.nn.functional.pad(cache, (0, 0, 0, blocks * 16 - capacity)) for cache in (k, v)]
        caches = [cache.unflatten(2, (blocks, 16)).transpose(1, 2).flatten(0, 1).contiguous() for cache in padded]
        given["block_table"] = table.view(len(lengths), blocks)
    seq_lens = torch.tensor(lengths, device="cuda")
    out, lse = decode_attention(q, *caches, seq_lens, backend="triton", return_lse=True, **given)
    for row, length in enumerate(lengths):
        seen = (q[row, None], k[row, None, :, :length], v[row, None, :, :length])
        exact, exact_lse = in_torch(*(tensor.double() for tensor in seen), causal=True)
        torch.testing.assert_close(out[row, None].double(), exact, atol=3e-3, rtol=1e-2)
        torch.testing.assert_close(lse[row, None].double(), exact_lse, atol=2e-3, rtol=1e-4)
