"""Hopper's attention kernel on a GPU: keys in pages, and windows over packed sequences; bit for bit, NaN around."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.operands.on_gpu import ON_HOPPER
from onewave.ops.attention.masks import options
from onewave.ops.attention.op import attention, attention_varlen
from onewave.ops.attention.reference import attention as in_torch

pytestmark = ON_HOPPER
NAN = float("nan")
BF16 = torch.bfloat16
WINDOWS: list[dict[str, Any]] = [
    {"causal": True, "window": 50},
    {"window": (300, -1)},
    {"window": (37, 11)},
    {"causal": True, "window": 130, "align": "top-left"},
    {"causal": True, "window": 1, "softcap": 9.0},
]
MASKS: list[dict[str, Any]] = [{}, {"causal": True}, *WINDOWS[:3]]
LENGTHS = [([1, 127, 640, 64, 0, 333], [5, 127, 700, 900, 3, 333]), ([300, 17, 1, 200, 2], [1, 500, 0, 333, 1025])]


def starts_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def packed(lengths: list[int], heads: int, head_dim: int, seed: int, spare: int = 0) -> Tensor:
    made = torch.Generator("cuda").manual_seed(seed)
    values = torch.randn(sum(lengths) + spare, heads, head_dim, generator=made, device="cuda").to(BF16)
    values[sum(lengths) :] = NAN
    return values


def seen_keys(mask: dict[str, Any], num_queries: int, num_keys: int) -> tuple[int, int]:
    """The first key of a sequence that any query sees, and the end of them."""
    wanted = options(
        "attention", head_dim=64, causal=mask.get("causal", False), scale=None, window=mask.get("window"), softcap=None,
        align=mask.get("align", "bottom-right"),
    )  # fmt: skip
    shift = wanted.shift(num_queries, num_keys)
    first = 0 if wanted.left is None else max(0, min(shift - wanted.left, num_keys))
    end = num_keys if wanted.right is None else max(0, min(num_keys, num_queries + shift + wanted.right))
    return first, end


def unseen_as_nan(k: Tensor, lengths: list[int], mask: dict[str, Any], queries: list[int]) -> None:
    """NaN in all keys that no query of their sequence sees."""
    at = 0
    for n, m in zip(queries, lengths, strict=True):
        first, end = seen_keys(mask, n, m)
        k[at : at + first], k[at + end : at + m] = NAN, NAN
        at += m


@pytest.mark.values
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", WINDOWS)
def test_windows_over_packed_sequences_equal_each_alone_bit_for_bit(head_dim: int, mask: dict[str, Any]) -> None:
    for lengths, key_lengths in LENGTHS:
        q = packed(lengths, 8, head_dim, 0)
        k, v = (packed(key_lengths, 2, head_dim, seed, 300) for seed in (1, 2))
        starts, key_starts = starts_of(lengths), starts_of(key_lengths)
        for tensor in (k, v):
            unseen_as_nan(tensor, key_lengths, mask, lengths)
        given: dict[str, Any] = {"return_lse": True, "backend": "gluon", **mask}
        out, lse = attention_varlen(q, k, v, starts, key_starts, max(lengths), max(key_lengths), **given)
        exact, _ = in_torch(q, k, v, starts, key_starts, **mask)
        torch.testing.assert_close(out.float(), exact.float(), atol=3e-2, rtol=2e-2)
        for row, (n, m) in enumerate(zip(lengths, key_lengths, strict=True)):
            at, key_at = int(starts[row]), int(key_starts[row])
            alone = [t.transpose(0, 1)[None] for t in (q[at : at + n], k[key_at : key_at + m], v[key_at : key_at + m])]
            one, one_lse = attention(*alone, **given)
            assert torch.equal(one[0].transpose(0, 1), out[at : at + n]), (row, mask)
            assert torch.equal(one_lse[0], lse[:, at : at + n]), (row, mask)


def in_pages(
    k: Tensor, lengths: list[int], size: int, draw: random.Random, *, heads_first: bool
) -> tuple[Tensor, list[int]]:
    """Pages of NaN with the keys of each sequence in some of them, and which, sequence by sequence."""
    count = sum(-(-n // size) for n in lengths) + 5
    shape = (count, k.shape[1], size, k.shape[2]) if heads_first else (count, size, *k.shape[1:])
    pages = torch.full(shape, NAN, dtype=k.dtype, device="cuda")
    pages = pages.transpose(1, 2) if heads_first else pages
    free, at = draw.sample(range(count), count), 0
    used: list[int] = []
    for n in lengths:
        for first in range(0, n, size):
            page, rows = free.pop(), min(size, n - first)
            pages[page, :rows] = k[at + first : at + first + rows]
            used.append(page)
        at += n
    return pages, used


@pytest.mark.values
@pytest.mark.parametrize("size", [16, 64, 128, 256])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_keys_in_pages_give_the_bits_of_keys_in_a_row(head_dim: int, size: int) -> None:
    for at, mask in enumerate(MASKS):
        lengths, key_lengths = LENGTHS[at % 2]
        q = packed(lengths, 6, head_dim, 0)
        k, v = (packed(key_lengths, 2, head_dim, seed) for seed in (1, 2))
        starts, key_starts = starts_of(lengths), starts_of(key_lengths)
        for tensor in (k, v):
            unseen_as_nan(tensor, key_lengths, mask, lengths)
        k_pages, used = in_pages(k, key_lengths, size, random.Random(at), heads_first=at % 2 == 1)
        v_pages, _ = in_pages(v, key_lengths, size, random.Random(at), heads_first=at % 2 == 1)
        # The table's entries for pages that nobody sees, before a window or beyond a sequence's end, are not read.
        table = torch.full((len(lengths), max(-(-n // size) for n in key_lengths) + 2), 10**9, dtype=torch.int32)
        for row, n in enumerate(key_lengths):
            first, _ = seen_keys(mask, lengths[row], n)
            for nth in range(-(-n // size)):
                page = used.pop(0)
                table[row, nth] = page if (nth + 1) * size > first else -7
        longest = (max(lengths), max(key_lengths))
        given: dict[str, Any] = {"return_lse": True, "backend": "gluon", **mask}
        expected, expected_lse = attention_varlen(q, k, v, starts, key_starts, *longest, **given)
        out, lse = attention_varlen(
            q, k_pages, v_pages, starts, key_starts, *longest, block_table=table.cuda(), **given
        )
        assert torch.equal(out, expected), (mask, (out.float() - expected.float()).abs().max())
        assert torch.equal(lse, expected_lse), mask
        if at < 2:
            # Other kernels read a copy.
            other = attention_varlen(
                q, k_pages, v_pages, starts, key_starts, *longest, block_table=table.cuda(), backend="triton", **mask
            )
            torch.testing.assert_close(other, expected, atol=3e-2, rtol=2e-2)


def test_sorted_tiles_of_many_sequences_give_the_bits_of_each_alone() -> None:
    lengths = [random.Random(5).choice([1, 100, 700, 1500]) for _ in range(60)]
    q, (k, v) = packed(lengths, 16, 128, 0), (packed(lengths, 4, 128, seed) for seed in (1, 2))
    starts = starts_of(lengths)
    for mask in MASKS[:3]:
        given: dict[str, Any] = {"backend": "gluon", **mask}
        out = attention_varlen(q, k, v, starts, starts, max(lengths), max(lengths), **given)
        for row in (0, 7, 31, 59):
            rows = slice(int(starts[row]), int(starts[row + 1]))
            one = attention(*(t[rows].transpose(0, 1)[None] for t in (q, k, v)), **given)
            assert torch.equal(one[0].transpose(0, 1), out[rows]), (row, mask)
        for _ in range(20):
            again = attention_varlen(q, k, v, starts, starts, max(lengths), max(lengths), **given)
            assert torch.equal(again, out)


SHORT_CHUNKS = [(1, 4096), (32, 4128), (33, 1057), (17, 2064), (64, 5120), (63, 1279), (48, 3007)]


@pytest.mark.values
@pytest.mark.parametrize(("num_queries", "num_keys"), SHORT_CHUNKS)
@pytest.mark.parametrize(
    ("heads", "huge_key"), [((32, 8), None), ((28, 4), 0), ((8, 8), 1000), ((64, 8), None), ((32, 8), 0)]
)
def test_a_short_chunk_alone_has_the_bits_that_it_has_beside_another(
    heads: tuple[int, int], huge_key: int | None, num_queries: int, num_keys: int
) -> None:
    made = torch.Generator("cuda").manual_seed(num_keys)
    count = -(-num_keys // 128)
    pages = [torch.randn(count + 2, heads[1], 128, 128, generator=made, device="cuda").bfloat16() for _ in range(2)]
    table = torch.randperm(count + 2, generator=made, device="cuda")[:count].int()
    q = torch.randn(64, heads[0], 128, generator=made, device="cuda").bfloat16()
    q[num_queries:] = float("nan")
    if huge_key is not None:
        pages[0][table[huge_key // 128], :, huge_key % 128] *= 40
    for each in pages:
        each[table[-1], :, (num_keys - 1) % 128 + 1 :] = float("nan")
    k, v = (each.transpose(1, 2) for each in pages)

    def of(starts: list[int], key_starts: list[int]) -> torch.Tensor:
        ends: Any = [torch.tensor(each, dtype=torch.int32, device="cuda") for each in (starts, key_starts)]
        tables = table.expand(len(starts) - 1, -1).contiguous()
        return attention_varlen(q, k, v, *ends, 64, num_keys, causal=True, block_table=tables)[:num_queries]

    beside = of([0, num_queries, num_queries], [0, num_keys, num_keys])
    assert torch.equal(of([0, num_queries], [0, num_keys]), beside)
    assert torch.isfinite(beside).all()
