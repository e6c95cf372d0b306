"""The product of several rows on Hopper: right, and a row's bits depend on that row alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onewave.ops.linear import linear

pytestmark = pytest.mark.gpu

# Columns and rows of weights whose tiles lie at every edge: whole, odd, narrower than a tile, beyond a band.
SHAPES = [(4096, 2048), (6144, 4096), (2056, 72), (1000, 512), (77, 256), (16, 8)]
ROWS = (2, 3, 7, 8, 9, 31, 33, 64, 65, 127, 129, 200, 257, 513, 1000, 2047, 2500)


def operands(width: int, cols: int, dtype: torch.dtype, rows: int = 3001) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator("cuda").manual_seed(width * cols)
    shapes = ((rows, cols), (width, cols), (width,))
    x, w, b = (torch.randn(shape, generator=made, device="cuda", dtype=dtype) for shape in shapes)
    return x, w * 0.05, b


@pytest.mark.parametrize(("width", "cols"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_rows_alone_and_together_have_the_same_bits(
    width: int, cols: int, dtype: torch.dtype, wide: bool, biased: bool
) -> None:
    x, w, b = operands(width, cols, dtype)
    bias, out = b if biased else None, torch.float32 if wide else None
    full = linear(x, w, bias, out)
    exact = x.double() @ w.double().t() + (b.double() if biased else 0)
    plain = torch.nn.functional.linear(x, w, bias)
    assert (full - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-5
    for rows in ROWS:
        first = (rows * 37) % (len(x) - rows)
        assert torch.equal(linear(x[first : first + rows], w, bias, out), full[first : first + rows]), rows


def test_rows_that_lie_apart_are_read_where_they_lie() -> None:
    x, w, _ = operands(512, 1024, torch.bfloat16, rows=100)
    apart = torch.full((100, 1536), float("nan"), device="cuda", dtype=x.dtype)
    apart[:, 8:1032] = x
    assert torch.equal(linear(apart[:, 8:1032], w), linear(x, w))
    assert torch.equal(linear(apart.t()[8:1032].t(), w), linear(x, w))
    odd = torch.empty(100, 1025, device="cuda", dtype=x.dtype)[:, 1:].copy_(x)
    assert torch.equal(linear(odd, w), linear(x, w))


@pytest.mark.parametrize("rows", [2, 64, 300])
def test_a_graph_and_a_thousand_repeats_give_the_same_bits(rows: int) -> None:
    x, w, b = operands(6144, 4096, torch.bfloat16, rows)
    first = linear(x, w, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = linear(x, w, b)
    for _ in range(1000):
        graph.replay()
    assert torch.equal(again, first)
