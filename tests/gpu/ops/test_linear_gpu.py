"""The product of several rows on Hopper: right, and a row's bits depend on that row alone."""

import pytest
import torch
from torch import Tensor

from kit.lanes import slow
from kit.operands.on_gpu import GPU, ON_WAVE
from kit.operands.rounded_on_gpu import streamed, two_layers
from onewave.base.weight_formats import COMPACT, NIBBLES, ROUNDINGS, WeightFormat
from onewave.ops.linear import linear, linear_swiglu
from onewave.wave.weights.formats import tile_format
from onewave.wave.weights.pack import Weight

pytestmark = pytest.mark.gpu

# Columns and rows of weights whose tiles lie at every edge: whole, odd, narrower than a tile, beyond a band.
SHAPES = [(4096, 2048), (6144, 4096), (2056, 72), (1000, 512), (77, 256), (16, 8)]
ROWS = (2, 3, 7, 8, 9, 31, 33, 64, 65, 127, 129, 200, 257, 513, 1000, 2047, 2500)


def operands(width: int, cols: int, dtype: torch.dtype, rows: int = 3001) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator("cuda").manual_seed(width * cols)
    shapes = ((rows, cols), (width, cols), (width,))
    x, w, b = (torch.randn(shape, generator=made, device="cuda", dtype=dtype) for shape in shapes)
    return x, w * 0.05, b


@pytest.mark.pairs
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


MATRICES = {
    "qkv0": (3072, 2048, 1),
    "gate_up1": (8192, 2048, 2),
    "down0": (2048, 8192, 1),
    "head": (128256, 2048, 1),
}


# A form has some forty kernels, of which a matrix takes up to twenty.
@ON_WAVE[-1]
@pytest.mark.values
@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize(
    "form_of_sequences",
    [(COMPACT, 1), (COMPACT, 8), (COMPACT, 16), (NIBBLES[64, False], 8), (NIBBLES[128, False], 1),
     (NIBBLES[32, False], 16), (NIBBLES[32, True], 1), (NIBBLES[128, True], 8)],
)  # fmt: skip
@torch.inference_mode()
def test_products_from_tiles_have_the_plain_products_bits(
    form_of_sequences: tuple[WeightFormat, int], name: str
) -> None:
    (form, batch), (height, cols, count) = form_of_sequences, MATRICES[name]
    matrix = streamed(form, batch, 17, two_layers()).stream.matrix(name, height, cols, count)
    dice = torch.Generator(GPU).manual_seed(batch)
    plain = matrix.dense().clone()
    bias = torch.randn(len(plain), generator=dice, device=GPU).bfloat16()
    product = linear_swiglu if count > 1 else linear
    for tokens in (2, 9, 17, 64, 65, 129, 200, 257, 513, 1000, 2048) if height < 10000 else (2, 16):
        x = torch.randn(tokens, cols, generator=dice, device=GPU).bfloat16()
        assert torch.equal(product(x, matrix, bias), product(x, plain, bias)), tokens
        if count == 1:
            wide = linear(x, matrix, None, torch.float32)
            assert torch.equal(wide, linear(x, plain, None, torch.float32)), tokens


@ON_WAVE[-1]
@pytest.mark.parametrize(
    ("name", "batch"), [("int8", 1), ("int8", 16), slow("fp8", 1), ("fp8", 8), ("int4", 1), slow("int4", 16)]
)
@torch.inference_mode()
def test_products_of_rounded_weights_round_none_again_and_keep_a_tokens_bits(name: str, batch: int) -> None:
    form = ROUNDINGS[name]
    stream = streamed(form, batch, 17, two_layers()).stream
    dice = torch.Generator(GPU).manual_seed(batch)
    weight = torch.randn(2048, 8192, generator=dice, device=GPU).bfloat16()
    stream.put("down0", Weight((weight,)))
    matrix = stream.matrix("down0", *weight.shape)
    exact = tile_format(form, stream.shape, torch.float32).expected(weight.float()).double()
    x, bias = (torch.randn(shape, generator=dice, device=GPU).bfloat16() for shape in ((5000, 8192), (2048,)))
    full, ref = linear(x, matrix, bias), x.double() @ exact.t() + bias.double()
    plain = torch.nn.functional.linear(x, exact.bfloat16(), bias)
    assert (full - ref).abs().max() <= 2 * (plain - ref).abs().max() + 1e-5
    wide = linear(x, matrix, None, torch.float32)
    for tokens in (2, 9, 17, 64, 65, 129, 200, 257, 513, 1000, 2048):
        assert torch.equal(linear(x[7 : 7 + tokens], matrix, bias), full[7 : 7 + tokens]), tokens
        assert torch.equal(linear(x[:tokens], matrix, None, torch.float32), wide[:tokens]), tokens
    gates = stream.matrix("gate_up0", 8192, 2048, 2)
    both = linear_swiglu(x[:, :2048], gates)
    gate, up = (x[:, :2048].double() @ part.double().t() for part in gates.dense().chunk(2))
    assert (both - torch.nn.functional.silu(gate) * up).abs().max() <= 0.03 * both.abs().max()
    for tokens in (3, 70, 300):
        assert torch.equal(linear_swiglu(x[:tokens, :2048], gates), both[:tokens]), tokens
