"""One-byte products against NumPy: on a CPU, and the portable kernel in the interpreter."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kit.numpy_gpu.mmha_model import quantise_in_numpy
from onewave import ops
from onewave.base.device import Device
from onewave.base.errors import InvalidArgumentError, OnewaveError
from onewave.base.grouped import e4m3_values
from onewave.ops.scaled_linear import ScaledMatrix, ScaledPart, reference
from onewave.ops.scaled_linear.call import Epilogue, ScaledCall
from onewave.ops.scaled_linear.choose import choose

FP8 = torch.float8_e4m3fn
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = [pytest.mark.pairs, *([pytest.mark.gpu] if GPU else [])]
OPERATORS = {torch.int8: ops.linear_int8, FP8: ops.linear_fp8}
EPILOGUES = ("none", "by row", "one", "everything", "int8 half_even", "int8 half_away")


def codes(kind: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """All int8 numbers, and all e4m3 numbers but NaN."""
    made = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    if kind is FP8:
        made = torch.where(made & 127 == 127, made - 1, made)
    return made.view(kind).to(DEVICE)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE) + 0.25


def epilogue(name: str, tokens: int, rows: int) -> Epilogue:
    if name == "none":
        return Epilogue()
    if name == "one":
        return Epilogue(numbers(1), numbers(1, 1, seed=1).view(()))
    scales = Epilogue(numbers(tokens), numbers(rows, 1, seed=1))
    if name == "by row":
        return scales
    vectors = scales._replace(
        bias=numbers(rows, seed=2), out_shift=-numbers(rows, seed=3).half(), out_smooth=numbers(rows, seed=4).bfloat16()
    )
    if name == "everything":
        return vectors
    return vectors._replace(out_scale=1e-5, half_away=name.endswith("away"), max_bound=100.0, min_bound=-90.0)


def arguments(given: Epilogue) -> dict[str, Any]:
    """As the public functions take it."""
    x_scale, weight_scale, bias, shift, smooth, out_scale, half_away, high, low = given
    rounding = "half_away" if half_away else "half_even"
    return {
        "x_scale": x_scale, "weight_scale": weight_scale, "bias": bias, "out_shift": shift, "out_smooth": smooth,
        "out_scale": out_scale, "quant_round": rounding, "quant_max_bound": high, "quant_min_bound": low,
    }  # fmt: skip


def in_numpy(x: Tensor, weight: Tensor, given: Epilogue) -> np.ndarray:
    """Float32 [tokens, rows], or int8: exact sums, then each step rounded."""

    def plain(tensor: Tensor) -> np.ndarray:
        tensor = tensor.cpu()
        return e4m3_values()[tensor.view(torch.uint8).numpy()] if tensor.dtype is FP8 else tensor.float().numpy()

    y = (plain(x).astype(np.float64) @ plain(weight).astype(np.float64).T).astype(np.float32)
    x_scale, weight_scale, bias, shift, smooth = given.tensors
    if weight_scale is not None:
        y = y * plain(weight_scale).reshape(1, -1)
    if x_scale is not None:
        y = y * plain(x_scale).reshape(-1, 1)
    for offset in (bias, shift):
        y = y if offset is None else y + plain(offset)
    y = y if smooth is None else y * plain(smooth)
    if given.out_scale is None:
        return y
    rounding = "half_away" if given.half_away else "half_even"
    scaled = np.float32(given.max_bound) * np.float32(given.out_scale)
    # The product with a number already rounded to float32 is itself rounded.
    return quantise_in_numpy((scaled * y).astype(np.float64) / 100.0, 1.0, rounding, 100.0, given.min_bound)


@pytest.mark.parametrize("kind", [torch.int8, FP8])
@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize("shape", [(3, 5, 1), (5, 33, 129), (1, 7, 2048)])
def test_a_product_equals_numpy_bit_for_bit(kind: torch.dtype, name: str, shape: tuple[int, int, int]) -> None:
    tokens, rows, cols = shape
    x, weight = codes(kind, tokens, cols), codes(kind, rows, cols, seed=1)
    given = epilogue(name, tokens, rows)
    wanted = torch.float32 if given.out_scale is None else torch.int8
    out = OPERATORS[kind](x, weight, **arguments(given), out_dtype=wanted)
    right = in_numpy(x, weight, given)
    if GPU and kind is FP8:
        assert np.abs(out.float().cpu().numpy() - right).max() <= np.abs(right).max() * 2**-10 + (wanted is torch.int8)
    else:
        assert np.array_equal(out.cpu().numpy(), right)
    assert torch.equal(OPERATORS[kind](x, weight, **arguments(given), out_dtype=wanted, backend="reference").cpu(),
                       torch.from_numpy(right))  # fmt: skip


@pytest.mark.parametrize("kind", [torch.int8, FP8])
@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize("shape", [(1, 5, 16), (17, 70, 130)])
def test_the_portable_kernel_equals_the_reference(kind: torch.dtype, name: str, shape: tuple[int, int, int]) -> None:
    from onewave.ops.scaled_linear import triton_impl

    tokens, rows, cols = shape
    x, weight, given = codes(kind, tokens, cols), codes(kind, rows, cols, seed=1), epilogue(name, tokens, rows)
    wanted = torch.int8 if given.out_scale is not None else torch.float32
    wanted = torch.int32 if kind is torch.int8 and name == "none" else wanted
    call = ScaledCall(x, weight, wanted, given, "triton", described=Device((8, 0), 100))
    found, right = triton_impl.run(call, choose(call)), reference.run(call, choose(call))
    if kind is torch.int8:
        assert torch.equal(found, right)
    else:
        error = (found.double() - right.double()).abs().max()
        assert error <= right.double().abs().max() * 2**-20 + (wanted is torch.int8)


def test_every_number_of_e4m3_is_widened_exactly_and_nan_shows() -> None:
    """A product with ones on the diagonal gives the numbers back."""
    from onewave.ops.scaled_linear import triton_impl

    x = torch.arange(256, dtype=torch.uint8).view(FP8).view(16, 16).to(DEVICE)
    one = torch.eye(16).to(FP8).to(DEVICE)
    call = ScaledCall(x, one, torch.float32, described=Device((8, 0), 100))
    found = triton_impl.run(call, choose(call)).cpu().numpy()
    right = e4m3_values().reshape(16, 16)
    rows = ~np.isnan(right).any(axis=1)
    assert np.array_equal(found[rows], right[rows])
    assert np.isnan(found[~rows]).all()


@pytest.mark.parametrize("kind", [torch.int8, FP8])
def test_a_token_has_the_same_bits_alone_and_beside_others(kind: torch.dtype) -> None:
    x, weight = codes(kind, 70, 304), codes(kind, 40, 304, seed=1)
    scale, weight_scale = numbers(70), numbers(40, seed=1)
    all_of_them = OPERATORS[kind](x, weight, scale, weight_scale)
    for some in (slice(0, 1), slice(3, 20), slice(33, 70)):
        assert torch.equal(OPERATORS[kind](x[some], weight, scale[some], weight_scale), all_of_them[some])
    turned = x.t().contiguous().t()
    assert torch.equal(OPERATORS[kind](turned, weight, scale, weight_scale), all_of_them)


def test_nothing_times_something_is_nothing() -> None:
    for tokens, rows, cols in ((0, 4, 16), (3, 0, 16), (3, 4, 0)):
        for kind, product in OPERATORS.items():
            out = product(codes(kind, tokens, cols), codes(kind, rows, cols))
            assert out.shape == (tokens, rows)
            assert not out.any()


@pytest.mark.parametrize("kind", [torch.int8, FP8])
@pytest.mark.parametrize("tokens", [1, 17, 33, 64, 512, 2048])
def test_a_tile_of_hopper_fits_shared_memory_and_covers_the_result(kind: torch.dtype, tokens: int) -> None:
    for rows, cols in ((6144, 4096), (28672, 4096), (136, 14336)):
        shape = (torch.empty(n, cols, dtype=kind, device="meta") for n in (tokens, rows))
        found = choose(ScaledCall(*shape, torch.bfloat16, described=Device((9, 0), 132)))
        assert found.stages >= 3
        assert found.row_blocks * found.warpgroups * 64 >= tokens
        assert found.column_blocks * found.columns >= rows
        assert found.columns - found.extra in ((32, 64, 128) if kind is torch.int8 or not found.extra else ())
        assert found.to_map == (rows % 8 == 0)


X, W, S = codes(torch.int8, 3, 16), codes(torch.int8, 4, 16), numbers(4)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: ops.linear_int8(X.float(), W), "linear_int8: dtype of x: torch.float32"),
        (lambda: ops.linear_fp8(X, W), "linear_fp8: dtype of x: torch.int8"),
        (lambda: ops.linear_int8(X, W[:, :8]), r"linear_int8: x, weight: \(3, 16\), \(4, 8\)"),
        (lambda: ops.linear_int8(X, W, S), r"linear_int8: x_scale: \(4,\); allowed: \(3,\) or \(3, 1\) or \(\)"),
        (lambda: ops.linear_int8(X, W, None, S[:2]), r"linear_int8: weight_scale: \(2,\)"),
        (lambda: ops.linear_int8(X, W, None, S.half()), "linear_int8: dtype of weight_scale: torch.float16"),
        (lambda: ops.linear_int8(X, W, bias=S[:3]), r"linear_int8: bias: \(3,\); allowed: \(4,\)"),
        (lambda: ops.linear_int8(X, W, out_smooth=W[:, 0]), "dtype of out_smooth: torch.int8"),
        (lambda: ops.linear_int8(X, W, None, S, out_dtype=torch.int32), "out_dtype: torch.int32.*no scales"),
        (lambda: ops.linear_fp8(X.view(FP8), W.view(FP8), out_dtype=torch.int32), "linear_fp8: out_dtype"),
        (lambda: ops.linear_int8(X, W, out_scale=0.0), "out_scale: 0.0; allowed: a finite number greater than 0"),
        (lambda: ops.linear_int8(X, W, out_scale=1.0, quant_round="up"), "quant_round: 'up'"),
        (lambda: ops.linear_int8(X, W, out_scale=1.0, quant_max_bound=200.0), "in order within int8"),
        (lambda: ops.linear_int8(X, W, backend="cuda"), "backend: 'cuda'"),
        (lambda: ops.linear_int8(*(t.new_empty(1, 1 << 17) for t in (X, W))), "cols: 131072"),
        (lambda: ops.quantize_rows(S), r"quantize_rows: x: \(4,\)"),
        (lambda: ops.quantize_rows(S[None], torch.int16), "quantize_rows: dtype: torch.int16"),
        (lambda: ops.quantize_rows(S[None], scale=S), r"quantize_rows: scale: \(4,\); allowed: one number"),
        (lambda: ScaledMatrix((ScaledPart(W, S),)).multiply(S[None]), r"linear: x, weight: \(1, 4\), \(4, 16\)"),
    ],
)
def test_what_is_wrong_is_named(call: Any, complaint: str) -> None:
    with pytest.raises(OnewaveError, match=complaint):
        call()


def test_a_scale_that_is_not_finite_is_refused_where_contents_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = S.clone()
    scale[2] = torch.inf
    assert not ops.linear_int8(X, W, None, scale)[:, 2].isfinite().all()
    monkeypatch.setattr("onewave.ops.scaled_linear.call.checks_contents", lambda: True)
    with pytest.raises(InvalidArgumentError, match="linear_int8: weight_scale: a number that is not finite"):
        ops.linear_int8(X, W, None, scale)
