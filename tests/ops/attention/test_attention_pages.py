"""Keys in pages, and windows over packed sequences, without a GPU: the contract, and what the loading warp copies."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.attention_oracle import oracle, within_rule
from kit.operands.random import randn
from onewave.base.errors import InvalidArgumentError, OnewaveError, ShapeError
from onewave.ops.attention import checks
from onewave.ops.attention.hopper import order as gluon_order_impl
from onewave.ops.attention.hopper.order import sort_slots
from onewave.ops.attention.op import attention_varlen
from onewave.ops.attention.pages import ragged_from_pages

NAN = float("nan")
LENGTHS, KEY_LENGTHS = [3, 0, 200, 64], [130, 5, 0, 64]


def starts_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def in_pages(k: Tensor, lengths: list[int], size: int) -> tuple[Tensor, Tensor]:
    """Pages of NaN with each sequence's keys, last pages first, and their table with garbage beyond."""
    counts = [-(-n // size) for n in lengths]
    pages = torch.full((sum(counts) + 2, size, *k.shape[1:]), NAN, dtype=k.dtype)
    table = torch.full((len(lengths), max(counts) + 1), 10**9, dtype=torch.int32)
    page, at = len(pages), 0
    for row, n in enumerate(lengths):
        for first in range(0, n, size):
            page -= 1
            rows = min(size, n - first)
            pages[page, :rows] = k[at + first : at + first + rows]
            table[row, first // size] = page
        at += n
    return pages, table


@pytest.mark.parametrize("size", [1, 7, 16, 256])
@pytest.mark.parametrize("mask", [{}, {"causal": True, "window": 40}])
def test_pages_are_attended_to_as_if_they_lay_in_a_row(size: int, mask: dict[str, Any]) -> None:
    q = randn(sum(LENGTHS), 4, 16, seed=0)
    k, v = (randn(sum(KEY_LENGTHS), 2, 16, seed=seed) for seed in (1, 2))
    starts, key_starts = starts_of(LENGTHS), starts_of(KEY_LENGTHS)
    (k_pages, table), (v_pages, _) = in_pages(k, KEY_LENGTHS, size), in_pages(v, KEY_LENGTHS, size)
    longest = (max(LENGTHS), max(KEY_LENGTHS))
    expected = attention_varlen(q, k, v, starts, key_starts, *longest, **mask)
    out = attention_varlen(q, k_pages, v_pages, starts, key_starts, *longest, block_table=table, **mask)
    assert torch.equal(out, expected)
    later = attention_varlen(q, k_pages, v_pages, starts, key_starts + 3, *longest, block_table=table, **mask)
    assert torch.equal(later, expected)
    compiled = torch.compile(attention_varlen, backend="eager", fullgraph=True)
    again = compiled(q, k_pages, v_pages, starts, key_starts, *longest, block_table=table, **mask)
    assert torch.equal(again, expected)


@pytest.mark.parametrize(("head_dim", "size", "window"), [(16, 7, None), (48, 16, 30), (64, 64, None), (80, 1, 100)])
def test_a_prompt_cut_anywhere_has_the_same_bits_on_a_cpu(head_dim: int, size: int, window: int | None) -> None:
    q = randn(150, 6, head_dim, seed=0)
    k, v = (randn(150, 2, head_dim, seed=seed) for seed in (1, 2))
    (k_pages, table), (v_pages, _) = in_pages(k, [150], size), in_pages(v, [150], size)

    def part(first: int, end: int) -> Tensor:
        given = starts_of([end - first]), starts_of([end]), end - first, end
        return attention_varlen(
            q[first:end], k_pages, v_pages, *given, block_table=table, causal=True, window=window
        )  # fmt: skip

    whole, (exact, baseline) = part(0, 150), (
        oracle(*(x.to(dtype).transpose(0, 1)[None] for x in (q, k, v)), causal=True, window=window)[0]
        for dtype in (torch.float64, torch.float32)
    )  # fmt: skip
    assert within_rule(whole, exact[0].transpose(0, 1), baseline[0].transpose(0, 1))
    cuts = [0, 1, 64, 70, 149, 150]
    assert torch.equal(torch.cat([part(*cut) for cut in pairwise(cuts)]), whole)


@pytest.mark.parametrize(
    ("mask", "unseen"),
    [
        ({"causal": True, "window": 9}, [(0, 0), (0, 1), (0, 2)]),  # queries 35 to 39 see keys from 27 on
        ({"window": (9, 0), "align": "top-left"}, [(0, 1), (0, 2), (0, 3), (0, 4)]),  # 0 to 4 keys up to theirs
    ],
)
def test_a_page_that_no_query_sees_need_not_exist(mask: dict[str, Any], unseen: list[tuple[int, int]]) -> None:
    queries, lengths, size = [5, 0, 3], [40, 12, 3], 8
    q = randn(sum(queries), 4, 16, seed=0)
    k, v = (randn(sum(lengths), 2, 16, seed=seed) for seed in (1, 2))
    given = (starts_of(queries), starts_of(lengths), max(queries), max(lengths))
    (k_pages, table), (v_pages, _) = in_pages(k, lengths, size), in_pages(v, lengths, size)
    expected = attention_varlen(q, k_pages, v_pages, *given, block_table=table, **mask)
    for place in [*unseen, (1, 0), (1, 1)]:  # of the second sequence, which has no queries, none is seen
        table[place] = -1
    out = attention_varlen(q, k_pages, v_pages, *given, block_table=table, **mask)
    assert torch.equal(out, expected)
    table[2, 0] = -1
    with pytest.raises(InvalidArgumentError, match="block_table: -1"):
        attention_varlen(q, k_pages, v_pages, *given, block_table=table, **mask)


def test_of_sequences_in_pages_only_the_lengths_count() -> None:
    q, pages = randn(4, 2, 16, seed=0), randn(2, 4, 2, 16, seed=1)
    table, starts = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
    first, later = (
        attention_varlen(q, pages, pages, starts, torch.tensor(keys, dtype=torch.int32), 4, 8, block_table=table)
        for keys in ([0, 8], [2, 10])
    )
    assert torch.equal(later, first)
    keys = torch.tensor([2, 11], dtype=torch.int32)
    with pytest.raises(OnewaveError):
        attention_varlen(q, pages, pages, starts, keys, 4, 9, block_table=table)


def test_its_registration_is_sound() -> None:
    starts, pages = starts_of([3, 5]), randn(3, 4, 2, 16, seed=1)
    table = torch.tensor([[0, 0], [1, 2]], dtype=torch.int32)
    tensors = (randn(8, 2, 16, seed=0), pages, pages, starts, starts, 5, 5, None, None, None)
    plain = (0.2, None, 0, False, None, "auto", table)
    torch.library.opcheck(torch.ops.onewave.attention_varlen.default, (*tensors, *plain))


def test_there_may_be_no_page_where_no_sequence_has_keys() -> None:
    pages, table = randn(0, 16, 1, 32, seed=1), torch.full((2, 3), -1, dtype=torch.int32)
    given: dict[str, Any] = {"block_table": table, "return_lse": True}
    out, lse = attention_varlen(
        randn(5, 2, 32, seed=0), pages, pages, starts_of([2, 3]), starts_of([0, 0]), 3, 40, **given
    )
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_a_copy_of_no_keys_is_empty() -> None:
    pages, table = torch.zeros(3, 4, 2, 8), torch.zeros(2, 1, dtype=torch.int32)
    k, v, _ = ragged_from_pages(pages, pages, table, torch.zeros(3, dtype=torch.int32), 0)
    assert k.shape == v.shape == (0, 2, 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": torch.zeros(4, 16, 2)}, "k, v with block_table"),
        ({"block_table": torch.zeros(2, 2, dtype=torch.int64)}, r"int32 \[2, pages a sequence\]"),
        ({"block_table": torch.zeros(3, 2, dtype=torch.int32)}, r"int32 \[2, pages a sequence\]"),
        ({"block_table": torch.zeros(2, 4, dtype=torch.int32)[:, ::2]}, "contiguous last axis"),
        ({"v": torch.zeros(4, 8, 2, 16)}, "k, v with block_table"),
    ],
)
def test_a_wrong_table_is_named(change: dict[str, Tensor], words: str) -> None:
    starts = starts_of([3, 5])
    given = {
        "k": torch.zeros(4, 16, 2, 16), "v": torch.zeros(4, 16, 2, 16),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
    } | change  # fmt: skip
    with pytest.raises(ShapeError, match=words):
        attention_varlen(
            torch.zeros(8, 2, 16), given["k"], given["v"], starts, starts, 5, 5, block_table=given["block_table"]
        )


def test_debugging_finds_pages_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "checks_contents", lambda: True)
    q, pages, starts = torch.zeros(8, 2, 16), torch.zeros(4, 4, 2, 16), starts_of([3, 5])

    def call(table: list[list[int]]) -> None:
        attention_varlen(q, pages, pages, starts, starts, 5, 5, block_table=torch.tensor(table, dtype=torch.int32))

    call([[0, 99], [1, 3]])
    for table, words in (
        ([[0, 0], [1, 4]], "block_table: 4"),
        ([[-1, 0], [1, 3]], "block_table: -1"),
        ([[0], [1]], "5 keys in one"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            call(table)


@pytest.mark.skipif(torch.cuda.is_available(), reason="in the interpreter")
@pytest.mark.parametrize(
    "mask", [{}, {"RIGHT": True}, {"RIGHT": True, "LEFT": True}, {"RIGHT": True, "TOP_LEFT": True}]
)
def test_slots_are_sorted_by_the_work_of_their_tiles(mask: dict[str, bool]) -> None:
    lengths, key_lengths, left = [1, 127, 640, 64, 0, 333, 129], [5, 127, 700, 900, 3, 333, 0], 200
    starts, key_starts = starts_of(lengths), starts_of(key_lengths)
    rows, keys, longest = 128, 128, 600
    slots = sum(lengths) // rows + len(lengths)
    order = torch.full((slots + 1,), -9, dtype=torch.int32)
    flags = {"TOP_LEFT": False, "LEFT": False, "RIGHT": False} | mask
    sort_slots[(-(-slots // 32),)](
        order, starts, key_starts, len(lengths), len(lengths).bit_length() + 1, slots, longest, left, 0, BM=rows,
        BN=keys, MINE=32, OTHERS=128, **flags,
    )  # fmt: skip
    work: dict[int, int] = {}
    for row, (n, m) in enumerate(zip(lengths, key_lengths, strict=True)):
        shift = 0 if flags["TOP_LEFT"] else m - n
        for first in range(0, min(n, longest), rows):
            end = min(m, min(first + rows, n) + shift) if flags["RIGHT"] else m
            begin = max(0, first + shift - left) // keys if flags["LEFT"] else 0
            work[int(starts[row]) // rows + row + first // rows] = max(1, -(-max(end, 0) // keys) - begin)
    *order, taken = order.tolist()
    assert taken == 0
    found = [slot for slot in order if slot >= 0]
    assert order == found + [-1] * (slots - len(found))
    assert sorted(found) == sorted(work)
    assert [work[slot] for slot in found] == sorted(work.values(), reverse=True)


def test_tables_are_kept_a_shape_and_dropped_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert issubclass(InvalidArgumentError, OnewaveError)
    from onewave.ops.attention.call import AttentionCall, Extras
    from onewave.ops.attention.hopper.plan import Work, schedule
    from onewave.ops.attention.masks import Options

    plan = schedule(Work(64, 1, 4096, 4096, right=0), columns=128, num_sms=132)
    assert plan.order == "table"
    q = torch.empty(1, 64, 4096, 128)
    order, which, rounds = gluon_order_impl.order_of(plan, AttentionCall(q, q, q, Extras(), Options(1.0, right=0)))
    assert which == gluon_order_impl.TABLE
    assert order.shape == (plan.programs, rounds)
    dealt = order[order >= 0]
    assert torch.equal(dealt.sort().values, torch.arange(32 * 64, dtype=torch.int32))


def test_pages_are_checked_whatever_the_default_device_is() -> None:
    q, pages = randn(10, 4, 32, seed=0), randn(5, 4, 2, 32, seed=1)
    table = torch.tensor([[0, 1, 2], [3, 3, 0]], dtype=torch.int32)
    given = starts_of([4, 6]), starts_of([9, 7]), 6, 9
    expected = attention_varlen(q, pages, pages, *given, block_table=table)
    with torch.device("meta"):
        assert torch.equal(attention_varlen(q, pages, pages, *given, block_table=table), expected)
