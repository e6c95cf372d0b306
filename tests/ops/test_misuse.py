"""Calls that used to crash, or to give wrong numbers, and say now what is wrong, or are right."""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from onewave import ops
from onewave.base.errors import InvalidArgumentError, OnewaveError, ShapeError, UnsupportedError
from onewave.compat.flash_attn import flash_attn_func, flash_attn_with_kvcache
from onewave.ops.linear.packed import pack_dense

META = torch.device("meta")


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def packed(starts: list[int]) -> object:
    q, cu_seqlens = randn(6, 2, 32), torch.tensor(starts, dtype=torch.int32)
    return ops.attention_varlen(q, q, q, cu_seqlens, cu_seqlens, 6, 6)


X, Q, CACHE = randn(3, 16), randn(1, 4, 5, 32), randn(2, 2, 8, 16)
SLOT, STARTS, FLASH_CACHE = torch.tensor([0]), torch.tensor([0, 4], dtype=torch.int32), randn(1, 8, 2, 16)
REFUSED: dict[str, tuple[Callable[[], Any], type[OnewaveError], str]] = {
    "norm, wild weight": (lambda: ops.rms_norm(X, randn(16).to(META), 1e-6), UnsupportedError, "one device"),
    "norm, sparse": (lambda: ops.rms_norm(X.to_sparse(), randn(16), 1e-6), UnsupportedError, "a dense tensor"),
    "linear, whole numbers": (lambda: ops.linear(X.long(), X.long()), UnsupportedError, "bfloat16"),
    "attention, causal in words": (
        lambda: ops.attention(Q, Q, Q, causal="False"),
        InvalidArgumentError,
        "'False'; allowed: True or False",
    ),
    "attention, causal a mask": (
        lambda: ops.attention(Q, Q, Q, causal=torch.ones(5, 5)),
        InvalidArgumentError,
        "a Tensor; allowed: True or False",
    ),
    "packed, beyond the tokens": (lambda: packed([0, 60]), InvalidArgumentError, "cu_seqlens_q"),
    "packed, back and forth": (lambda: packed([0, 4, 2, 6]), InvalidArgumentError, "cu_seqlens_q"),
    "append, a cache expanded": (
        lambda: ops.append_kv(randn(1, 64), None, CACHE[:1].expand(2, -1, -1, -1), CACHE, SLOT, SLOT, num_heads=0 + 2),
        ShapeError,
        "elements of their own",
    ),
    "masked attention, a cache expanded": (
        lambda: ops.masked_multihead_attention(
            randn(2, 96), CACHE, CACHE[:1].expand(2, -1, -1, -1), torch.tensor([1, 1])
        ),
        ShapeError,
        "cache_v",
    ),
    "warm, no device": (lambda: ops.warm("bogus"), InvalidArgumentError, "warm: device: 'bogus'"),
    "warm, nothing": (lambda: ops.warm(None), InvalidArgumentError, "warm: device: None"),
    "explain, no dtype": (
        lambda: ops.explain("linear", (2, 3), (4, 3), dtype=3),
        UnsupportedError,
        "explain: dtype: 3",
    ),
    "norm, no hidden": (lambda: ops.rms_norm(randn(3, 0), randn(0), 1e-6), ShapeError, "at least 1"),
    "norm, list": (lambda: ops.rms_norm([1.0], randn(1), 1e-6), InvalidArgumentError, "x: list"),
    "norm, residual": (lambda: ops.add_rms_norm(X, X.int(), randn(16), 1e-6), UnsupportedError, "torch.int32 on cpu"),
    "norm, residual there": (lambda: ops.add_rms_norm(X, X.to(META), randn(16), 1e-6), UnsupportedError, "meta"),
    "swiglu, odd": (lambda: ops.swiglu(randn(3, 5)), ShapeError, "even"),
    "linear, there": (lambda: ops.linear(X, randn(4, 16).to(META)), UnsupportedError, "weight: torch.float32 on meta"),
    "linear, bias": (lambda: ops.linear(X, randn(4, 16), randn(3)), ShapeError, r"bias: \(3,\); allowed: \(4,\)"),
    "linear, dtypes": (lambda: ops.linear(X, randn(4, 16).half()), UnsupportedError, "weight: torch.float16"),
    "embedding": (lambda: ops.embedding(randn(3), randn(9, 4)), UnsupportedError, "int64"),
    "embedding, nowhere": (
        lambda: ops.embedding(torch.tensor([3]).to(META), randn(9, 4)),
        UnsupportedError,
        "one device",
    ),
    "embedding, list": (lambda: ops.embedding(torch.tensor([3]), [[1.0]]), InvalidArgumentError, "table: list"),
    "embedding, beyond": (
        lambda: ops.embedding(torch.tensor([9]), randn(9, 4)),
        InvalidArgumentError,
        "9; allowed: 0 to 8",
    ),
    "embedding, packed": (
        lambda: ops.embedding(torch.tensor([3, -1]), pack_dense(randn(9, 32))),
        InvalidArgumentError,
        "-1; allowed: 0 to 8",
    ),
    "linear, flat weight": (lambda: ops.linear(X, randn(16)), ShapeError, r"x, weight: \(3, 16\), \(16,\)"),
    "linear, out_dtype": (lambda: ops.linear(X, randn(4, 16), out_dtype=torch.int32), UnsupportedError, "out_dtype"),
    "linear, packed": (lambda: ops.linear(randn(3, 32), pack_dense(randn(4, 32)), randn(3)), ShapeError, "bias"),
    "norm, eps": (lambda: ops.rms_norm(X, randn(16), float("nan")), InvalidArgumentError, "eps: nan"),
    "norm, no eps": (lambda: ops.add_rms_norm(X, X, randn(16), None), InvalidArgumentError, "eps: None"),
    "swiglu, whole": (lambda: ops.swiglu(X.int()), UnsupportedError, "torch.int32"),
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
    "decode, no cache": (
        lambda: ops.decode_attention(randn(1, 4, 16), None, CACHE[:1], torch.tensor([8])),
        InvalidArgumentError,
        "k_cache: None",
    ),
    "append": (lambda: append(bias=3), InvalidArgumentError, "bias: 3"),
    "append, table": (lambda: append(block_table=[[0]]), InvalidArgumentError, "block_table: list"),
    "append, scale": (lambda: append(k_scale=1.0), InvalidArgumentError, "k_scale: 1.0"),
    "append, eps": (lambda: append(eps=float("inf")), InvalidArgumentError, "eps: inf"),
    "append, heads": (lambda: append(num_heads="4"), InvalidArgumentError, "num_heads: '4'"),
    "append, heads in halves": (lambda: append(num_heads=4.0), InvalidArgumentError, "num_heads: 4.0"),
    "append, heads in a list": (lambda: append(num_heads=[4]), InvalidArgumentError, "num_heads: "),
    "append, a flag for eps": (lambda: append(eps=True), InvalidArgumentError, "eps: True"),
    "linear, dtype": (lambda: ops.linear(X, X, out_dtype="float32"), UnsupportedError, "out_dtype: 'float32'"),
    "rms_norm, eps of pages": (lambda: ops.rms_norm(X, X[0], randn(9, 9, 9)), InvalidArgumentError, "eps: tensor"),
    "embedding, nothing": (lambda: ops.embedding(torch.tensor([0]), randn(0, 4)), InvalidArgumentError, "empty"),
    "append, slots": (lambda: append(slots=None), InvalidArgumentError, "slots: None"),
    "mmha, scale": (lambda: mmha(scale=float("nan")), InvalidArgumentError, "scale: nan"),
    "mmha, bound": (lambda: mmha(quant_max_bound="a"), InvalidArgumentError, "quant_max_bound: -127.0, 'a'"),
    "mmha, rounding": (lambda: mmha(quant_round=["half_even"]), InvalidArgumentError, "quant_round: "),
    "fp8, list": (lambda: ops.attention_fp8([1], Q, Q), InvalidArgumentError, "q: list"),
    "pages, list": (lambda: varlen(block_table=[[0]]), InvalidArgumentError, "block_table: list"),
    "pages, no start": (lambda: varlen(starts=torch.tensor(4)), ShapeError, "cu_seqlens_k"),
    "merge": (lambda: ops.merge_attention([Q], [None]), InvalidArgumentError, r"lses\[0\]"),
    "pack_k": (lambda: ops.pack_k(None), InvalidArgumentError, "k: None"),
    "flash, head_dims": (
        lambda: flash_attn_func(randn(1, 5, 2, 10), randn(1, 5, 2, 12), randn(1, 5, 2, 16)),
        ShapeError,
        "head_dim of q, k, v",
    ),
    "flash, half a length": (lambda: flash(cache_seqlens=6.5), InvalidArgumentError, "cache_seqlens: 6.5"),
    "flash, list": (lambda: flash(cache_seqlens=[6]), InvalidArgumentError, "cache_seqlens: "),
    "flash, splits": (lambda: flash(num_splits="a"), InvalidArgumentError, "num_splits: 'a'"),
    "flash, no cache": (lambda: flash(k_cache=None), InvalidArgumentError, "k_cache: None"),
    "flash, table": (lambda: flash(block_table=[[0]]), InvalidArgumentError, "block_table: list"),
    "flash, wild page": (
        lambda: flash(block_table=torch.tensor([[7]], dtype=torch.int32)),
        InvalidArgumentError,
        r"block_table\[0, 0\]: 7",
    ),
    "flash, full": (lambda: flash(cache_seqlens=torch.tensor([8]).int()), InvalidArgumentError, "9; allowed: up to 8"),
    "flash, rotary": (
        lambda: flash(rotary_cos=randn(4, 8), rotary_sin=randn(4, 8)),
        InvalidArgumentError,
        "4 positions; allowed: at least 7",
    ),
    "flash, scale": (lambda: flash(softmax_scale=float("nan")), InvalidArgumentError, "scale: nan"),
    "flash, window": (lambda: flash_attn_func(Q, Q, Q, window_size=(1.5, 0)), InvalidArgumentError, "whole numbers"),
}


def decode(length: int = 8, **given: Any) -> Tensor:
    return ops.decode_attention(randn(1, 4, 16), CACHE[:1], CACHE[:1], torch.tensor([length]), **given)


def append(k: Tensor | None = None, position: int = 0, slots: Any = SLOT, **given: Any) -> Tensor:
    cache = CACHE.clone() if k is None else k
    rotary, at = randn(1, 16), torch.tensor([position])
    return ops.append_kv(randn(1, 8 * 16), rotary, cache, cache.clone(), slots, at, **{"num_heads": 4} | given)


def mmha(**given: Any) -> Tensor:
    caches = (CACHE[:1].clone(), CACHE[:1].clone())
    return ops.masked_multihead_attention(randn(1, 8, 16), *caches, torch.tensor([3]), **given)


def varlen(starts: Any = STARTS, **given: Any) -> Tensor:
    pages = randn(2, 4, 2, 16)
    table = {"block_table": torch.tensor([[0]], dtype=torch.int32)} | given
    return ops.attention_varlen(randn(4, 4, 16), pages, pages, STARTS, starts, 4, 4, **table)


def flash(k_cache: Any = FLASH_CACHE, **given: Any) -> Any:
    """One new token of one sequence behind six."""
    k = FLASH_CACHE[:, :1]
    return flash_attn_with_kvcache(randn(1, 1, 4, 16), k_cache, k_cache, k, k, **{"cache_seqlens": 6} | given)


WRONG_TYPES: dict[str, Callable[[], Any]] = {
    "attention: q: None; allowed: a torch.Tensor": lambda: ops.attention(None, Q, Q),
    "attention: k: list; allowed: a torch.Tensor": lambda: ops.attention(Q, [1], Q),
    "attention_varlen: v: None": lambda: ops.attention_varlen(Q[0], Q[0], None, STARTS, STARTS, 4, 4),
    "attention: scale: 'x'; allowed: a finite number": lambda: ops.attention(Q, Q, Q, scale="x"),
    "attention: scale: nan; allowed: a finite number": lambda: ops.attention(Q, Q, Q, scale=float("nan")),
    "attention: softcap: 'x'; allowed: a finite number": lambda: ops.attention(Q, Q, Q, softcap="x"),
    "decode_attention: q: None": lambda: ops.decode_attention(None, CACHE, CACHE, SLOT),
    "decode_attention: seq_lens: list": lambda: ops.decode_attention(Q[:, :, 0], CACHE, CACHE, [5]),
    "masked_multihead_attention: qkv: None": lambda: ops.masked_multihead_attention(None, CACHE, CACHE, SLOT),
    "ffn: x: None": lambda: ops.ffn(None, X, X),
    "ffn: w_up: 3": lambda: ops.ffn(X, 3, X),
    "linear_int8: x: None": lambda: ops.linear_int8(None, X),
    "linear_fp8: x_scale: list": lambda: ops.linear_fp8(X, X, [1.0]),
    "quantize_rows: x: None": lambda: ops.quantize_rows(None),
    "flash_attn_func: q: None": lambda: flash_attn_func(None, Q, Q),
    "window_size: 3; allowed: (left, right)": lambda: flash_attn_func(Q, Q, Q, window_size=3),
}


@pytest.mark.parametrize("complaint", WRONG_TYPES)
def test_arguments_of_a_wrong_type_are_named(complaint: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(complaint)):
        WRONG_TYPES[complaint]()


@pytest.fixture(autouse=True)
def _checked_before() -> None:
    """A call that was right once: what follows is refused all the same."""
    decode(scale=0.25)
    append()


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
    def there(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    x, q, cache = there(3, 16), there(1, 4, 5, 32, dtype=torch.bfloat16), there(2, 2, 8, 16)
    one = there(2, dtype=torch.int64)
    assert ops.rms_norm(x, there(16), 1e-6).device == META
    assert ops.swiglu(x).shape == (3, 8)
    assert ops.linear(x, there(4, 16)).shape == (3, 4)
    assert ops.embedding(one, there(9, 4)).shape == (2, 4)
    assert ops.greedy(x).shape == (3,)
    assert ops.attention(q, q, q).shape == q.shape
    decoded = ops.decode_attention(there(2, 4, 16), cache, cache, one)
    assert decoded.shape == (2, 4, 16)
    assert decoded.device == META
    assert ops.append_kv(there(2, 8 * 16), there(2, 16), cache, cache, one, one, num_heads=4).shape == (2, 4, 16)
    assert ops.masked_multihead_attention(there(2, 8, 16), cache, cache, one).shape == (2, 4, 16)


def test_a_length_beyond_the_cache_is_the_caches() -> None:
    assert torch.equal(decode(99), decode(8))
    assert torch.equal(decode(99, window=10**30), decode(8))
    assert torch.equal(decode(20, window=4), torch.zeros(1, 4, 16))


def test_a_token_beyond_the_cache_is_not_stored() -> None:
    cache = CACHE.clone()
    append(cache, position=8)
    assert torch.equal(cache, CACHE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(40,), (3, 40), (2, 3, 40)])
def test_greedy_takes_any_floats(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    logits = randn(*shape, dtype=dtype)
    assert torch.equal(ops.greedy(logits), logits.argmax(-1))
    assert torch.equal(ops.greedy(torch._neg_view(logits)), (-logits).argmax(-1))


def test_greedy_takes_float8() -> None:
    logits = randn(3, 40).to(torch.float8_e4m3fn)
    assert torch.equal(ops.greedy(logits), logits.float().argmax(-1))


def test_a_block_that_does_not_exist_has_no_keys() -> None:
    for block in (-1, 2, 1 << 40):
        table = torch.tensor([[block]])
        assert torch.equal(
            ops.decode_attention(randn(1, 4, 16), CACHE, CACHE, torch.tensor([3]), block_table=table),
            torch.zeros(1, 4, 16),
        )


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("slot", "position"), [(0, 8), (0, 1 << 40), (2, 0), (-1, 0), (0, -1)])
def test_a_token_without_a_place_is_not_stored(slot: int, position: int, backend: str, paged: bool) -> None:
    cache = CACHE.clone()
    table = {"block_table": torch.tensor([[0], [5]])} if paged else {}
    q = append(cache, position, torch.tensor([slot]), backend=backend, **table)
    if paged:
        append(cache, 0, torch.tensor([1]), backend=backend, **table)
    assert torch.equal(cache, CACHE)
    torch.testing.assert_close(q, append(backend=backend))  # it has its queries all the same


def test_a_refused_call_has_appended_nothing() -> None:
    cache = FLASH_CACHE.clone()
    for wrong in ({"softcap": -1.0}, {"softmax_scale": float("inf")}, {"alibi_slopes": randn(3)}):
        with pytest.raises(OnewaveError):
            flash(cache, **wrong)
    with pytest.raises(OnewaveError):
        flash_attn_with_kvcache(randn(1, 1, 5, 16), cache, cache, *(FLASH_CACHE[:, :1],) * 2, cache_seqlens=6)
    # The last of four queries stands further on than the new key.
    angles = {"rotary_cos": randn(8, 8), "rotary_sin": randn(8, 8)}
    with pytest.raises(InvalidArgumentError, match="at least 10"):
        flash_attn_with_kvcache(
            randn(1, 4, 4, 16), cache, cache, *(FLASH_CACHE[:, :1],) * 2, cache_seqlens=6, causal=True, **angles
        )
    assert torch.equal(cache, FLASH_CACHE)


@pytest.mark.parametrize("queries", [1, 3])
def test_heads_of_any_width_have_a_cache(queries: int) -> None:
    cache, new = randn(1, 8, 2, 20), randn(1, queries, 2, 20)
    q, cos, sin = randn(1, queries, 4, 20), randn(8, 5), randn(8, 5)
    padded = [torch.nn.functional.pad(tensor, (0, 4)) for tensor in (q, cache, new)]
    given: Any = {"cache_seqlens": 4, "causal": True, "softmax_scale": 0.2, "rotary_cos": cos, "rotary_sin": sin}
    found = flash_attn_with_kvcache(q, cache, cache.clone(), new, new, **given)
    wide = flash_attn_with_kvcache(padded[0], padded[1], padded[1].clone(), padded[2], padded[2], **given)
    torch.testing.assert_close(found, wide[..., :20])


def test_slopes_with_a_gradient_are_no_output() -> None:
    q = randn(1, 5, 4, 16)
    slopes = torch.nn.Parameter(torch.rand(4))
    assert torch.equal(
        flash_attn_func(q, q, q, alibi_slopes=slopes), flash_attn_func(q, q, q, alibi_slopes=slopes.data)
    )


def test_numbers_of_any_kind() -> None:
    for scale in (np.float16(0.25), np.float32(0.25), Fraction(1, 4)):
        assert torch.equal(decode(scale=scale), decode(scale=0.25))
        assert torch.equal(
            ops.attention(Q, Q, Q, scale=scale, softcap=np.float32(2)), ops.attention(Q, Q, Q, scale=0.25, softcap=2.0)
        )
    assert torch.equal(decode(window=np.int64(3), split_size=1 << 70), decode(window=3))
    assert torch.equal(mmha(steps_per_block=1 << 80, scale=np.float32(0.25)), mmha(scale=0.25))
    assert torch.equal(ops.rms_norm(X, X[0], Fraction(1, 4)), ops.rms_norm(X, X[0], 0.25))
    assert torch.equal(append(num_heads=np.int64(4), eps=Fraction(1, 4)), append(eps=0.25))


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_product_to_float32_is_not_rounded_to_16_bits_first(tokens: int, dtype: torch.dtype) -> None:
    x, weight, bias = randn(tokens, 512, dtype=dtype), randn(5000, 512, dtype=dtype), randn(5000, dtype=dtype)
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(ops.linear(x, weight, bias, torch.float32).double(), exact, atol=1e-4, rtol=1e-5)
    large = torch.full((tokens, 1024), 16.0, dtype=dtype)
    assert torch.equal(ops.linear(large, large, out_dtype=torch.float32), torch.full((tokens, tokens), 262144.0))


def test_linear_of_float64_keeps_its_precision_until_the_result() -> None:
    x = torch.tensor([[1e8, 1.0]], dtype=torch.float64)
    weight = torch.tensor([[1 + 1e-8, -1e8]], dtype=torch.float64)
    assert torch.equal(ops.linear(x, weight, out_dtype=torch.float32), (x @ weight.T).float())


@pytest.mark.parametrize("q_scale", [5e4, 1e-7])
def test_float8_scales_that_float16_does_not_hold(q_scale: float) -> None:
    q, k, v = (randn(1, 2, 5, 32).to(torch.float8_e4m3fn) for _ in range(3))
    given: dict[str, Any] = {
        "q_scale": torch.full((2,), q_scale), "scale": 0.2 / q_scale, "out_dtype": torch.float16
    }  # fmt: skip
    found, exact = (ops.attention_fp8(q, k, v, **given, backend=backend) for backend in ("auto", "reference"))
    torch.testing.assert_close(found, exact, atol=2e-3, rtol=2e-3)
