"""Attention in float8 on a GPU: masks, lengths, scales and packed sequences against float32, and its bits."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.operands.on_gpu import ON_HOPPER
from onewave.ops.attention.fp8.op import attention_fp8

pytestmark = ON_HOPPER
NAN = float("nan")
FP8 = torch.float8_e4m3fn
MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window": 100, "softcap": 8.0},
    {"window": (37, 11), "align": "top-left", "sinks": True},
]
LENGTHS = [(1, 1), (1, 300), (63, 65), (128, 128), (300, 1000), (1000, 129), (2048, 2048)]
Triple = tuple[Tensor, Tensor, Tensor]


def quantised(shape: tuple[int, ...], seed: int, axis: int) -> tuple[Tensor, Tensor]:
    """Random float8 inside a frame of NaN, and scales of its heads that use e4m3's range."""
    made = torch.Generator("cuda").manual_seed(seed)
    values = torch.randn(shape, generator=made, device="cuda")
    others = [n for n in range(len(shape)) if n != axis]
    scales = values.abs().amax(others) / 300 if values.numel() else torch.ones(shape[axis], device="cuda")
    view = [1] * len(shape)
    view[axis] = -1
    frame = torch.full((*shape[:-2], shape[-2] + 5, shape[-1] + 16), NAN, device="cuda").to(FP8)
    inside = frame[..., 2 : 2 + shape[-2], : shape[-1]]
    inside.copy_((values / scales.view(view)).to(FP8))
    return inside, scales


def check(q: Tensor, k: Tensor, v: Tensor, scales: Triple, given: dict[str, Any], what: object) -> Tensor:
    """Within what 3 bits of a weight's mantissa cost, with log-sums and without; returns the latter."""
    named: dict[str, Any] = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True)) | given
    out = attention_fp8(q, k, v, **named, backend="gluon")
    (other, lse), (exact, exact_lse) = (
        attention_fp8(q, k, v, **named, return_lse=True, backend=backend) for backend in ("gluon", "reference")
    )
    values = v.float().nan_to_num(0).abs().max() * scales[2].max()
    for each in (out, other):
        assert torch.isfinite(each).all(), what
        error = (each.float() - exact.float()).abs()
        # A weight is at most 8 % below and 6.4 % above its due; errors of many weights cancel.
        assert error.max() <= values / 16, (what, error.max(), values)
        assert error.pow(2).mean().sqrt() <= 0.04 * exact.float().pow(2).mean().sqrt() + 1e-3, what
    assert torch.equal(lse == -torch.inf, exact_lse == -torch.inf), what
    finite = torch.isfinite(exact_lse)
    torch.testing.assert_close(lse[finite], exact_lse[finite], atol=2e-2, rtol=2e-3)
    return out


@pytest.mark.parametrize("mask", MASKS)
def test_every_length_and_mask_is_as_near_as_float8_allows(mask: dict[str, Any]) -> None:
    for seed, (num_queries, num_keys) in enumerate(LENGTHS):
        heads, kv_heads, head_dim = ((4, 4, 128), (8, 2, 128), (6, 1, 96))[seed % 3]
        q, q_scale = quantised((2, heads, num_queries, head_dim), seed, 1)
        k, k_scale = quantised((2, kv_heads, num_keys, head_dim), seed + 10, 1)
        v, v_scale = quantised((2, kv_heads, num_keys, head_dim), seed + 20, 1)
        given = dict(mask)
        if given.pop("sinks", False):
            given["sinks"] = torch.linspace(-2, 2, heads, device="cuda")
        check(q, k, v, (q_scale, k_scale, v_scale), given, (num_queries, num_keys, heads))


@pytest.mark.parametrize("mask", MASKS[:3])
def test_packed_sequences_equal_each_alone_bit_for_bit(mask: dict[str, Any]) -> None:
    lengths, key_lengths = [1, 127, 640, 64, 0, 333], [5, 127, 700, 900, 3, 333]
    starts, key_starts = (torch.tensor([0, *n], device="cuda").cumsum(0).int() for n in (lengths, key_lengths))
    q, q_scale = quantised((sum(lengths), 8, 128), 0, 1)
    k, k_scale = quantised((sum(key_lengths), 2, 128), 1, 1)
    v, v_scale = quantised((sum(key_lengths), 2, 128), 2, 1)
    packing = {
        "cu_seqlens_q": starts, "cu_seqlens_k": key_starts, "max_seqlen_q": max(lengths),
        "max_seqlen_k": max(key_lengths),
    }  # fmt: skip
    scales = (q_scale, k_scale, v_scale)
    out = check(q, k, v, scales, mask | packing, mask)
    named: dict[str, Any] = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    for row, (n, m) in enumerate(zip(lengths, key_lengths, strict=True)):
        at, key_at = int(starts[row]), int(key_starts[row])
        alone = [t.transpose(0, 1)[None] for t in (q[at : at + n], k[key_at : key_at + m], v[key_at : key_at + m])]
        one = attention_fp8(*alone, **named, **mask, backend="gluon")
        assert torch.equal(one[0].transpose(0, 1), out[at : at + n]), (row, mask)


def test_bits_repeat_and_large_scores_stay_finite() -> None:
    q, q_scale = quantised((3, 16, 900, 128), 0, 1)
    k, k_scale = quantised((3, 4, 900, 128), 1, 1)
    v, v_scale = quantised((3, 4, 900, 128), 2, 1)
    out = check(q, k, v, (q_scale * 3, k_scale * 3, v_scale), {"causal": True}, "large")
    named: dict[str, Any] = {"q_scale": q_scale * 3, "k_scale": k_scale * 3, "v_scale": v_scale}
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(300):
        differ += (attention_fp8(q, k, v, causal=True, **named, backend="gluon") != out).sum()
    assert differ.item() == 0


@pytest.mark.parametrize("octaves", [1e4, 1e6, 1e7])
def test_large_scores_give_values_and_nothing_else(octaves: float) -> None:
    """Tensor cores add with 14 bits, so which key is highest differs from float32; that no weight is NaN does not."""
    q, _ = quantised((2, 4, 300, 128), 0, 1)
    k, _ = quantised((2, 4, 500, 128), 1, 1)
    v, v_scale = quantised((2, 4, 500, 128), 2, 1)
    # Scores with a standard deviation of so many octaves.
    size = (q.float().std() * k.float().std() * 128**0.5).item()
    named = {"v_scale": v_scale, "scale": octaves * math.log(2) / size}
    out = attention_fp8(q, k, v, **named, backend="gluon").float()
    assert torch.isfinite(out).all()
    assert out.abs().max() <= v.float().abs().max() * v_scale.max()
    # Each row is one key's values, or a mixture of few.
    assert out.pow(2).mean() >= 0.5 * (v.float() * v_scale.view(1, -1, 1, 1)).pow(2).mean()


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("peak", [0, 5000, 8191])
def test_many_keys_far_below_one_weigh_what_they_should(peak: int, return_lse: bool) -> None:
    q = torch.zeros(1, 1, 200, 128, device="cuda")
    k, v = torch.zeros(1, 1, 8192, 128, device="cuda"), torch.ones(1, 1, 8192, 128, device="cuda")
    q[..., 0] = 1.0
    k[:, :, peak, 0], v[:, :, peak] = 16.0, -1.0
    stored = [tensor.to(FP8) for tensor in (q, k, v)]
    found = attention_fp8(*stored, scale=math.log(2), backend="gluon", return_lse=return_lse)
    out = found[0] if isinstance(found, tuple) else found
    others = (8192 - 128) * 2.0**-16
    expected = torch.full(out.shape, (others - 1) / (others + 1), device="cuda")
    torch.testing.assert_close(out.float(), expected, atol=6e-3, rtol=0.0)


@pytest.mark.parametrize("return_lse", [False, True])
def test_nan_of_a_key_or_value_reaches_the_rows_that_see_it(return_lse: bool) -> None:
    q, k, v = (torch.randn(1, 2, 300, 64, device="cuda") for _ in range(3))
    k[:, 0, 150, 3] = NAN
    v[:, 1, 200, 5] = NAN
    stored = [tensor.to(FP8) for tensor in (q, k, v)]
    found = attention_fp8(*stored, causal=True, backend="gluon", return_lse=return_lse)
    out = found[0] if isinstance(found, tuple) else found
    assert out[:, 0, 150:].isnan().all()
    assert not out[:, 0, :150].isnan().any()
    assert out[:, 1, 200:, 5].isnan().all()
    # Those that share a tile with it have it, too.
    assert not out[:, 1, :128].isnan().any()
