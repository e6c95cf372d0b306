"""Quantised rows against NumPy, and the kernel against the reference."""

import numpy as np
import pytest
import torch
from torch import Tensor

from onewave.base.device import Device
from onewave.base.grouped import e4m3_values
from onewave.ops.quantize_rows import choose as choosing
from onewave.ops.quantize_rows import quantize_rows, reference
from onewave.ops.quantize_rows.choose import QuantizeCall
from onewave.ops.swiglu import swiglu

FP8 = torch.float8_e4m3fn
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# The interpreter's float8 rounds down, so a GPU alone runs both.
KINDS = (torch.int8, FP8) if GPU else (torch.int8,)
pytestmark = [pytest.mark.pairs, *([pytest.mark.gpu] if GPU else [])]


def rows(count: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Rows of several sizes, the first of zeros, the third with a NaN, the fourth with an infinity."""
    x = torch.randn(count, cols, generator=torch.Generator().manual_seed(cols))
    x *= torch.logspace(-3, 2, count)[:, None]
    x[0] = 0
    x[2, 0], x[3, -1] = torch.nan, torch.inf
    return x.to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("cols", [1, 5, 300])
def test_int8_codes_are_numpys(dtype: torch.dtype, cols: int) -> None:
    x = rows(7, cols, dtype)
    codes, scale = quantize_rows(x)
    wide = x.cpu().float().numpy()
    with np.errstate(all="ignore"):
        right = np.abs(wide).max(axis=1) / np.float32(127.5)
        right[0] = 2.0**-23
        expected = np.clip(np.rint(np.nan_to_num(wide / right[:, None], nan=0.0)), -128, 127).astype(np.int8)
    assert np.array_equal(scale.cpu().numpy(), right, equal_nan=True)
    assert np.array_equal(codes.cpu().numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_e4m3_codes_are_the_nearest_numbers(dtype: torch.dtype) -> None:
    x = rows(7, 300, dtype)[[0, 1, 4, 5, 6]]
    codes, scale = quantize_rows(x, FP8)
    values = np.sort(e4m3_values()[~np.isnan(e4m3_values())])
    scaled = (x.float() / scale[:, None]).cpu().double().numpy()
    distance = np.abs(scaled - codes.cpu().double().numpy())
    assert np.allclose(distance, np.abs(scaled[..., None] - values).min(axis=-1), rtol=1e-6, atol=0)
    assert codes.float().abs().amax(dim=1).tolist()[1:] == [448.0] * 4


@pytest.mark.parametrize("kind", [torch.int8, FP8])
def test_a_given_scale_is_kept_and_clips(kind: torch.dtype) -> None:
    scale = torch.tensor([0.5], device=DEVICE)
    codes, kept = quantize_rows(torch.tensor([[0.75, -1.25, 1e6, -1e6]], device=DEVICE), kind, scale)
    assert kept is scale
    ends = [2.0, -2.0, 127.0, -128.0] if kind is torch.int8 else [1.5, -2.5, 448.0, -448.0]
    assert codes.float().tolist() == [ends]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("cols", [1, 4100], ids=["one block", "five blocks"])
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:All-NaN")
def test_the_kernel_equals_the_reference(dtype: torch.dtype, gated: bool, given: bool, cols: int) -> None:
    from onewave.ops.quantize_rows import triton_impl

    x = rows(6, cols * (1 + gated), dtype)
    scale = torch.tensor([0.05], device=DEVICE) if given else None
    for kind in KINDS:
        call = QuantizeCall(x, kind, scale, gated, described=Device((9, 0), 132))
        choice = choosing.choose(call)
        found, right = triton_impl.run(call, choice), reference.run(call, choice)
        difference = (found[0].float() - right[0].float()).nan_to_num()
        # An exponential of the interpreter may be one unit in the last place beside PyTorch's.
        assert difference.abs().max() <= (1 if gated else 0)
        assert torch.allclose(found[1], right[1], rtol=1e-6 if gated else 0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", [torch.int8, FP8])
def test_swiglu_in_the_same_pass_gives_its_codes(kind: torch.dtype) -> None:
    x = rows(5, 64, torch.float32)[[0, 1, 4]]
    for found, right in zip(quantize_rows(x, kind, swiglu=True), quantize_rows(swiglu(x), kind), strict=True):
        assert torch.equal(found.float(), right.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:All-NaN")
def test_a_norm_that_quantises_gives_the_codes_of_both_in_turn(dtype: torch.dtype) -> None:
    from onewave.ops.quantize_rows import triton_impl
    from onewave.ops.rms_norm import triton_impl as norms

    x, residual, gain = rows(6, 300, dtype), rows(6, 300, torch.float32), rows(6, 300, dtype)[4]
    for kind in KINDS:
        normed, total = norms.add_rms_norm(x, residual, gain, 1e-5)
        call = QuantizeCall(normed, kind, described=Device((9, 0), 132))
        codes, scale = triton_impl.run(call, choosing.choose(call))
        found = norms.add_rms_norm_quantized(x, residual, gain, 1e-5, kind)
        assert torch.equal(found[2].nan_to_num(7.0), total.nan_to_num(7.0))
        # On a GPU squares may be added in another order, and a number of the norm be its neighbour.
        difference = (found[0].float() - codes.float()).nan_to_num()
        assert difference.abs().max() <= (0 if not GPU else 1 if kind is torch.int8 else 32)
        assert torch.allclose(found[1], scale, rtol=0.01 if GPU else 0, atol=0, equal_nan=True)
