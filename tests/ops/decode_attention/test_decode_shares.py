"""The split-KV kernel's shares: what is asked for ahead of time, who merges, and how long rows are cut. Interpreted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from kit.operands.decode_calls import attend
from kit.operands.random import randn_half as randn
from onewave.ops.choice import Kept
from onewave.ops.decode_attention import choose
from onewave.ops.decode_attention.reference import decode_attention as reference
from onewave.ops.decode_attention.triton import launch as triton_impl
from onewave.ops.decode_attention.triton import plan
from onewave.ops.decode_attention.triton.plan import DecodePlan, DecodeSizes, plan_decode
from onewave.ops.kv_layout import pack_k

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs where there is no GPU")
ROWS_OF_KEYS = 768


def run(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], **options: Any) -> Tensor:
    out = torch.full_like(q, float("nan"))
    return attend(q, k, v, torch.tensor(lengths, dtype=torch.int32), out=out, lse=None, **options)[0]


class Asked:
    """Stands in for the instruction that asks for memory: keeps (address, bytes) of all that it is given."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int]] = []

    def __call__(self, _asm: str, _constraints: str, operands: list[Any], **_: Any) -> None:
        address, size = (operand.handle.data for operand in operands)
        self.pieces += [(int(a), int(n)) for a, n in zip(address, size, strict=True) if n > 0]

    def keys(self, cache: Tensor) -> dict[tuple[int, int], set[int]]:
        """Keys by (row, head) of `cache` that were asked for in full; other pieces are ignored."""
        row_bytes = cache.shape[3] * cache.element_size()
        place = {
            cache[row, head, key].data_ptr(): (row, head, key)
            for row in range(cache.shape[0])
            for head in range(cache.shape[1])
            for key in range(cache.shape[2])
        }
        found: dict[tuple[int, int], set[int]] = {}
        for address, size in self.pieces:
            if address not in place:
                continue
            row, head, first = place[address]
            assert size % row_bytes == 0
            found.setdefault((row, head), set()).update(range(first, first + size // row_bytes))
        return found

    def outside(self, *caches: Tensor) -> list[tuple[int, int]]:
        """Pieces that reach past the caches, which have no gaps."""
        spans = [(cache.data_ptr(), cache.data_ptr() + cache.nbytes) for cache in caches]
        return [
            (address, size)
            for address, size in self.pieces
            if not any(first <= address and address + size <= last for first, last in spans)
        ]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Asked]:
    """Switch on what a GPU of sm_90 does: ahead keys of the next row, at_once with one instruction."""

    def switch_on(ahead: int, at_once: int) -> Asked:
        record, kernel = Asked(), triton_impl.split_kv_kernel

        class Launcher:
            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                changed = {"AHEAD": ahead, "AT_ONCE": at_once}
                return lambda *arguments, **constants: kernel[grid](*arguments, **(constants | changed))

        monkeypatch.setattr(triton_impl, "split_kv_kernel", Launcher())
        monkeypatch.setattr(tl, "inline_asm_elementwise", record)
        monkeypatch.setattr(cuda, "num_threads", lambda: 128)
        return record

    return switch_on


@pytest.mark.parametrize("at_once", [8, 1])
@pytest.mark.parametrize("window", [None, 200])
def test_a_program_asks_for_the_first_keys_of_its_next_row_and_for_nothing_else(at_once, window, asked, monkeypatch):
    lengths, ahead = [700, 640, -1, 300, 65, 0, 9], 256
    if at_once == 8:
        k, v = (randn(len(lengths), 2, ROWS_OF_KEYS, 32, seed=seed) for seed in (1, 2))
    else:  # heads inside tokens: the keys of a head do not lie side by side
        k, v = (randn(len(lengths), ROWS_OF_KEYS, 2, 32, seed=seed).transpose(1, 2) for seed in (1, 2))
    q = randn(len(lengths), 4, 1, 32, seed=0)
    monkeypatch.setattr(DecodePlan, "shares", lambda *_, **__: 1)
    right = run(q, k, v, lengths, window=window)
    record = asked(ahead, at_once)
    assert torch.equal(run(q, k, v, lengths, window=window).nan_to_num(7), right.nan_to_num(7))
    assert not record.outside(k, v)
    for cache in (k, v):
        found = record.keys(cache)
        first = {row: max(0, length - (window or length)) for row, length in enumerate(lengths)}
        tile = {row: first[row] // 128 * 128 for row in first}
        # Row 3 follows a row that is left out; 5 has no keys; 4 and 6 come after rows shorter than what is asked ahead.
        assert found[1, 0] == found[1, 1] == set(range(tile[1], min(tile[1] + ahead, lengths[1])))
        assert all(keys <= set(range(tile[row], max(lengths[row], 0))) for (row, _), keys in found.items())
        assert not {row for row, _ in found} & {0, 2, 5}


def test_rows_that_one_program_has_alone_ask_for_nothing(asked, monkeypatch):
    k, v = (randn(3, 1, 256, 32, seed=seed) for seed in (1, 2))
    monkeypatch.setattr(DecodePlan, "shares", lambda *_, **__: 3)
    record = asked(256, 8)
    run(randn(3, 2, 1, 32, seed=0), k, v, [256, 256, 256])
    assert record.pieces == []


@pytest.mark.parametrize("shares", [1, 3, 5])
def test_whoever_comes_last_merges_and_leaves_the_counters_at_zero(shares, monkeypatch):
    lengths = [1023, 40, 0, -1, 700]
    k, v = (randn(len(lengths), 2, 1024, 32, seed=seed) for seed in (1, 2))
    q = randn(len(lengths), 8, 1, 32, seed=0)
    counters = torch.zeros(64, dtype=torch.int32)
    monkeypatch.setattr(triton_impl, "counters", lambda *_: counters)
    # Numbers behind a row's partials are loaded, and must not count.
    monkeypatch.setattr(triton_impl, "scratch", lambda _, floats: torch.full((floats,), float("nan")))
    monkeypatch.setattr(DecodePlan, "shares", lambda *_, **__: shares)
    first = run(q, k, v, lengths)
    assert not counters.any()
    assert torch.equal(run(q, k, v, lengths).nan_to_num(7), first.nan_to_num(7))
    expected, _ = reference(q, k, v, torch.tensor(lengths))
    kept = torch.tensor(lengths) >= 0
    torch.testing.assert_close(first[kept], expected[kept], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("form", ["plain", "packed", "slots", "pages", "short pages"])
def test_places_counted_in_32_bits_are_those_counted_in_64(form, monkeypatch):
    lengths = [150, 1, 64]
    k, v = (randn(6, 2, 160, 32, seed=seed) for seed in (1, 2))
    table = {"slots": [[3], [5], [0]], "pages": None, "short pages": None}.get(form)
    if "pages" in form:
        size = 128 if form == "pages" else 40
        k, v = (cache[:, :, :size].contiguous() for cache in (k, v))
        table = [[4, 1, 2, 0], [3, 0, 0, 0], [5, 2, 0, 0]]
    k = pack_k(k) if form == "packed" else k
    q = randn(3, 4, 1, 32, seed=0)
    options = {"block_table": None if table is None else torch.tensor(table)}
    if table is None:
        k, v = k[:3], v[:3]
    narrow = run(q, k, v, lengths, **options)
    assert not narrow.isnan().any()
    monkeypatch.setattr(triton_impl, "narrow", lambda *_: False)
    assert torch.equal(run(q, k, v, lengths, **options), narrow)


@pytest.mark.parametrize(
    ("keys", "stride", "fits"), [(4096, 128, True), (1 << 23, 128, True), (1 << 24, 128, False), (1 << 18, 8192, False)]
)
def test_a_block_of_more_elements_than_32_bits_count_is_counted_in_64(keys: int, stride: int, fits: bool) -> None:
    cache = torch.empty(2, 1, keys, 128, device="meta").as_strided((2, 1, keys, 128), (keys * stride, 128, stride, 1))
    assert triton_impl.narrow(cache, cache) == fits


def test_more_rows_than_are_looked_at_are_a_share_each_and_take_no_scratch(monkeypatch):
    lengths = [700, 3, 0, -1, 300, 640, 65]
    k, v = (randn(len(lengths), 1, 768, 32, seed=seed) for seed in (1, 2))
    q = randn(len(lengths), 2, 1, 32, seed=0)
    few = run(q, k, v, lengths)
    monkeypatch.setattr(choose, "_chosen", Kept())
    for module in (triton_impl, plan):
        monkeypatch.setattr(module, "MAX_ROWS_LOOKED_AT", 4)
    monkeypatch.setattr(triton_impl, "counters", None)
    monkeypatch.setattr(triton_impl, "scratch", lambda _, floats: torch.empty(floats if floats == 0 else -1))
    assert torch.equal(run(q, k, v, lengths).nan_to_num(7), few.nan_to_num(7))


@pytest.mark.parametrize(("steps", "keys"), [(128, 256), (64, 256), (100, 256), (512, 512), (4097, 8192)])
def test_a_long_row_of_masked_attention_takes_several_blocks_together(steps: int, keys: int) -> None:
    cut = plan_decode(DecodeSizes(32, 8, 1, 128, capacity=4096, kv_itemsize=2, smallest_split=steps))
    assert cut.split_of(4096) == keys
    assert cut.max_splits * cut.block_n <= 4096


def test_asking_ahead_needs_aligned_keys_of_a_cache_that_is_not_packed() -> None:
    dense = randn(2, 2, 16, 64, seed=0)
    heads_inside = randn(2, 16, 2, 64, seed=0).transpose(1, 2)
    odd = torch.zeros(2, 2, 16, 65).half()[..., :64]
    packed = torch.zeros(2, 2, 8, 16, 8).half()
    slots, pages = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)
    assert triton_impl.keys_at_once(dense, dense, None) == triton_impl.keys_at_once(dense, dense, slots) == 8
    assert triton_impl.keys_at_once(dense, heads_inside, None) == 1
    for k, v, table in ((odd, dense, None), (dense, odd, None), (packed, dense, None), (dense, dense, pages)):
        assert triton_impl.keys_at_once(k, v, table) == 0
