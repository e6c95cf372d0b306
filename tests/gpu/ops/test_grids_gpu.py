"""More sequences and heads than a grid's second axis has programs."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from onewave.ops.attention import attention
from onewave.ops.attention.reference import attention as in_torch
from onewave.ops.decode_attention.op import decode_attention

pytestmark = pytest.mark.gpu

SHAPES = [(70_000, 1), (3_000, 32), (1, 70_000)]
KEYS = 24


def operands(batch: int, heads: int, queries: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator("cuda").manual_seed(batch)
    shapes = ((batch, heads, rows, head_dim) for rows in (queries, KEYS, KEYS))
    q, k, v = (torch.randn(shape, generator=draw, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    return q, k, v


def check(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Each head is a sequence of its own here, some thousand at a time."""
    parts = [tensor.flatten(0, 1).unsqueeze(1).split(10_000) for tensor in (out, q, k, v)]
    for got, *given in zip(*parts, strict=True):
        exact, _ = in_torch(*(tensor.double() for tensor in given), causal=True)
        seen = torch.ones(q.shape[2], KEYS, dtype=torch.bool, device="cuda").tril(KEYS - q.shape[2])
        plain = scaled_dot_product_attention(*given, attn_mask=seen)
        assert (got - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-5


@pytest.mark.pairs
@pytest.mark.parametrize(("batch", "heads"), SHAPES)
@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_takes_any_number_of_sequences_and_heads(batch: int, heads: int, queries: int, head_dim: int) -> None:
    q, k, v = operands(batch, heads, queries, head_dim)
    check(attention(q, k, v, causal=True), q, k, v)


@pytest.mark.pairs
@pytest.mark.parametrize(("batch", "heads"), SHAPES)
@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_decode_attention_takes_any_number_of_rows_and_heads(
    batch: int, heads: int, queries: int, head_dim: int
) -> None:
    q, k, v = operands(batch, heads, queries, head_dim)
    lengths = torch.full((batch,), KEYS, dtype=torch.int32, device="cuda")
    check(decode_attention(q, k, v, lengths), q, k, v)
