"""Attention of few queries over many keys in two launches: their own source in NumPy, and which calls take it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kit.numpy_gpu.attention_in_numpy import NumpyKernel, kernels_in_numpy
from onewave.ops.attention.call import AttentionCall, Extras, Packed
from onewave.ops.attention.choose import facts_of
from onewave.ops.attention.masks import Options
from onewave.ops.attention.op import attention_varlen
from onewave.ops.attention.reference import attention as in_torch
from onewave.ops.attention.split import launch
from onewave.ops.attention.split.plan import MAX_TOKENS, MIN_KEYS, plan_split
from onewave.ops.explain import explain

NAN, PAGE = float("nan"), 128


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, NumpyKernel]:
    return kernels_in_numpy(monkeypatch, programs=3)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def in_pages(keys: Tensor) -> Tensor:
    """Pages of a sequence's keys, the last one first, NaN behind its end and in a page of nobody's."""
    pages = torch.full((-(-len(keys) // PAGE) + 1, PAGE, *keys.shape[1:]), NAN, dtype=keys.dtype)
    for nth, some in enumerate(keys.split(PAGE)):
        pages[-1 - nth, : len(some)] = some
    return pages


@pytest.mark.parametrize(
    ("heads", "num_queries", "num_keys", "huge_key"),
    # Rows that end in the last key tile, in two, in one tile of keys alone; tiles of rows that are not full or not
    # there; scores that exceed what the last tile let expect.
    [((4, 1), 5, 300, None), ((6, 2), 33, 160, None), ((1, 1), 3, 64, None), ((4, 1), 20, 390, 3)],
)
def test_few_queries_behind_many_keys_give_attention(
    kernels: dict[str, NumpyKernel], heads: tuple[int, int], num_queries: int, num_keys: int, huge_key: int | None
) -> None:
    q = randn(num_queries + 2, heads[0], 128, seed=0)
    k, v = (randn(num_keys, heads[1], 128, seed=seed) for seed in (1, 2))
    if huge_key is not None:
        k[huge_key] = 5 * q[0, 0]
    starts, key_starts = (torch.tensor([0, n], dtype=torch.int32) for n in (num_queries, num_keys))
    table = torch.arange(-(-num_keys // PAGE), 0, -1, dtype=torch.int32)[None]
    out = torch.full_like(q, 7.0)
    attention_varlen(
        q, in_pages(k), in_pages(v), starts, key_starts, len(q), MIN_KEYS, causal=True, block_table=table, out=out
    )
    exact, _ = in_torch(q[:num_queries].float(), k.float(), v.float(), starts, key_starts, causal=True)
    # Weights are not rounded to bfloat16 in NumPy before they are stored, but once, in between.
    torch.testing.assert_close(out[:num_queries].float(), exact, atol=4e-3, rtol=1e-2)
    assert (out[num_queries:] == 7.0).all()
    assert [kernels[name].launches for name in ("weigh_kernel", "combine_kernel", "attention_kernel")] == [1, 1, 0]
    tiles = -(-num_queries * heads[0] // heads[1] // 64) * heads[1] * -(-num_keys // PAGE)
    began_again = kernels["combine_kernel"].multiplications > tiles * 64 * PAGE * 128
    assert began_again is (huge_key is not None)


def test_keys_beyond_those_that_there_is_memory_for_are_left_out(kernels: dict[str, NumpyKernel]) -> None:
    told, keys = 2 * PAGE, 3 * PAGE
    q, k, v = randn(4, 2, 128, seed=0), in_pages(randn(keys, 1, 128, seed=1)), in_pages(randn(keys, 1, 128, seed=2))
    starts, table = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([[3, 2, 1]], dtype=torch.int32)

    def out(num_keys: int) -> Tensor:
        packed = Packed(starts, torch.tensor([0, num_keys], dtype=torch.int32), 4, told, table)
        call = AttentionCall(q, k, v, Extras(), Options(0.1, None, 0), "gluon", packed)
        return launch.run(call, plan_split(facts_of(call)))

    assert torch.equal(out(keys), out(told))


@pytest.mark.parametrize(
    ("tokens", "options", "splits"),
    [
        (32, {}, True),
        (MAX_TOKENS, {"max_seqlen_k": 16384}, True),
        (MAX_TOKENS + 1, {}, False),
        (32, {"max_seqlen_k": MIN_KEYS - 1}, False),
        (32, {"max_seqlen_k": 1 << 17}, False),
        (32, {"max_seqlen_q": 31}, False),
        (32, {"sequences": 2}, False),
        (32, {"page_size": 64}, False),
        (32, {"window": 100}, False),
        (32, {"causal": False}, False),
        (32, {"return_lse": True}, False),
        (32, {"sinks": True}, False),
        (32, {"keys": 0}, False),
    ],
)
def test_one_short_chunk_over_many_keys_in_pages_is_split(tokens: int, options: dict[str, Any], splits: bool) -> None:
    given = {"causal": True, "page_size": PAGE, "max_seqlen_k": 5120} | options
    keys = given.pop("keys", 5120)
    told = explain("attention_varlen", (tokens, 32, 128), (keys, 8, 128), dtype="bf16", device="cuda:sm_90", **given)
    assert ("split/kernel.py" in str(told)) is splits
