"""SwiGLU of a projection is what the two operators give one after the other, whatever runs it."""

import pytest
import torch
from torch import Tensor

from onewave.base.device import Device
from onewave.base.errors import ShapeError, UnsupportedError
from onewave.ops import linear, linear_swiglu, swiglu
from onewave.ops.linear import pack_dense
from onewave.ops.linear.choose import GATED_COLUMNS, LinearCall, choose


def operands(dtype: torch.dtype, tokens: int = 5, inner: int = 24, cols: int = 48) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(tokens)
    x, w, b = (torch.randn(shape, generator=made) for shape in ((tokens, cols), (2 * inner, cols), (2 * inner,)))
    return x.to(dtype), w.to(dtype), b.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_the_projection_and_then_swiglu(dtype: torch.dtype, biased: bool) -> None:
    x, w, b = operands(dtype)
    bias = b if biased else None
    assert torch.equal(linear_swiglu(x, w, bias), swiglu(linear(x, w, bias)))


def test_packed_weights_take_it() -> None:
    x, w, b = operands(torch.float32)
    packed = pack_dense(w)
    assert torch.equal(linear_swiglu(x, packed, b), swiglu(linear(x, packed, b)))


@pytest.mark.parametrize("symbolic", [False, True])
def test_a_compiler_takes_it_with_rows_that_it_knows_and_that_it_does_not(symbolic: bool) -> None:
    x, w, b = operands(torch.float32)
    torch._dynamo.reset()
    if symbolic:  # the weight's rows alone: the bias's length is a number
        torch._dynamo.maybe_mark_dynamic(w, 0)
    compiled = torch.compile(linear_swiglu, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, w, b), linear_swiglu(x, w, b))


def test_what_it_does_not_take_is_said_as_for_the_projection() -> None:
    x, w, _ = operands(torch.float32)
    with pytest.raises(ShapeError, match="linear: x, weight"):
        linear_swiglu(x[:, 1:], w)
    with pytest.raises(ShapeError, match="even length"):
        linear_swiglu(x, w[1:])
    with pytest.raises(UnsupportedError, match="linear: weight"):
        linear_swiglu(x, w.double())


def test_one_token_alone_keeps_the_kernel_that_is_fastest_for_it() -> None:
    x, w = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((1, 256), (512, 256)))
    assert choose(LinearCall(x, w, gated=True, described=Device((9, 0), 132))).module == "triton_impl"


@pytest.mark.parametrize(("tokens", "columns"), [(8, 64), (64, 256)])
def test_a_few_tokens_have_the_narrowest_tiles(tokens: int, columns: int) -> None:
    x, w = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((tokens, 4096), (28672, 4096)))
    choice = choose(LinearCall(x, w, gated=True, described=Device((9, 0), 132)))
    assert choice.columns == columns


@pytest.mark.parametrize("tokens", [2, 64, 700])
@pytest.mark.parametrize("inner", [8, 50, 14336])
def test_hoppers_tiles_hold_gates_beside_what_they_gate(tokens: int, inner: int) -> None:
    x, w = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((tokens, 256), (2 * inner, 256)))
    choice = choose(LinearCall(x, w, gated=True, described=Device((9, 0), 132)))
    assert choice.columns in GATED_COLUMNS
    assert choice.extra == choice.columns // 2
    assert choice.column_blocks * choice.columns >= 2 * inner
    assert choice.to_map == (inner % 8 == 0)
