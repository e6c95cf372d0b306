"""flash_attn_with_kvcache on caches that autograd, a compiler or vmap see: what is read, what is written, what has a
graph."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from kit.operands.random import randn
from onewave.base.errors import InvalidArgumentError, UnsupportedError
from onewave.compat import flash_attn
from onewave.compat.flash_attn import flash_attn_with_kvcache
from onewave.ops.decode_attention.op import decode_attention

HEAD_DIM = 16


def whole(*numbers: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


def pair(rows: int = 2, capacity: int = 8) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, capacity, 1, HEAD_DIM), torch.zeros(rows, capacity, 1, HEAD_DIM)


WRONG: list[dict[str, Any]] = [
    {"cache_seqlens": whole(16), "block_table": whole(0, 1)[None]},
    {"cache_seqlens": whole(0), "block_table": whole(-1, -1)[None]},
    {"cache_seqlens": whole(0), "block_table": whole(2, 2, dtype=torch.int64)[None]},
    {"cache_seqlens": whole(0), "cache_batch_idx": whole(-1, dtype=torch.int64)},
    {"cache_seqlens": whole(0), "cache_batch_idx": whole(2, dtype=torch.int64)},
    {"cache_seqlens": whole(-1), "cache_batch_idx": whole(0, dtype=torch.int64)},
    {"cache_seqlens": whole(8), "cache_batch_idx": whole(0, dtype=torch.int64)},
]


@pytest.mark.parametrize("num_queries", [1, 9])
@pytest.mark.parametrize("wrong", WRONG)
def test_places_are_checked_before_anything_is_appended_with_gradients_too(wrong, num_queries):
    caches = pair()
    q = torch.nn.Parameter(randn(1, num_queries, 2, HEAD_DIM))
    new = torch.ones(1, 1, 1, HEAD_DIM)
    with pytest.raises(InvalidArgumentError, match="flash_attn_with_kvcache"):
        flash_attn_with_kvcache(q, *caches, new, new, causal=True, **wrong)
    assert not any(cache.any() for cache in caches)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_compiled_call_writes_nothing_outside_its_own_places(wrong, rotated):
    caches = pair()
    new, angles = torch.ones(1, 1, 1, HEAD_DIM), (torch.ones(32, 4),) * 2 if rotated else (None, None)

    def append(k_cache: Tensor, v_cache: Tensor, options: dict[str, Tensor]) -> None:
        q = new.expand(1, 1, 2, HEAD_DIM)
        flash_attn_with_kvcache(q, k_cache, v_cache, new, new, *angles, causal=True, **options)

    compiled = torch.compile(append, fullgraph=True, backend="aot_eager")
    # Or it is refused by the operator that reads the cache afterwards.
    with torch.no_grad():
        try:
            compiled(*caches, wrong)
        except InvalidArgumentError as error:
            assert str(error).startswith("decode_attention: ")  # noqa: PT017 (not every case is refused)
    assert not any(cache.any() for cache in caches)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("layout", ["plain", "rows", "pages"])
def test_a_compiled_call_appends_what_has_a_place_and_only_that(layout, rotated):
    rows, table = {
        "plain": (None, None),
        "rows": (whole(2, 0, dtype=torch.int64), None),
        "pages": (None, torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)),
    }[layout]
    caches = pair({"plain": 2, "rows": 3, "pages": 4}[layout], 4 if layout == "pages" else 8)
    q, k, v = randn(2, 3, 2, HEAD_DIM), randn(2, 3, 1, HEAD_DIM, seed=1), randn(2, 3, 1, HEAD_DIM, seed=2)
    angles = tuple(randn(16, 4, seed=seed) for seed in (3, 4)) if rotated else (None, None)

    def append(k_cache: Tensor, v_cache: Tensor, lengths: Tensor) -> Tensor:
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, *angles, lengths, rows, block_table=table, causal=True
        )

    with torch.no_grad():
        copies = pair(*caches[0].shape[:2])
        expected = append(*copies, whole(5, 1))
        assert copies[0].any()
        got = torch.compile(append, fullgraph=True, backend="aot_eager")(*caches, whole(5, 1))
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(caches, copies)


@pytest.mark.parametrize(
    ("followed", "rotated"), [*((name, rotated) for name in "qkv" for rotated in (False, True)), ("cos", True)]
)
@pytest.mark.parametrize("num_queries", [1, 2])
def test_backward_is_refused_whatever_it_would_follow(followed, rotated, num_queries):
    given = {
        "q": randn(2, num_queries, 2, HEAD_DIM),
        "k": randn(2, num_queries, 1, HEAD_DIM, seed=1),
        "v": randn(2, num_queries, 1, HEAD_DIM, seed=2),
        "cos": randn(8, 4, seed=3),
    }
    given[followed].requires_grad_()
    angles = (given["cos"], randn(8, 4, seed=4)) if rotated else (None, None)
    caches = pair()
    out = flash_attn_with_kvcache(
        given["q"], *caches, given["k"], given["v"], *angles, cache_seqlens=whole(1, 2), causal=True
    )
    assert all(cache.any() and not cache.requires_grad for cache in caches)
    with pytest.raises(UnsupportedError, match="backward; allowed: forward only"):
        out.sum().backward()


@pytest.mark.parametrize("window_size", [(-2, -7), (-1, 8), (8, -1), (9, 100)])
def test_a_window_that_hides_nothing_is_none(window_size):
    q, k, v = randn(1, 3, 2, HEAD_DIM), randn(1, 3, 1, HEAD_DIM, seed=1), randn(1, 3, 1, HEAD_DIM, seed=2)
    angles = randn(16, 8, seed=3), randn(16, 8, seed=4)
    got, expected = (
        flash_attn_with_kvcache(q, *pair(1), k, v, *angles, cache_seqlens=2, window_size=sides)
        for sides in (window_size, (-1, -1))
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("num_queries", [1, 9])
@pytest.mark.parametrize(
    "where",
    [
        {"block_table": torch.zeros(2, 2, dtype=torch.int32)},
        {"block_table": torch.zeros(2, 2, dtype=torch.int64)},
    ],
)
def test_a_cache_without_any_rows_has_keys_for_nobody(where, num_queries):
    q = randn(2, num_queries, 2, HEAD_DIM)
    out = flash_attn_with_kvcache(q, *pair(0), cache_seqlens=whole(0, 0), causal=True, **where)
    assert torch.equal(out, torch.zeros_like(q))


@pytest.mark.parametrize("num_queries", [1, 2, 9])
@pytest.mark.parametrize("causal", [False, True])
def test_a_batch_of_nobody_gives_nothing(num_queries, causal):
    q = randn(0, num_queries, 2, HEAD_DIM)
    out, lse = flash_attn_with_kvcache(q, *pair(0), cache_seqlens=3, causal=causal, return_softmax_lse=True)
    assert out.shape == q.shape
    assert lse.shape == (0, 2, num_queries)


@pytest.mark.parametrize("num_queries", [64, 65, 200])
def test_many_queries_that_see_the_same_keys_take_no_more_memory_at_a_time(num_queries, monkeypatch):
    asked: list[int] = []

    def counted(q: Tensor, *arguments: Any, **options: Any) -> Any:
        asked.append(q.shape[1] * q.shape[2])
        return decode_attention(q, *arguments, **options)

    monkeypatch.setattr(flash_attn, "decode_attention", counted)
    q = randn(2, num_queries, 4, HEAD_DIM, seed=1)
    k, v = (randn(2, 8, 2, HEAD_DIM, seed=seed) for seed in (2, 3))
    lengths = whole(8, 3)
    out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, return_softmax_lse=True)
    assert max(asked) <= 64 * 4
    heads_first = [x.repeat_interleave(2, 2).transpose(1, 2) for x in (k, v)]
    seen = (torch.arange(8) < lengths[:, None])[:, None, None]
    scores = (q.transpose(1, 2) @ heads_first[0].mT / HEAD_DIM**0.5).masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(out, (scores.softmax(-1) @ heads_first[1]).transpose(1, 2))
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_vmap_appends_as_a_call_for_each_does():
    q, k = randn(3, 2, 1, 2, HEAD_DIM), randn(3, 2, 1, 1, HEAD_DIM, seed=1)
    lengths = torch.tensor([[1, 2], [3, 4], [7, 0]], dtype=torch.int32)

    def append(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, lengths: Tensor) -> Any:
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cache_seqlens=lengths, causal=True)

    one, each = (tuple(torch.zeros(3, 2, 8, 1, HEAD_DIM) for _ in "kv") for _ in range(2))
    got = torch.vmap(append)(q, *one, k, lengths)
    expected = torch.stack([append(q[i], each[0][i], each[1][i], k[i], lengths[i]) for i in range(3)])
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(one, each)


@pytest.mark.parametrize("followed", ["q", "k", "v", "cos"])
def test_a_tangent_is_refused_before_anything_is_appended(followed):
    given = {"q": randn(1, 1, 2, HEAD_DIM), "cos": randn(8, 4)}
    given |= {name: randn(1, 1, 1, HEAD_DIM) for name in "kv"}
    caches = pair(1)
    with forward_ad.dual_level():
        given[followed] = forward_ad.make_dual(given[followed], torch.ones_like(given[followed]))
        with pytest.raises(UnsupportedError, match="forward-mode differentiation"):
            flash_attn_with_kvcache(
                given["q"], *caches, given["k"], given["v"], given["cos"], randn(8, 4), cache_seqlens=1
            )
    assert not any(cache.any() for cache in caches)


@pytest.mark.parametrize("rotated", [False, True])
def test_a_new_key_that_torch_func_follows_is_refused_before_anything_is_appended(rotated):
    q, new, caches = randn(1, 1, 2, HEAD_DIM), randn(1, 1, 1, HEAD_DIM), pair(1)
    angles = (randn(8, 4), randn(8, 4)) if rotated else (None, None)

    def summed(k: Tensor) -> Any:
        out: Any = flash_attn_with_kvcache(q, *caches, k, new, *angles, cache_seqlens=1)
        return out.sum()

    with pytest.raises(UnsupportedError, match=r"torch\.func\.grad"):
        torch.func.grad(summed)(new)
    assert not any(cache.any() for cache in caches)
