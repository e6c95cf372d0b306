"""The portable kernel of attention: under Triton's interpreter on a CPU, natively on a GPU."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.attention_oracle import oracle, within_rule
from kit.device import H200
from kit.lanes import slow
from kit.operands.random import DEVICE, randn_here
from onewave.ops.attention.call import AttentionCall, Extras, Packed
from onewave.ops.attention.choose import choose
from onewave.ops.attention.masks import Options, options
from onewave.ops.backends import load

pytestmark = [pytest.mark.pairs, *([pytest.mark.gpu] if torch.cuda.is_available() else [])]
# bf16 products are wrong in the interpreter.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
NAN = float("nan")
randn = partial(randn_here, dtype=DTYPE)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def launch(call: AttentionCall) -> None:
    """Launch the portable kernel as it is chosen for a call; without a query nothing is launched."""
    choice = choose(call)
    assert choice.module == ("triton.launch" if call.q.numel() else "empty")
    load("attention", choice.module).run(call, choice)


def run(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """The kernel on [B, H, S, D]; results begin as NaN."""
    tensors = {name: given.pop(name, None) for name in ("sinks", "alibi_slopes", "bias")}
    defaults = {"causal": False, "scale": None, "window": None, "softcap": None, "align": "bottom-right"}
    wanted = options("attention", head_dim=q.shape[3], **(defaults | given))
    out, lse = torch.full_like(q, NAN), torch.full(q.shape[:3], NAN, device=q.device)
    launch(AttentionCall(q, k, v, Extras(**tensors), wanted, "triton", None, out, lse, described=H200))
    return out, lse


def run_varlen(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[tuple[int, int]], longest: int | None = None, **given: Any
) -> tuple[Tensor, Tensor]:
    """The kernel on packed [tokens, H, D]. longest: max_seqlen_q, if it is not that."""
    defaults = {"causal": False, "scale": None, "window": None, "softcap": None, "align": "bottom-right"}
    wanted = options("attention_varlen", head_dim=q.shape[2], **(defaults | given))
    starts = [torch.tensor([0, *(n[i] for n in lengths)], device=q.device).cumsum(0).int() for i in (0, 1)]
    out, lse = torch.full_like(q, NAN), torch.full((q.shape[1], q.shape[0]), NAN, device=q.device)
    packed = Packed(*starts, longest or max(n for n, _ in lengths), max(n for _, n in lengths))
    launch(AttentionCall(q, k, v, Extras(), wanted, "triton", packed, out, lse, described=H200))
    return out, lse


def check(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> None:
    out, lse = run(q, k, v, **given)
    doubles = {n: x.double() if isinstance(x, Tensor) and x.dtype is not torch.bool else x for n, x in given.items()}
    exact, exact_lse = oracle(q.double(), k.double(), v.double(), **doubles)
    baseline, _ = oracle(q, k, v, **given)
    assert within_rule(out, exact, baseline)
    assert torch.equal(lse == float("-inf"), exact_lse == float("-inf"))
    assert not lse.isnan().any()
    assert not (out * (lse == float("-inf"))[..., None]).any()
    finite = exact_lse > float("-inf")
    torch.testing.assert_close(lse[finite].double(), exact_lse[finite], atol=2e-4, rtol=1e-5)


LENGTHS = [(1, 1), (1, 17), (63, 64), (64, 63), (113, 203), (239, 1), (140, 128), (0, 5), (5, 0)]
HEADS = [(1, 1), (4, 4), (7, 1), (9, 3), (8, 2)]
MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "align": "top-left"},
    {"window": 33},
    {"window": (40, 5), "softcap": 3.0},
    {"causal": True, "window": 7, "scale": 0.3},
]
# Every pair of lengths meets each mask once, with heads and head_dims going round.
SWEEP = [
    (*lengths, *HEADS[(i + j) % len(HEADS)], (16, 40, 64, 80, 128, 24)[(2 * i + j) % 6], MASKS[j])
    for i, lengths in enumerate(LENGTHS)
    for j in range(len(MASKS))
]


@pytest.mark.parametrize(("num_queries", "num_keys", "heads", "kv_heads", "head_dim", "mask"), SWEEP)
def test_every_length_and_mask_meets_the_error_rule(
    num_queries: int, num_keys: int, heads: int, kv_heads: int, head_dim: int, mask: dict[str, Any]
) -> None:
    q = randn(1, heads, num_queries, head_dim)
    k, v = (randn(1, kv_heads, num_keys, head_dim, seed=seed) for seed in (1, 2))
    check(q, k, v, **mask)


HEAD_DIMS = [16, 32, 40, 64, 80, 96, 128, 192, 256]
ON_A_GPU = [*LENGTHS, (799, 3), (1023, 1024), (1024, 1023), (640, 128)]


@pytest.mark.skipif(DEVICE == "cpu", reason="too much for the interpreter")
@pytest.mark.parametrize(
    ("head_dim", "at"),
    [
        # Without the slow ones every head_dim and every mask still meets both dtypes.
        (head_dim, at) if (at + 2 * nth) % 5 == 0 else slow(head_dim, at)
        for nth, head_dim in enumerate(HEAD_DIMS)
        for at in range(len(ON_A_GPU))
    ],
)
def test_the_whole_sweep_on_a_gpu(head_dim: int, at: int) -> None:
    """Every pair of lengths with all head counts at every head_dim; over the head_dims each length meets every mask."""
    num_queries, num_keys = ON_A_GPU[at]
    # One dtype and mask for all head counts: most of the time is the compiler's.
    dtype, mask = (torch.float16, torch.bfloat16)[at % 2], MASKS[(at + HEAD_DIMS.index(head_dim)) % len(MASKS)]
    for heads, kv_heads in (*HEADS[:4], (32, 8)):
        q = randn(2, heads, num_queries, head_dim).to(dtype)
        k, v = (randn(2, kv_heads, num_keys, head_dim, seed=seed).to(dtype) for seed in (1, 2))
        try:
            check(q, k, v, **mask)
        except AssertionError as error:
            case = (num_queries, num_keys, heads, kv_heads, dtype, mask)
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("head_dim", [32, 96, 192, 256])
def test_other_head_dims_meet_the_error_rule(head_dim: int) -> None:
    q, (k, v) = randn(1, 2, 30, head_dim), (randn(1, 1, 70, head_dim, seed=seed) for seed in (1, 2))
    check(q, k, v, causal=True)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(70, 70), (3, 130), (66, 50)])
def test_sinks_alibi_and_biases_meet_the_error_rule(num_queries: int, num_keys: int) -> None:
    q = randn(2, 4, num_queries, 32)
    k, v = (randn(2, 2, num_keys, 32, seed=seed) for seed in (1, 2))
    check(q, k, v, causal=True, sinks=randn(4, seed=3))
    check(q, k, v, causal=True, alibi_slopes=rand(4))
    check(q, k, v, window=20, alibi_slopes=rand(2, 4), sinks=randn(4, seed=3).float())
    check(q, k, v, bias=randn(4, num_queries, num_keys, seed=4))
    check(q, k, v, bias=randn(2, 1, 1, num_keys, seed=5).float(), causal=True, softcap=2.0)
    check(q, k, v, bias=randn(1, 1, num_queries, 1, seed=6).expand(2, 4, -1, num_keys))


def test_rows_that_a_mask_hides_whole_give_zero_even_with_sinks() -> None:
    q, (k, v) = randn(1, 2, 5, 16), (randn(1, 2, 9, 16, seed=seed) for seed in (1, 2))
    seen = rand(1, 1, 5, 9) > 0.4
    seen[:, :, 2] = False
    for bias in (seen, torch.zeros(1, 1, 5, 9, device=DEVICE).masked_fill(~seen, float("-inf"))):
        check(q, k, v, bias=bias)
        check(q, k, v, bias=bias, sinks=randn(2, seed=3))
        assert run(q, k, v, bias=bias)[1][0, :, 2].tolist() == [float("-inf")] * 2


def test_what_a_mask_hides_from_every_row_may_hold_nan() -> None:
    q, (k, v) = randn(1, 2, 70, 16), (randn(1, 1, 150, 16, seed=seed) for seed in (1, 2))
    k[:, :, 140:], v[:, :, 140:] = NAN, NAN
    seen = torch.arange(150, device=DEVICE) < 140
    check(q, k, v, bias=seen)
    check(q, k, v, bias=torch.zeros(150, device=DEVICE).masked_fill(~seen, float("-inf")))
    expected = run(q, k[:, :, :140], v[:, :, :140])
    assert all(torch.equal(a, b) for a, b in zip(run(q, k, v, bias=seen), expected, strict=True))


UNSEEN: list[dict[str, Any]] = [
    {"causal": True, "align": "top-left"},
    {"window": 33, "causal": True},
    {"window": (20, 5), "align": "top-left"},
    {"window": (40, 3)},
]


def unseen(num_queries: int, num_keys: int, mask: dict[str, Any]) -> Tensor:
    """Keys that no query sees: of equal scores every seen one has some weight."""
    q, k, v = torch.zeros(1, 1, num_queries, 8), torch.zeros(1, 1, num_keys, 8), torch.eye(num_keys)[None, None]
    return (oracle(q, k, v, **mask)[0][0, 0] == 0).all(0).to(DEVICE)


@pytest.mark.parametrize("mask", UNSEEN)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(5, 130), (70, 200), (3, 65), (100, 30)])
def test_keys_that_no_query_sees_may_hold_nan(num_queries: int, num_keys: int, mask: dict[str, Any]) -> None:
    q, (k, v) = randn(1, 2, num_queries, 32), (randn(1, 1, num_keys, 32, seed=seed) for seed in (1, 2))
    hidden = unseen(num_queries, num_keys, mask)
    clean = run(q, k, v, **mask)
    for tensors in ((k, v), [torch.cat((x, x[..., :1]), -1)[..., :32] for x in (k, v)]):
        for tensor in tensors:
            tensor[:, :, hidden] = NAN
        found = run(q, *tensors, **mask)
        assert torch.equal(found[0], clean[0])
        assert torch.equal(found[1], clean[1])


@pytest.mark.parametrize("mask", UNSEEN)
def test_keys_that_no_query_of_a_packed_sequence_sees_may_hold_nan(mask: dict[str, Any]) -> None:
    lengths = [(5, 130), (0, 7), (70, 200), (100, 30)]
    q, (k, v) = randn(175, 2, 32), (randn(367, 1, 32, seed=seed) for seed in (1, 2))
    clean, _ = run_varlen(q, k, v, lengths, **mask)
    at = 0
    for num_queries, num_keys in lengths:
        hidden = unseen(num_queries, num_keys, mask) if num_queries else torch.ones(num_keys, dtype=torch.bool)
        k[at : at + num_keys][hidden.to(DEVICE)], v[at : at + num_keys][hidden.to(DEVICE)] = NAN, NAN
        at += num_keys
    assert torch.equal(run_varlen(q, k, v, lengths, **mask)[0], clean)


def test_a_negative_or_zero_scale_is_taken_at_its_word() -> None:
    q, (k, v) = randn(1, 1, 20, 16), (randn(1, 1, 40, 16, seed=seed) for seed in (1, 2))
    check(q, k, v, scale=-0.5, causal=True)
    check(q, k, v, scale=0.0)


def test_scores_far_below_zero_and_far_apart_stay_exact() -> None:
    q, (k, v) = randn(1, 1, 20, 16) * 30, (randn(1, 1, 140, 16, seed=seed) for seed in (1, 2))
    check(q, k, v, scale=1.0)
    check(q.abs(), -k.abs(), v, scale=1.0)


@pytest.mark.parametrize("most", [torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min, 2.5e38])
def test_a_finite_bias_hides_nothing_however_large(most: float) -> None:
    """Whoever masks with the least finite number gets the mean of all values for a row that is masked as a whole."""
    q, (k, v) = randn(1, 2, 20, 32), (randn(1, 2, 70, 32, seed=seed) for seed in (1, 2))
    bias = torch.zeros(1, 1, 20, 70, device=DEVICE)
    bias[..., 3, :] = most
    bias[..., 4, 10:] = most
    out, lse = run(q, k, v, bias=bias)
    torch.testing.assert_close(out[:, :, 3].float(), v.float().mean(2), atol=2e-3, rtol=0)
    exact, _ = oracle(q.double(), k.double(), v.double(), bias=bias.double())
    others = [row for row in range(20) if row != 3]
    torch.testing.assert_close(out[:, :, others].double(), exact[:, :, others], atol=4e-3, rtol=0)
    assert lse.isfinite().all()


def test_a_scale_that_float32_has_as_0_is_0() -> None:
    q, (k, v) = randn(1, 1, 20, 16), (randn(1, 1, 40, 16, seed=seed) for seed in (1, 2))
    for causal in (False, True):
        assert torch.equal(run(q, k, v, scale=1e-50, causal=causal)[0], run(q, k, v, scale=0.0, causal=causal)[0])


def by_descriptors(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return choose(AttentionCall(q, k, v, Extras(), Options(0.1), "triton", described=H200)).descriptors


def test_strides_are_honoured() -> None:
    """Tokens before heads (descriptors can have them), rows 65 apart and expanded heads (they can't)."""
    bshd = [randn(2, 70, 4, 64, seed=seed).transpose(1, 2) for seed in (0, 1, 2)]
    assert by_descriptors(*bshd)
    check(*bshd, causal=True)
    odd = [randn(1, 2, 70, 65, seed=seed)[..., :64] for seed in (0, 1, 2)]
    assert not by_descriptors(*odd)
    check(*odd, causal=True)
    expanded = [randn(1, 1, 70, 80, seed=seed).expand(2, 4, -1, -1) for seed in (1, 2)]
    assert not by_descriptors(randn(2, 4, 70, 80), *expanded)
    check(randn(2, 4, 70, 80), *expanded, window=50)


def test_nothing_is_written_outside_the_output() -> None:
    q, (k, v) = randn(1, 2, 70, 40), (randn(1, 2, 50, 40, seed=seed) for seed in (1, 2))
    frame = torch.full((1, 4, 90, 48), 7.0, dtype=DTYPE, device=DEVICE)
    inner = frame[:, 1:3, 10:80, 4:44]
    launch(AttentionCall(q, k, v, Extras(), Options(0.1), "triton", None, inner, described=H200))
    inside = torch.zeros_like(frame, dtype=torch.bool)
    inside[:, 1:3, 10:80, 4:44] = True
    assert (frame[~inside] == 7).all()
    assert torch.equal(inner, run(q, k, v, scale=0.1)[0])


@pytest.mark.parametrize("mask", [slow(MASKS[0]), MASKS[1], slow(MASKS[2]), slow(MASKS[3]), MASKS[4]])
def test_packed_sequences_equal_each_alone_bit_for_bit(mask: dict[str, Any]) -> None:
    lengths = [(3, 60), (70, 131), (0, 4), (66, 66), (5, 0), (1, 1), (30, 9)]
    total = [sum(n) for n in zip(*lengths, strict=True)]
    q, (k, v) = randn(total[0], 4, 32), (randn(total[1] + 7, 2, 32, seed=seed) for seed in (1, 2))
    k[total[1] :], v[total[1] :] = NAN, NAN
    out, lse = run_varlen(q, k, v, lengths, **mask)
    at = [0, 0]
    for num_queries, num_keys in lengths:
        parts = [
            tensor[start : start + n].transpose(0, 1)[None]
            for tensor, start, n in ((q, at[0], num_queries), (k, at[1], num_keys), (v, at[1], num_keys))
        ]
        alone, alone_lse = run(*parts, **mask)
        assert torch.equal(out[at[0] : at[0] + num_queries], alone[0].transpose(0, 1))
        assert torch.equal(lse[:, at[0] : at[0] + num_queries], alone_lse[0])
        at = [at[0] + num_queries, at[1] + num_keys]


@pytest.mark.parametrize("mask", MASKS[:2])
@pytest.mark.parametrize("longest", [64, 70])
def test_of_a_sequence_longer_than_was_said_the_first_rows_are_right_and_the_others_untouched(
    longest: int, mask: dict[str, Any]
) -> None:
    lengths = [(200, 200), (30, 40)]
    q, (k, v) = randn(230, 2, 64), (randn(240, 2, 64, seed=seed) for seed in (1, 2))
    right, _ = run_varlen(q, k, v, lengths, **mask)
    out, lse = run_varlen(q, k, v, lengths, longest, **mask)
    assert torch.equal(out[:longest], right[:longest])
    assert torch.equal(out[200:], right[200:])
    assert out[longest:200].isnan().all()
    assert lse[:, longest:200].isnan().all()


def test_a_neighbours_nan_does_not_reach_a_packed_sequence() -> None:
    q, (k, v) = randn(20, 2, 16), (randn(90, 2, 16, seed=seed) for seed in (1, 2))
    clean, _ = run_varlen(q, k, v, [(10, 45), (10, 45)])
    k[45:], v[45:] = NAN, NAN
    out, _ = run_varlen(q, k, v, [(10, 45), (10, 45)])
    assert torch.equal(out[:10], clean[:10])
    assert out[10:].isnan().all()


def test_a_rows_bits_depend_neither_on_the_batch_nor_on_other_queries() -> None:
    q, (k, v) = randn(3, 4, 150, 64), (randn(3, 2, 150, 64, seed=seed) for seed in (1, 2))
    out, lse = run(q, k, v, causal=True)
    alone, alone_lse = run(q[1:2], k[1:2], v[1:2], causal=True)
    assert torch.equal(out[1:2], alone)
    assert torch.equal(lse[1:2], alone_lse)
    # The last rows by themselves: another tile, and heads packed.
    few, few_lse = run(q[:, :, 147:], k, v, causal=True)
    assert torch.equal(out[:, :, 147:], few)
    assert torch.equal(lse[:, :, 147:], few_lse)
