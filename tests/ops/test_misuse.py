"""Calls that used to crash, or to give wrong numbers, and say now what is wrong, or are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from onewave import ops
from onewave.base.errors import InvalidArgumentError, OnewaveError, ShapeError, UnsupportedError
from onewave.compat.flash_attn import flash_attn_func

META = torch.device("meta")


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


X, Q, CACHE = randn(3, 16), randn(1, 4, 5, 32), randn(2, 2, 8, 16)
REFUSED: dict[str, tuple[Callable[[], Any], type[OnewaveError], str]] = {
    "norm, wild weight": (lambda: ops.rms_norm(X, randn(16).to(META), 1e-6), UnsupportedError, "one device"),
    "norm, no hidden": (lambda: ops.rms_norm(randn(3, 0), randn(0), 1e-6), ShapeError, "at least 1"),
    "norm, list": (lambda: ops.rms_norm([1.0], randn(1), 1e-6), InvalidArgumentError, "x: list"),
    "norm, residual": (lambda: ops.add_rms_norm(X, X.int(), randn(16), 1e-6), UnsupportedError, "torch.int32 on cpu"),
    "norm, residual there": (lambda: ops.add_rms_norm(X, X.to(META), randn(16), 1e-6), UnsupportedError, "meta"),
    "swiglu, odd": (lambda: ops.swiglu(randn(3, 5)), ShapeError, "even"),
    "linear, there": (lambda: ops.linear(X, randn(4, 16).to(META)), UnsupportedError, "weight: torch.float32 on meta"),
    "linear, bias": (lambda: ops.linear(X, randn(4, 16), randn(3)), ShapeError, r"bias: \(3,\); allowed: \(4,\)"),
    "linear, dtypes": (lambda: ops.linear(X, randn(4, 16).half()), UnsupportedError, "weight: torch.float16"),
    "embedding": (lambda: ops.embedding(randn(3), randn(9, 4)), UnsupportedError, "int64"),
    "greedy, empty": (lambda: ops.greedy(randn(3, 0)), ShapeError, "vocab at least 1"),
    "sinks": (lambda: ops.attention(Q, Q, Q, sinks=[0.0] * 4), InvalidArgumentError, "sinks: list"),
    "bias": (lambda: ops.attention(Q, Q, Q, bias=1), InvalidArgumentError, "bias: 1"),
    "out": (lambda: ops.attention(Q, Q, Q, out="x"), InvalidArgumentError, "out: 'x'"),
    "half a window": (lambda: ops.attention(Q, Q, Q, window=2.5), InvalidArgumentError, "window: 2.5"),
    "half a side": (lambda: ops.attention(Q, Q, Q, window=(1.5, 0)), InvalidArgumentError, "number of keys"),
    "a window of text": (lambda: ops.attention(Q, Q, Q, window="ab"), InvalidArgumentError, "window: 'ab'"),
    "no side": (lambda: ops.attention(Q, Q, Q, window=(float("nan"), 0)), InvalidArgumentError, "nan"),
    "endless scale": (lambda: ops.attention(Q, Q, Q, scale=10**400), InvalidArgumentError, "a finite number"),
    "a flag for a scale": (lambda: ops.attention(Q, Q, Q, scale=True), InvalidArgumentError, "scale: True"),
    "starts": (lambda: ops.attention_varlen(Q[0], Q[0], Q[0], None, None, 4, 4), InvalidArgumentError, "cu_seqlens_q"),
    "longest": (
        lambda: ops.attention_varlen(
            Q[0], Q[0], Q[0], torch.tensor([0, 4], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32), "4", 4
        ),
        InvalidArgumentError,
        "max_seqlen_q: '4'",
    ),
    "decode, scale": (lambda: decode(scale=float("nan")), InvalidArgumentError, "scale: nan"),
    "decode, softcap": (lambda: decode(softcap=float("inf")), InvalidArgumentError, "softcap: inf"),
    "decode, window": (lambda: decode(window=2.5), InvalidArgumentError, "window: 2.5"),
    "decode, flag": (lambda: decode(window=True), InvalidArgumentError, "window: True"),
    "decode, split": (lambda: decode(split_size=63.5), InvalidArgumentError, "split_size: 63.5"),
    "decode, table": (lambda: decode(block_table=[[0]]), InvalidArgumentError, "block_table: list"),
    "append": (lambda: append(bias=3), InvalidArgumentError, "bias: 3"),
    "merge": (lambda: ops.merge_attention([Q], [None]), InvalidArgumentError, r"lses\[0\]"),
    "pack_k": (lambda: ops.pack_k(None), InvalidArgumentError, "k: None"),
    "flash, head_dims": (
        lambda: flash_attn_func(randn(1, 5, 2, 10), randn(1, 5, 2, 12), randn(1, 5, 2, 16)),
        ShapeError,
        "head_dim of q, k, v",
    ),
    "flash, window": (lambda: flash_attn_func(Q, Q, Q, window_size=(1.5, 0)), InvalidArgumentError, "whole numbers"),
}


def decode(length: int = 8, **given: Any) -> Tensor:
    return ops.decode_attention(randn(1, 4, 16), CACHE[:1], CACHE[:1], torch.tensor([length]), **given)  # type: ignore[return-value] (no LSE)


def append(k: Tensor | None = None, position: int = 0, **given: Any) -> Tensor:
    cache = CACHE.clone() if k is None else k
    rotary, at = randn(1, 16), torch.tensor([position])
    return ops.append_kv(randn(1, 8 * 16), rotary, cache, cache.clone(), torch.tensor([0]), at, num_heads=4, **given)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_line(name: str) -> None:
    call, error, says = REFUSED[name]
    with pytest.raises(error, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_two_dtypes(dtype: torch.dtype) -> None:
    x, weight = randn(3, 64, dtype=dtype), randn(64)
    exact = torch.nn.functional.rms_norm(x.double(), (64,), weight.double(), 1e-6)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6).double(), exact, rtol=1e-5, atol=1e-5)
    normed, total = ops.add_rms_norm(x, x.float(), weight, 1e-6)
    assert torch.equal(total, 2 * x.float())
    torch.testing.assert_close(normed.double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("weight", [randn(32)[::2], randn(1).expand(16)])
def test_a_norms_weight_may_have_strides(weight: Tensor) -> None:
    assert torch.equal(
        ops.rms_norm(X, weight, 1e-6), ops.rms_norm(X, weight.clone(memory_format=torch.contiguous_format), 1e-6)
    )


def test_tensors_of_shapes_alone_give_such() -> None:
    x = X.to(META)
    assert ops.rms_norm(x, randn(16).to(META), 1e-6).device == META
    assert ops.swiglu(x).shape == (3, 8)


def test_a_length_beyond_the_cache_is_the_caches() -> None:
    assert torch.equal(decode(99), decode(8))
    assert torch.equal(decode(99, window=10**30), decode(8))
    assert torch.equal(decode(20, window=4), torch.zeros(1, 4, 16))


def test_a_token_beyond_the_cache_is_not_stored() -> None:
    cache = CACHE.clone()
    append(cache, position=8)
    assert torch.equal(cache, CACHE)


def test_greedy_takes_any_floats() -> None:
    logits = randn(3, 40, dtype=torch.bfloat16)
    assert torch.equal(ops.greedy(logits), logits.argmax(-1))


def test_windows_of_numpys_numbers() -> None:
    assert torch.equal(ops.attention(Q, Q, Q, window=np.int64(3)), ops.attention(Q, Q, Q, window=3))
    assert torch.equal(ops.attention(Q, Q, Q, window=(10**30, 0)), ops.attention(Q, Q, Q, causal=True, window=(-1, 0)))


def test_out_has_no_gradient_to_give() -> None:
    q = Q.clone().requires_grad_()
    with pytest.raises(UnsupportedError, match="no_grad"):
        ops.attention(q, Q, Q, out=torch.empty_like(Q))
    with pytest.raises(UnsupportedError, match="no_grad"):
        ops.attention(Q, Q, Q, out=q * 1)
    with torch.no_grad():
        ops.attention(q, Q, Q, out=torch.empty_like(Q))


@pytest.mark.parametrize(
    "call", [lambda q, s: ops.attention(q, q, q, scale=s), lambda q, s: flash_attn_func(q, q, q) * s]
)
def test_numbers_that_a_compiler_does_not_know_yet(call: Callable[[Tensor, float], Tensor]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for scale in (0.3, 0.2):
        torch.testing.assert_close(compiled(Q, scale), call(Q, scale))
