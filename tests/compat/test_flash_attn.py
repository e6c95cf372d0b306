"""flash-attn's functions against attention written out for each query."""

import inspect
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.operands.random import randn
from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError
from onewave.compat import flash_attn
from onewave.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window_size": (3, -1)},
    {"window_size": (4, 2)},
    {"window_size": (-1, 1)},
    {"causal": True, "window_size": (5, 7)},
]
EXTRAS: list[dict[str, Any]] = [
    {},
    {"softcap": 2.0, "softmax_scale": 0.3},
    {"alibi_slopes": "one"},
    {"alibi_slopes": "each"},
]


def exact(q, k, v, *, causal=False, window_size=(-1, -1), softcap=0.0, softmax_scale=None, alibi_slopes=None):
    """One sequence, query by query, in float64. q [Sq, H, D], k, v [Sk, Hkv, D], alibi_slopes [H]."""
    q, k, v = q.double(), k.double(), v.double()
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], float("-inf"), dtype=torch.float64)
    left, right = window_size[0], 0 if causal else window_size[1]
    for i in range(len(q)):
        place = i + len(k) - len(q)
        first = 0 if left < 0 else max(0, place - left)
        last = len(k) if right < 0 else max(0, min(len(k), place + right + 1))
        if first >= last:
            continue
        for h in range(q.shape[1]):
            kv = h // (q.shape[1] // k.shape[1])
            scores = k[first:last, kv] @ q[i, h] * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if alibi_slopes is not None:
                scores = scores - alibi_slopes[h] * (torch.arange(first, last) - place).abs()
            out[i, h], lse[i, h] = scores.softmax(0) @ v[first:last, kv], scores.logsumexp(0)
    return out, lse


def with_slopes(options: dict[str, Any], batch: int, heads: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Options with real slopes for the call, and those of each sequence for `exact`."""
    kind = options.get("alibi_slopes")
    if kind is None:
        return options, [options] * batch
    slopes = randn(batch, heads, seed=9).abs() if kind == "each" else randn(heads, seed=9).abs()
    return {**options, "alibi_slopes": slopes}, [
        {**options, "alibi_slopes": slopes[row] if kind == "each" else slopes} for row in range(batch)
    ]


def assert_equal(out: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("extra", EXTRAS)
def test_every_option_means_what_it_means_there(mask, extra):
    q, k, v = randn(2, 5, 4, 16), randn(2, 9, 2, 16, seed=1), randn(2, 9, 2, 16, seed=2)
    options, each = with_slopes({**mask, **extra}, 2, 4)
    out = flash_attn_func(q, k, v, **options)
    assert out.is_contiguous()
    assert_equal(out, torch.stack([exact(q[i], k[i], v[i], **each[i])[0] for i in range(2)]))


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (9, 4), (4, 0)])
def test_more_queries_than_keys_leave_rows_that_see_nothing_zero(num_queries, num_keys):
    q, k = randn(1, num_queries, 2, 16), randn(1, num_keys, 2, 16, seed=1)
    out = flash_attn_func(q, k, k, causal=True)
    assert_equal(out[0], exact(q[0], k[0], k[0], causal=True)[0])


def test_packed_operands_are_views_of_the_same():
    qkv = randn(2, 7, 3, 4, 16)
    q, k, v = qkv.unbind(2)
    whole = flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, causal=True), whole)
    assert torch.equal(flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True), whole)
    turned = qkv.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert torch.equal(flash_attn_qkvpacked_func(turned, causal=True), whole)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("paged", [False, True])
def test_varlen_is_each_sequence_alone(mask, paged):
    lens_q, lens_k = [3, 1, 5, 0], [7, 4, 5, 2]
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0, dtype=torch.int32) for lens in (lens_q, lens_k))
    q, k, v = randn(9, 4, 16), randn(18, 2, 16, seed=1), randn(18, 2, 16, seed=2)
    given, table = (k, v), None
    if paged:
        # Pages of 4 in a random order; the unused places and table entries hold rubbish.
        table = torch.full((4, 3), 999, dtype=torch.int32)
        free = iter(torch.randperm(10, generator=torch.Generator().manual_seed(3)).tolist())
        given = tuple(torch.full((10, 4, 2, 16), float("nan")) for _ in "kv")
        for row, n in enumerate(lens_k):
            for page in range(-(-n // 4)):
                table[row, page] = at = next(free)
                size = min(4, n - 4 * page)
                for pages, source in zip(given, (k, v), strict=True):
                    pages[at, :size] = source[cu_k[row] + 4 * page :][:size]
    out = flash_attn_varlen_func(q, *given, cu_q, cu_k, 5, 7, block_table=table, **mask)
    for row in range(4):
        mine, keys = slice(cu_q[row], cu_q[row + 1]), slice(cu_k[row], cu_k[row + 1])
        assert_equal(out[mine], exact(q[mine], k[keys], v[keys], **mask)[0])


@pytest.mark.parametrize("head_dim", [8, 20, 84])
def test_any_head_dim_is_taken_as_flash_attn_takes_it(head_dim):
    q, k, v = (randn(1, 5, 2, head_dim, seed=i) for i in range(3))
    cu = torch.tensor([0, 5], dtype=torch.int32)
    right = exact(q[0], k[0], v[0], causal=True)[0]
    assert_equal(flash_attn_func(q, k, v, causal=True)[0], right)
    assert_equal(flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 5, 5, causal=True), right)


def test_varlen_takes_packed_operands():
    qkv, cu = randn(8, 3, 4, 16), torch.tensor([0, 3, 8], dtype=torch.int32)
    q, k, v = qkv.unbind(1)
    whole = flash_attn_varlen_func(q, k, v, cu, cu, 5, 5, causal=True)
    assert torch.equal(flash_attn_varlen_qkvpacked_func(qkv, cu, 5, causal=True), whole)
    assert torch.equal(flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], cu, cu, 5, 5, causal=True), whole)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, position: int, interleaved: bool) -> Tensor:
    """One token's heads [H, D], element by element."""
    x, half = x.double().clone(), cos.shape[1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, half + i)
        c, s = cos[position, i].double(), sin[position, i].double()
        x[:, a], x[:, b] = x[:, a] * c - x[:, b] * s, x[:, a] * s + x[:, b] * c
    return x


class Step:
    """A cache with three sequences of 6, 0 and 9 keys in it, and new tokens, for each way to hold a cache."""

    past = (6, 0, 9)
    capacity = 24

    def __init__(self, num_queries: int, layout: str):
        self.q = randn(3, num_queries, 4, 16)
        self.new = randn(3, num_queries, 2, 16, seed=1), randn(3, num_queries, 2, 16, seed=2)
        self.old = [(randn(n, 2, 16, seed=3 + n), randn(n, 2, 16, seed=4 + n)) for n in self.past]
        self.layout, self.arguments = layout, {}
        if layout == "paged":
            self.table = torch.tensor([[7, 2, 0], [1, 9, 5], [4, 3, 8]], dtype=torch.int32)
            self.arguments["block_table"] = self.table
            shape = (10, 8, 2, 16)
        elif layout == "indexed":
            self.rows = torch.tensor([4, 0, 2], dtype=torch.int32)
            self.arguments["cache_batch_idx"] = self.rows
            shape = (5, self.capacity, 2, 16)
        else:
            shape = (3, self.capacity, 2, 16)
        self.caches = tuple(torch.full(shape, float("nan")) for _ in "kv")
        for row, pair in enumerate(self.old):
            for cache, values in zip(self.caches, pair, strict=True):
                for t, value in enumerate(values):
                    cache[self.place(row, t)] = value

    def place(self, row: int, t: int) -> tuple[int, int]:
        if self.layout == "paged":
            return int(self.table[row, t // 8]), t % 8
        return (int(self.rows[row]) if self.layout == "indexed" else row), t


@pytest.mark.parametrize("layout", ["plain", "indexed", "paged"])
@pytest.mark.parametrize("num_queries", [1, 3, 11])
@pytest.mark.parametrize("mask", MASKS)
def test_the_cache_is_appended_to_and_attended_over(layout, num_queries, mask):
    step = Step(num_queries, layout)
    untouched = [cache.clone() for cache in step.caches]
    seqlens = torch.tensor(step.past, dtype=torch.int32)
    out, lse = flash_attn_with_kvcache(
        step.q, *step.caches, *step.new, cache_seqlens=seqlens, return_softmax_lse=True, **step.arguments, **mask
    )
    for row, n in enumerate(step.past):
        keys = [torch.cat((step.old[row][i], step.new[i][row])) for i in (0, 1)]
        right, right_lse = exact(step.q[row], *keys, **mask)
        assert_equal(out[row], right)
        assert_equal(lse[row].T, right_lse)
        for cache, before, new in zip(step.caches, untouched, step.new, strict=True):
            for t in range(num_queries):
                assert torch.equal(cache[step.place(row, n + t)], new[row, t])
                before[step.place(row, n + t)] = new[row, t]
    for cache, before in zip(step.caches, untouched, strict=True):
        assert torch.equal(cache.nan_to_num(123.0), before.nan_to_num(123.0))


@pytest.mark.parametrize("layout", ["plain", "indexed"])
@pytest.mark.parametrize("num_queries", [1, 3, 11])
@pytest.mark.parametrize("mask", MASKS)
def test_no_query_sees_the_padding_at_a_rows_beginning(layout, num_queries, mask):
    step = Step(num_queries, layout)
    # All that the last row had before, too.
    leftpad = torch.tensor([2, 0, 9], dtype=torch.int32)
    for row, pad in enumerate(leftpad.tolist()):
        for cache, t in product(step.caches, range(pad)):
            cache[step.place(row, t)] = torch.nan
    angles = randn(step.capacity, 4, seed=8)
    for rotary in ({}, {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}):
        options, each = with_slopes({**mask, "alibi_slopes": "each" if rotary else None}, 3, 4)
        out, lse = flash_attn_with_kvcache(
            step.q, *step.caches, *step.new, cache_seqlens=torch.tensor(step.past, dtype=torch.int32),
            cache_leftpad=leftpad, return_softmax_lse=True, **step.arguments, **rotary, **options,
        )  # fmt: skip
        for row, (n, pad) in enumerate(zip(step.past, leftpad.tolist(), strict=True)):
            q, k = step.q[row], step.new[0][row]
            if rotary:
                # Places count the padding.
                k = torch.stack([rotated(x, *rotary.values(), n + i, True) for i, x in enumerate(k)])
                q = torch.stack([rotated(x, *rotary.values(), n + i * bool(mask), True) for i, x in enumerate(q)])
            keys, values = torch.cat((step.old[row][0], k))[pad:], torch.cat((step.old[row][1], step.new[1][row]))[pad:]
            right, right_lse = exact(q, keys, values, **each[row])
            assert_equal(out[row], right)
            assert_equal(lse[row].T, right_lse)


@pytest.mark.parametrize("num_queries", [1, 11])
def test_padding_is_left_out_of_a_cache_of_one_length(num_queries):
    q, k, v = randn(2, num_queries, 4, 16), randn(2, 20, 2, 16, seed=1), randn(2, 20, 2, 16, seed=2)
    # Rows that do not lie together, and nothing but padding in one of them.
    k, v = (x.repeat_interleave(2, 0)[::2] for x in (k, v))
    for length in (13, None):
        end = length or 20
        leftpad = torch.tensor([5, end])
        out, lse = flash_attn_with_kvcache(
            q, k, v, cache_seqlens=length, cache_leftpad=leftpad, causal=True, return_softmax_lse=True
        )
        assert_equal(out[0], exact(q[0], k[0, 5:end], v[0, 5:end], causal=True)[0])
        assert not out[1].any()
        assert (lse[1] == -torch.inf).all()


@pytest.mark.parametrize(("window", "same_as"), [((-1, 4), (-1, -1)), ((4, 1), (-1, 1)), ((1, 9), (1, -1))])
def test_a_side_of_the_window_that_reaches_over_all_keys_hides_nothing(window, same_as):
    q, k, v = randn(1, 9, 2, 16), randn(1, 4, 2, 16, seed=1), randn(1, 4, 2, 16, seed=2)
    starts = torch.tensor([0, 9], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
    for call in (
        lambda size: flash_attn_func(q, k, v, window_size=size),
        lambda size: flash_attn_varlen_func(q[0], k[0], v[0], *starts, 9, 4, window_size=size),
    ):
        assert torch.equal(call(window), call(same_as))
    assert not torch.equal(flash_attn_func(q, k, v, window_size=(-1, 3)), flash_attn_func(q, k, v))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (4, -1)}])
@pytest.mark.parametrize(("rotary_dim", "layout"), [(8, "plain"), (16, "plain"), (16, "indexed"), (8, "paged")])
def test_new_tokens_are_rotated_by_their_position(interleaved, mask, rotary_dim, layout):
    step = Step(2, layout)
    angles = randn(step.capacity, rotary_dim // 2, seed=8)
    cos, sin = angles.cos(), angles.sin()
    seqlens = torch.tensor(step.past, dtype=torch.int32)
    out = flash_attn_with_kvcache(
        step.q, *step.caches, *step.new, rotary_cos=cos, rotary_sin=sin, cache_seqlens=seqlens,
        rotary_interleaved=interleaved, **mask, **step.arguments,
    )  # fmt: skip
    for row, n in enumerate(step.past):
        # Queries without a mask all stand at the first new place.
        q = torch.stack([rotated(step.q[row, i], cos, sin, n + i * bool(mask), interleaved) for i in range(2)])
        k = torch.stack([rotated(step.new[0][row, i], cos, sin, n + i, interleaved) for i in range(2)])
        stored = torch.stack([step.caches[0][step.place(row, n + i)] for i in range(2)])
        assert_equal(stored, k)
        keys, values = torch.cat((step.old[row][0], k)), torch.cat((step.old[row][1], step.new[1][row]))
        assert_equal(out[row], exact(q, keys, values, **mask)[0])


@pytest.mark.parametrize("num_queries", [1, 11])
@pytest.mark.parametrize("extra", EXTRAS[1:])
def test_a_number_for_all_lengths_and_the_other_options(num_queries, extra):
    step = Step(num_queries, "plain")
    cache = tuple(randn(3, step.capacity, 2, 16, seed=i) for i in (5, 6))
    for mask in MASKS[:3]:
        options, each = with_slopes({**mask, **extra}, 3, 4)
        out = flash_attn_with_kvcache(step.q, *cache, cache_seqlens=13, **options)
        for row in range(3):
            assert_equal(out[row], exact(step.q[row], *(c[row, :13] for c in cache), **each[row])[0])


@pytest.mark.parametrize("num_splits", [0, 1, 3, 100])
def test_without_lengths_the_whole_cache_is_attended_over_in_any_number_of_splits(num_splits):
    q, k, v = randn(2, 1, 4, 16), randn(2, 200, 2, 16, seed=1), randn(2, 200, 2, 16, seed=2)
    assert_equal(flash_attn_with_kvcache(q, k, v, num_splits=num_splits)[0], exact(q[0], k[0], v[0])[0])


COMMON = [
    "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic",
    "return_attn_probs",
]  # fmt: skip
VARLEN = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
SIGNATURES = {
    "flash_attn_func": ["q", "k", "v", *COMMON],
    "flash_attn_kvpacked_func": ["q", "kv", *COMMON],
    "flash_attn_qkvpacked_func": ["qkv", *COMMON],
    "flash_attn_varlen_func": ["q", "k", "v", *VARLEN, *COMMON, "block_table"],
    "flash_attn_varlen_kvpacked_func": ["q", "kv", *VARLEN, *COMMON],
    "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen", *COMMON],
    "flash_attn_with_kvcache": [
        "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
        "cache_leftpad", "block_table", "softmax_scale", "causal", "window_size", "softcap", "rotary_interleaved",
        "alibi_slopes", "num_splits", "return_softmax_lse",
    ],
}  # fmt: skip


def test_signatures_have_flash_attns_names_and_defaults_in_its_order():
    defaults = {"dropout_p": 0.0, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "deterministic": False}
    defaults |= {"rotary_interleaved": True, "num_splits": 0, "return_softmax_lse": False, "return_attn_probs": False}
    own = [name for name, value in vars(flash_attn).items() if getattr(value, "__module__", "") == flash_attn.__name__]
    assert sorted(SIGNATURES) == sorted(name for name in own if not name.startswith("_"))
    for name, names in SIGNATURES.items():
        parameters = inspect.signature(getattr(flash_attn, name)).parameters
        assert list(parameters) == names
        for each in set(names) & set(defaults):
            assert parameters[each].default == defaults[each]


def test_a_cache_stays_out_of_the_graph_of_gradients():
    q, cache = randn(1, 1, 2, 16).requires_grad_(), [torch.zeros(1, 8, 2, 16) for _ in "kv"]
    out = flash_attn_with_kvcache(q, *cache, q * 2, q * 3, cache_seqlens=0)
    assert not any(each.requires_grad for each in cache)
    with pytest.raises(UnsupportedError, match="backward"):
        out.sum().backward()


def padded(q: Tensor, leftpad: list[int], **options: Any) -> object:
    return flash_attn_with_kvcache(q, q, q, cache_leftpad=torch.tensor(leftpad), **options)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda q: flash_attn_func(q, q, q, dropout_p=0.1), UnsupportedError, "dropout_p: 0.1"),
        (lambda q: flash_attn_func(q, q, q, return_attn_probs=True), UnsupportedError, "return_lse"),
        (lambda q: flash_attn_func(q, q, q, dropout_p=q), UnsupportedError, "dropout_p"),
        (lambda q: flash_attn_func(q, q, q, softcap=q), InvalidArgumentError, "softcap"),
        (lambda q: flash_attn_func(q, q, q, causal="False"), InvalidArgumentError, "causal: 'False'"),
        (
            lambda q: flash_attn_with_kvcache(q, q, q, cache_seqlens=torch.tensor([2**32 + 3, 1])),
            InvalidArgumentError,
            "seq_lens: 5; allowed: up to 4",
        ),
        (
            lambda q: flash_attn_with_kvcache(q, q, q, cache_batch_idx=torch.tensor([0.9, 1.9])),
            UnsupportedError,
            "cache_batch_idx: dtype: torch.float32",
        ),
        (
            lambda q: flash_attn_with_kvcache(q, q, q, block_table=torch.zeros(2, 1)),
            UnsupportedError,
            "block_table: dtype: torch.float32",
        ),
        (
            lambda q: flash_attn_with_kvcache(
                q[:, :1], q[:1].expand(2, -1, -1, -1), q, q[:, :1], q[:, :1], cache_seqlens=0
            ),
            ShapeError,
            "elements of their own",
        ),
        (lambda q: flash_attn_func(q[0], q, q), ShapeError, "batch, seq, heads, head_dim"),
        (lambda q: flash_attn_qkvpacked_func(q), ShapeError, "3, heads, head_dim"),
        (lambda q: flash_attn_with_kvcache(q, q, q, cache_leftpad=q), UnsupportedError, "cache_leftpad: dtype"),
        (lambda q: padded(q, [0, 0, 0]), ShapeError, r"cache_leftpad: \(3,\); allowed: \[2\]"),
        (lambda q: padded(q, [0, 6]), InvalidArgumentError, "cache_leftpad: 6; allowed: 0 to the row's length"),
        (lambda q: padded(q, [-1, 0]), InvalidArgumentError, "cache_leftpad: -1"),
        (
            lambda q: padded(q, [0, 0], block_table=torch.zeros(2, 1, dtype=torch.int32)),
            UnsupportedError,
            "cache_leftpad: with block_table",
        ),
        (lambda q: flash_attn_with_kvcache(q, q, q, q, q), InvalidArgumentError, "cache_seqlens"),
        (lambda q: flash_attn_with_kvcache(q, q, q, q, q, cache_seqlens=1), InvalidArgumentError, "so that 4 more fit"),
        (lambda q: flash_attn_with_kvcache(q, q, q, cache_seqlens=5), InvalidArgumentError, "0 to 4"),
        (lambda q: flash_attn_with_kvcache(q, q, q, q), InvalidArgumentError, "both or none"),
        (
            lambda q: flash_attn_with_kvcache(q, q.char(), q.char(), q[:, :1], q[:, :1], cache_seqlens=1),
            UnsupportedError,
            "float32; allowed: torch.int8",
        ),
        (lambda q: flash_attn_with_kvcache(q, q[:1], q[:1]), ShapeError, "cache_batch_idx"),
        (
            lambda q: flash_attn_with_kvcache(q, q, q, rotary_cos=q[0, 0], cache_seqlens=1),
            InvalidArgumentError,
            "rotary",
        ),
        (
            lambda q: flash_attn_with_kvcache(
                q, q, q, q[:, :1], q[:, :1], cache_seqlens=1, rotary_cos=q[0, 0], rotary_sin=q[0, 0]
            ),
            ShapeError,
            "up to 8",
        ),
        (lambda q: flash_attn_with_kvcache(q, q, q, cache_seqlens=torch.zeros(3)), ShapeError, r"int32 \[2\]"),
        (
            lambda q: flash_attn_with_kvcache(q, q, q, cache_seqlens=torch.ones(2).int().to_sparse()),
            UnsupportedError,
            "dense",
        ),
    ],
)
def test_what_is_not_supported_is_refused_clearly(call, error, says):
    with pytest.raises(error, match=says):
        call(randn(2, 4, 2, 16))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"rotary_interleaved": "no"}, "rotary_interleaved: 'no'; allowed: True or False"),
        ({"return_softmax_lse": 1}, "return_softmax_lse: 1; allowed: True or False"),
        ({"rotary_cos": torch.ones(8, 4, dtype=torch.int64)}, "dtypes of rotary_cos, rotary_sin: torch.int64, torch.f"),
        ({"rotary_sin": torch.ones(8, 4, dtype=torch.bool)}, "allowed: floating point"),
    ],
)
def test_a_call_whose_switches_or_tables_are_refused_has_appended_nothing(wrong, says):
    cache = torch.zeros(2, 1, 8, 2, 16)
    new, angles = torch.ones(1, 1, 2, 16), {"rotary_cos": torch.ones(8, 4), "rotary_sin": torch.ones(8, 4)}
    with pytest.raises(InvalidArgumentError, match=says):
        flash_attn_with_kvcache(torch.ones(1, 1, 4, 16), *cache, new, new, cache_seqlens=3, **{**angles, **wrong})
    assert not cache.any()


@pytest.mark.parametrize("num_queries", [1, 4, 12])
def test_a_cache_whose_heads_do_not_lie_together_is_refused_before_anything_is_appended(num_queries):
    q, k = randn(2, num_queries, 4, 32), randn(2, num_queries, 2, 32, seed=1)
    caches = [randn(2, 40, 2, 64, seed=seed)[..., ::2] for seed in (2, 3)]
    before = [cache.clone() for cache in caches]
    with pytest.raises(ShapeError, match=r"k_cache: strides .* a contiguous last axis"):
        flash_attn_with_kvcache(q, *caches, k, k, cache_seqlens=torch.tensor([3, 5]), causal=True)
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_queries", [1, 4, 12])
def test_a_table_may_have_any_strides(num_queries, dtype):
    q, k = randn(2, num_queries, 4, 32), randn(2, num_queries, 2, 32, seed=1)
    table = torch.tensor([[0, 2], [1, 3]]).to(dtype)
    results = []
    for each in (table, table.T.contiguous().T):
        pages = [randn(4, 16, 2, 32, seed=seed) for seed in (2, 3)]
        lengths = torch.tensor([3, 5], dtype=torch.int32)
        results.append(flash_attn_with_kvcache(q, *pages, k, k, cache_seqlens=lengths, block_table=each, causal=True))
    assert torch.equal(*results)


@pytest.mark.parametrize(("batch", "num_new"), [(0, 1), (0, 12), (2, 0)])
def test_nothing_can_be_rotated_and_appended(batch, num_new):
    q, k = randn(batch, num_new, 4, 32), randn(batch, num_new, 2, 32)
    caches, angles = [randn(batch, 40, 2, 32) for _ in "kv"], randn(64, 8)
    lengths = torch.zeros(batch, dtype=torch.int32)
    given = {"rotary_cos": angles, "rotary_sin": angles, "cache_seqlens": lengths, "causal": True}
    assert flash_attn_with_kvcache(q, *caches, k, k, **given).shape == q.shape
