"""Each Triton kernel against its reference: under the interpreter on the CPU, natively on a GPU.

The interpreter miscomputes bf16, so fp16 stands for both 16-bit types there; a GPU runs bf16 too.
"""

import pytest
import torch
from torch import Tensor

from kit.operands.random import DEVICE
from kit.operands.random import randn_here as randn
from onewave.base.device import Device
from onewave.ops.linear.choose import LinearCall, TileChoice
from onewave.ops.linear.choose import choose as choose_linear
from onewave.ops.rms_norm import reference as rms_norm_reference
from onewave.ops.swiglu import reference as swiglu_reference

# On a GPU these are the GPU tests of the operators.
pytestmark = [pytest.mark.pairs, *([pytest.mark.gpu] if torch.cuda.is_available() else [])]
LOW_DTYPES = [torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


def close(out: Tensor, reference_in_double: Tensor, baseline: Tensor) -> bool:
    """The operators' rule: error at most twice PyTorch's own at the same dtype."""
    error = (out.double() - reference_in_double).abs().max().item()
    return error <= 2 * (baseline.double() - reference_in_double).abs().max().item() + 1e-5


@pytest.mark.parametrize("dtype", LOW_DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 1), (1, 2048), (3, 90), (5, 577)])
def test_rms_norm_kernels_equal_the_reference(rows: int, hidden: int, dtype: torch.dtype) -> None:
    from onewave.ops.rms_norm import triton_impl

    x, residual = randn(rows, hidden, dtype=dtype), randn(rows, hidden, dtype=dtype, seed=1)
    weight = randn(hidden, dtype=dtype, seed=2)
    exact = rms_norm_reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert close(triton_impl.rms_norm(x, weight, 1e-5), exact, rms_norm_reference.rms_norm(x, weight, 1e-5))
    for stream in (residual, residual.float()):
        out, total = triton_impl.add_rms_norm(x, stream, weight, 1e-5)
        assert torch.equal(total, x + stream)
        exact = rms_norm_reference.rms_norm(total.double(), weight.double(), 1e-5)
        assert close(out, exact, rms_norm_reference.rms_norm(total, weight, 1e-5))
        assert out.dtype is dtype


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value encountered")
@pytest.mark.parametrize("vocab", [1, 61, 4096, 4097, 20_000])
def test_greedy_kernel_equals_argmax_and_takes_the_first_of_equals(vocab: int) -> None:
    from onewave.ops.sampling import rows_without_numbers, triton_impl

    logits = randn(9, vocab, dtype=torch.float32)
    logits[1] = 0.0
    logits[2] = -torch.inf
    logits[3, vocab // 2 :] = 7.0
    logits[4] = -logits[4].abs() - 1
    logits[5, vocab // 3] = torch.nan
    logits[5, vocab // 2] = torch.inf
    logits[6] = logits[6].round()  # many equals
    logits[7] = -0.0
    logits[7, vocab // 2] = 0.0
    logits[8, 1:] = -torch.inf
    # One row more between any two of these.
    apart = torch.full((9, 2, vocab), 9.0, device=DEVICE)
    apart[:, 0] = logits
    assert triton_impl.greedy(apart[:, 0]).tolist() == logits.cpu().argmax(dim=1).tolist()
    _, best = triton_impl.greedy_of_pieces(logits)
    assert rows_without_numbers(memoryview(best.cpu().numpy())) == [2, 5]
    everywhere = torch.full((3, vocab), torch.nan, device=DEVICE)
    everywhere[1] = 0.0
    everywhere[2, 0] = torch.inf
    assert rows_without_numbers(memoryview(triton_impl.max_of_pieces(everywhere).cpu().numpy())) == [0, 2]
    assert triton_impl.greedy(logits[:0]).shape == (0,)


# The interpreter is NumPy, which speaks up about rows of no numbers.
@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value encountered")
@pytest.mark.parametrize("vocab", [1, 61, 4096, 4097, 20_000])
def test_draw_kernel_equals_the_operators_of_pytorch(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from onewave.ops.sampling import op, triton_impl

    temperature, min_p = [0.3, 1.0, 1.7, 50.0, 1.0, 1.0, 0.7], [0.0, 0.0, 0.05, 0.0, 1.0, 0.999, 0.0]
    rows = len(temperature)
    parameters = op.RowParameters.build(
        temperature=temperature, top_k=[0] * rows, top_p=[1.0] * rows, min_p=min_p, device=torch.device(DEVICE)
    )
    group = parameters.plain
    for seed in range(6):
        logits = 3 * randn(rows, vocab, dtype=torch.float32, seed=seed)
        if seed % 2:
            logits = logits.round()  # many equals
        logits[4, :: max(1, vocab // 3)] = 9.0
        logits[6, vocab // 2 :] = -torch.inf
        edges = {4: 0.0, 5: 1 - 2.0**-53}
        uniform = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        if seed in edges:
            uniform.fill_(edges[seed])
        found = triton_impl.draw(logits, uniform.to(DEVICE), group.temperature, group.min_p, 2.0**44)
        with monkeypatch.context() as patch:
            patch.setattr(op, "_suits_kernels", lambda logits: False)
            expected = op._draw(logits, uniform.to(DEVICE), group)
        assert found.tolist() == expected.tolist(), seed
    # A mixed batch: the group's rows, through the operator.
    mixed = op.RowParameters.build(
        temperature=[0.0, 0.8, 0.0, 1.2, 1.0, 1.0, 1.0], top_k=[0] * rows, top_p=[1.0] * rows, min_p=min_p,
        device=torch.device(DEVICE),
    )  # fmt: skip
    chosen = []
    for suits in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(op, "_suits_kernels", lambda logits, suits=suits: suits)
            chosen.append(op.sample(logits, uniform.to(DEVICE), mixed).tolist())
    assert chosen[0] == chosen[1]
    logits[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf], device=DEVICE)[:, None]
    found = triton_impl.draw(logits, uniform.to(DEVICE), group.temperature, group.min_p, 2.0**44)
    assert ((found >= 0) & (found < vocab)).all()


@pytest.mark.parametrize("dtype", LOW_DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (2, 513), (3, 1536)])
def test_swiglu_kernel_equals_the_reference(rows: int, width: int, dtype: torch.dtype) -> None:
    from onewave.ops.swiglu import triton_impl

    gate_up = randn(rows, 2 * width, dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    exact = torch.nn.functional.silu(gate) * up
    assert close(triton_impl.swiglu(gate_up), exact, swiglu_reference.swiglu(gate_up))
    assert triton_impl.swiglu(gate_up[:, :0]).shape == (rows, 0)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """One of linear's kernels, those for several tokens also where PyTorch's matmul would be chosen."""
    from onewave.ops.linear import triton_impl

    call = LinearCall(x, weight, bias, out_dtype, described=Device((9, 0), 1))
    choice = choose_linear(call)
    return triton_impl.run(call, choice if choice.backend == "triton" else TileChoice("triton", "", "", ()))


@pytest.mark.parametrize("dtype", LOW_DTYPES)
@pytest.mark.parametrize(
    ("tokens", "rows", "cols"), [(1, 131, 96), (1, 7, 2049), (3, 16, 90), (17, 33, 256), (8, 100, 520)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_kernels_equal_torch_and_ignore_the_other_tokens(
    tokens: int, rows: int, cols: int, bias: bool, dtype: torch.dtype
) -> None:
    x, weight = randn(tokens, cols, dtype=dtype), randn(rows, cols, dtype=dtype, seed=1)
    offset = randn(rows, dtype=dtype, seed=2) if bias else None
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
    baseline = torch.nn.functional.linear(x, weight, offset)
    for out_dtype in (dtype, torch.float32):
        out = product(x, weight, offset, out_dtype)
        assert out.dtype is out_dtype
        assert close(out, exact, baseline)
    others_changed = torch.cat((x[:1], -x[1:]))
    assert torch.equal(product(others_changed, weight, offset, dtype)[0], product(x, weight, offset, dtype)[0])


@pytest.mark.parametrize("tokens", [1, 3])
def test_every_second_number_of_a_bias_is_a_bias(tokens: int) -> None:
    x, weight = randn(tokens, 64, dtype=torch.float16), randn(32, 64, dtype=torch.float16, seed=1)
    bias = randn(64, dtype=torch.float16, seed=2)[::2]
    expected = product(x, weight, bias.contiguous(), torch.float32)
    assert torch.equal(product(x, weight, bias, torch.float32), expected)


def test_no_token_is_left_to_pytorch() -> None:
    def module(tokens: int, out_dtype: torch.dtype) -> str:
        x = randn(tokens, 64, dtype=torch.float16)
        return choose_linear(LinearCall(x, weight, None, out_dtype, described=Device((9, 0), 1))).module

    weight = randn(5, 64, dtype=torch.float16)
    for out_dtype in (torch.float16, torch.float32):
        assert module(0, out_dtype) == "torch_impl"
    assert module(2, torch.float32) == module(2, torch.float16) == "hopper.launch"


@pytest.mark.parametrize(
    ("dtype", "scaled", "lengths"),
    [(torch.int8, True, [5, 0, 16, 33]), (torch.float8_e4m3fn, True, [17]), (torch.float8_e4m3fn, False, [1, 31])],
)
def test_dequantise_pages_kernel_equals_the_reference(
    dtype: torch.dtype, scaled: bool, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from onewave.ops.dequantise_pages import reference, triton_impl

    monkeypatch.setattr(triton_impl, "_PROGRAMS", 6)  # two a head, so that one has several pages
    shape = (9, 3, 16, 24)
    k, v = ((randn(*shape, dtype=torch.float32, seed=seed) * 30).to(dtype) for seed in (0, 1))
    scales = [randn(3, dtype=torch.float32, seed=seed).abs() if scaled else None for seed in (2, 3)]
    table = torch.tensor([8, 2, 5, 2, 0, 7, 6, 1, 3, 4, 8, 0], dtype=torch.int32, device=DEVICE).view(4, 3)[
        : len(lengths)
    ]
    starts = torch.tensor([0, *lengths], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)
    found, expected = (
        tuple(torch.full(shape, torch.nan, dtype=LOW_DTYPES[-1], device=DEVICE) for _ in "kv") for _ in "ab"
    )
    triton_impl.dequantise_pages(k, v, scales[0], scales[1], table, starts, out=found)
    reference.dequantise_pages(k, v, scales[0], scales[1], table, starts, out=expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
    assert found[0][8].isfinite().any(), "a page that is used"
