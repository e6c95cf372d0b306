"""Hopper's decode kernel, its own source executed in NumPy with the very arguments that a GPU would get.

What a GPU adds is checked there (tests/gpu/ops/test_decode_stream_gpu.py). Whatever must not be read holds NaN.
"""

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kit.numpy_gpu.gluon_in_numpy import Fault
from kit.numpy_gpu.happens_before import Race, partition
from kit.operands.decode_calls import attend_masked, masked_in_torch
from kit.operands.decode_in_numpy import H200, Gpu, attend, case
from kit.operands.random import randn_half as randn
from onewave.base.errors import UnsupportedError
from onewave.ops.choice import Kept
from onewave.ops.decode_attention import choose
from onewave.ops.decode_attention.hopper import launch as gluon_impl
from onewave.ops.decode_attention.reference import decode_attention as reference
from onewave.ops.decode_attention.triton import launch as triton_impl

NO_OPTIONS: dict[str, Any] = dict.fromkeys(
    ("bias", "src_mask", "finished", "rotary", "qkv_out_scale", "out_shift", "out_smooth", "out_scale", "scale")
) | {"interleaved": False, "half_away": False, "max_bound": 127.0, "min_bound": -127.0}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(gluon_impl, "stream_kernel", gpu)
    return gpu


def check(found: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, **options: Any) -> None:
    options.pop("split_size", None)
    right, right_lse = reference(q.double(), k.double(), v.double(), lengths, **options)
    kept = lengths >= 0
    torch.testing.assert_close(found[0][kept].double(), right[kept], atol=4e-3, rtol=4e-3)
    torch.testing.assert_close(found[1][kept].double(), right_lse[kept].double(), atol=2e-3, rtol=1e-3)
    assert (found[0][~kept] == 7).all()


@pytest.mark.parametrize("dim", [64, 128, 80])
def test_any_lengths_give_the_reference(dim: int, gpu: Gpu) -> None:
    operands = case([1, 0, 63, 64, 65, -1, 520, 300, 129], dim=dim)
    check(attend(*operands), *operands)
    assert gpu.grids[0][0] > 1


@pytest.mark.parametrize("heads", [10, 14, 18, 28])
def test_any_group_of_heads_up_to_two_tiles(heads: int, gpu: Gpu) -> None:
    operands = case([1, 0, 520, -1, 300], heads=heads)
    check(attend(*operands), *operands)
    assert gpu.grids[0][1] == (2 if heads <= 16 else 4)


@pytest.mark.parametrize("length", [0, 1, 64, 513])
def test_one_row(length: int, gpu: Gpu) -> None:
    operands = case([length])
    check(attend(*operands), *operands)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 70},
        {"softcap": 3.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"split_size": 256},
        {"scale": 0.3},
    ],
    ids=lambda given: next(iter(given)),
)
def test_masks_and_splits(options: dict[str, Any], gpu: Gpu) -> None:
    operands = case([300, 5, 520], queries=2)
    check(attend(*operands, **options), *operands, **options)


class Portable:
    """A kernel that only keeps what it is launched with."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda **given: self.launches.append(given)


def test_scales_of_a_16_bit_cache_go_to_the_kernel_that_has_them(gpu: Gpu) -> None:
    operands, scales = case([300, 5, 520]), {"k_scale": torch.tensor([0.5, 2.0]), "v_scale": torch.tensor([3.0, 0.25])}
    with pytest.raises(UnsupportedError, match="scales of keys and values"):
        attend(*operands, **scales)
    portable = Portable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_impl, "split_kv_kernel", portable)
        attend(*operands, **scales, backend="auto")
        attend(*operands, backend="auto")
    assert [given["k_scale"] is scales["k_scale"] for given in portable.launches] == [True]
    assert len(gpu.grids) == 1


def test_a_triton_that_cannot_compile_it_has_the_portable_kernel(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: str) -> Any:
        raise ImportError("no module named gluon")

    portable = Portable()
    monkeypatch.setattr(triton_impl, "split_kv_kernel", portable)
    monkeypatch.setattr(choose, "load", load)
    monkeypatch.setattr(choose, "_chosen", Kept())
    monkeypatch.setattr(choose, "_without_gluon", choose._without_gluon.__wrapped__)
    attend(*case([3]), backend="auto")
    assert len(portable.launches) == 1
    with pytest.raises(UnsupportedError, match=r"needs Triton 3.6's Gluon: no module named gluon"):
        attend(*case([3]))


def brought(gpu: Gpu, dim: int) -> set[tuple[str, int, int, int, int]]:
    """The parts of caches of `case` brought nearer, values with heads last: (k or v, row, head, key, first column)."""
    found = set[tuple[str, int, int, int, int]]()
    for name, offset, size in gpu.nearer:
        assert size == 128
        shape = (5, 2, 520, dim) if name == "k" else (5, 520, 2, dim)
        row, second, third, column = (int(at) for at in np.unravel_index(offset // 2, shape))
        found.add((name, row, *((second, third) if name == "k" else (third, second)), column))
    return found


@pytest.mark.parametrize(("dim", "window"), [(128, None), (128, 70), (80, None), (64, 300)])
def test_first_tiles_are_brought_nearer_before_the_wait(dim: int, window: int | None, gpu: Gpu) -> None:
    lengths, tile = [300, 1, 129, 0, 520], 128 if dim == 64 else 64
    q, k, v, seq_lens = case(lengths, dim=dim)
    v = v.transpose(1, 2).contiguous().transpose(1, 2)
    right = attend(q, k, v, seq_lens, window=window)
    check(right, q, k, v, seq_lens, window=window)
    found = brought(gpu, dim)
    assert len(found) == len(gpu.nearer), "a piece was asked for twice"
    keys = {place[:-1] for place in found}
    assert found == {(*key, column) for key in keys for column in range(0, dim - 63, 64)}
    assert {("v", *key[1:]) for key in keys if key[0] == "k"} == {key for key in keys if key[0] == "v"}
    assert all(key < lengths[row] for _, row, _, key in keys)
    # One tile a program at most; of the first row each head's first keys that are seen.
    assert len(keys) <= 2 * tile * gpu.grids[0][0] * gpu.grids[0][1]
    first = 0 if window is None else max(0, 300 - window) // tile * tile
    assert {("k", 0, head, key) for head in (0, 1) for key in range(first, min(300, first + tile))} <= keys


def test_pages_and_narrow_heads_are_not_brought_nearer(gpu: Gpu) -> None:
    attend(*case([300, 5], dim=48))
    assert gpu.nearer == []
    q, k, v, lengths = case([130, 7], capacity=256)
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    paged = [cache.unflatten(2, (4, 64)).transpose(1, 2).flatten(0, 1).contiguous() for cache in (k, v)]
    attend(q, *paged, lengths, block_table=table)
    assert gpu.nearer == []


@pytest.mark.parametrize("before", [(0, 0, 0), (-7, 1 << 30, -(1 << 31)), (520, 519, 518), (1, 300, 64)])
def test_what_lengths_are_before_the_wait_decides_nothing(before: tuple[int, ...], gpu: Gpu) -> None:
    operands = case([300, 5, 520])
    right = attend(*operands)
    gpu.lengths_before = torch.tensor(before, dtype=torch.int32)
    assert torch.equal(attend(*operands)[0], right[0])
    asked = {np.unravel_index(offset // 2, (3, 2, 520, 64))[0::2][:2] for name, offset, _ in gpu.nearer if name == "k"}
    there = [min(max(0, length), 520) for length in before]
    assert {row for row, _ in asked} <= {row for row, length in enumerate(there) if length > 0}
    assert all(key < there[row] for row, key in asked)
    assert bool(asked) == any(there)
    gpu.lengths_before = None
    alone = attend(*(part[:1] for part in operands))
    gpu.lengths_before = torch.tensor(before[:1], dtype=torch.int32)
    assert torch.equal(attend(*(part[:1] for part in operands))[0], alone[0])


@pytest.mark.parametrize("dim", [64, 128])
def test_no_tile_comes_twice_if_lengths_stay(dim: int, gpu: Gpu) -> None:
    lengths, tile = [300, 5, 520], 128 if dim == 64 else 64
    attend(*case(lengths, dim=dim))
    # Boxes of keys and of values of two heads; splits are whole tiles.
    assert gpu.boxes == 2 * 2 * sum(-(-length // tile) for length in lengths)


@pytest.mark.parametrize("lengths", [(-1, -1, -1), (1, -1, -1), (0, 0, 0)])
def test_programs_without_rows_let_what_they_guessed_come(lengths: tuple[int, ...], gpu: Gpu) -> None:
    operands = case(list(lengths))
    gpu.lengths_before = torch.tensor([520, 300, 200], dtype=torch.int32)
    check(attend(*operands), *operands)
    assert gpu.boxes > 4 * sum(length > 0 for length in lengths)


@pytest.mark.parametrize("before", [(300, 5, 520), (300, 520, 64), (300,), (64,)])
def test_a_loader_that_comes_late_to_its_own_guess(before: tuple[int, ...], gpu: Gpu) -> None:
    operands = case([300, 5, 520][: len(before)])
    right = attend(*operands)
    gpu.lengths_before = torch.tensor(before, dtype=torch.int32)
    gpu.pause = lambda: time.sleep(0.03 if partition().startswith("load_tiles") else 0)
    assert torch.equal(attend(*operands)[0], right[0])


def test_a_wrong_guess_would_show(gpu: Gpu) -> None:
    operands = case([300, 5, 520], dim=128)
    right = attend(*operands)
    gpu.lengths_before = torch.tensor([0, 300, 130], dtype=torch.int32)
    assert torch.equal(attend(*operands)[0], right[0])
    gpu.planted = [Fault("settle", "if not right:", "right = True\n    if False:")]
    assert not torch.equal(attend(*operands)[0], right[0])


def test_keys_before_a_window_may_hold_anything(gpu: Gpu) -> None:
    q, k, v, lengths = case([300, 5, 520], queries=2)
    right = attend(q, k, v, lengths, window=70)
    for row, length in enumerate(lengths.tolist()):
        k[row, :, : max(0, length - 71)] = v[row, :, : max(0, length - 71)] = float("nan")
    assert torch.equal(attend(q, k, v, lengths, window=70)[0], right[0])


@pytest.mark.parametrize("size", [16, 64, 130, 260])
def test_pages_bring_the_same_bits(size: int, gpu: Gpu) -> None:
    """130 and 260: one block a row, and pages that no tile divides are refused elsewhere."""
    lengths = [1, 17, 130, 128, 0, 64]
    q, k, v, seq_lens = case(lengths, capacity=-(-130 // size) * size)
    blocks = k.shape[2] // size
    order = torch.randperm(len(lengths) * blocks, generator=torch.Generator().manual_seed(3))
    table = order.view(len(lengths), blocks).to(torch.int32)
    paged = []
    for cache in (k, v):
        pages = torch.full((table.numel() + 1, 2, size, 64), float("nan"), dtype=torch.float16)
        pages[order] = cache.unflatten(2, (blocks, size)).transpose(1, 2).flatten(0, 1)
        paged.append(pages)
    for row, length in enumerate(lengths):
        table[row, max(1, -(-length // size)) :] = -7
    found = attend(q, *paged, seq_lens, block_table=table)
    assert torch.equal(found[0], attend(q, k, v, seq_lens)[0])
    check(found, q, k, v, seq_lens)


def test_a_rows_bits_do_not_depend_on_its_batch(gpu: Gpu) -> None:
    q, k, v, lengths = case([300, 5, 64, 520, 0, 130], dim=128)
    out, lse = attend(q, k, v, lengths)
    for row in range(len(lengths)):
        pick = slice(row, row + 1)
        alone, alone_lse = attend(q[pick], k[pick], v[pick], lengths[pick])
        assert torch.equal(alone[0], out[row])
        assert torch.equal(alone_lse[0], lse[row])


@pytest.mark.parametrize(
    "extras",
    [
        {},
        {"rotary": torch.rand(6, 32, generator=torch.Generator().manual_seed(7)), "interleaved": True},
        {"rotary": torch.rand(6, 64, generator=torch.Generator().manual_seed(7))},
        {"rotary": torch.rand(6, 32, generator=torch.Generator().manual_seed(7))},
        {"rotary": torch.rand(6, 24, generator=torch.Generator().manual_seed(7))},
        {"bias": randn(8, 64, seed=8), "finished": torch.tensor([False, True, False, False, False, True])},
        {"src_mask": torch.randn(6, 4, 1, 521, generator=torch.Generator().manual_seed(9))},
        {"out_scale": 0.5, "out_shift": randn(4, 64, seed=5), "out_smooth": randn(4, 64, seed=6), "half_away": True},
    ],
    ids=["plain", "interleaved", "rotary", "partial rotary", "rotary of 12", "bias, finished", "mask", "int8"],
)
def test_masked_multihead_attention_appends_and_attends(extras: dict[str, Any], gpu: Gpu) -> None:
    options = NO_OPTIONS | extras
    _, k, v, lengths = case([300, 5, 0, 519, -1, 128], capacity=521)
    qkv = randn(6, 8, 64, seed=4)
    caches = [(k.clone(), v.clone()) for _ in range(2)]
    dtype = torch.int8 if options["out_scale"] else torch.float16
    outs = [torch.full((6, 4, 64), 7, dtype=dtype) for _ in range(2)]
    gpu.lengths_before = torch.tensor([0, 521, 1 << 30, -5, 300, 64], dtype=torch.int32)
    attend_masked(outs[0], qkv, *caches[0], lengths, device=H200, backend="gluon", **options)
    masked_in_torch(outs[1], qkv, *caches[1], lengths, **options)
    if dtype is torch.int8:
        assert (outs[0].int() - outs[1].int()).abs().max() <= 1
    else:
        torch.testing.assert_close(outs[0], outs[1], atol=4e-3, rtol=4e-3)
    for found, right in zip(*caches, strict=True):
        torch.testing.assert_close(found, right, atol=2e-3, rtol=2e-3, equal_nan=True)


@pytest.mark.parametrize("before", [300, 299, 0, -1, 520])
@pytest.mark.parametrize("page", [None, 16, 192, 576])
def test_an_only_rows_length_of_before_the_wait_decides_nothing(before: int, page: int | None, gpu: Gpu) -> None:
    """Its share is worked out from that, and again if the length has changed."""
    q, k, v, lengths = case([300], dim=128, capacity=576)
    options: dict[str, Any] = {}
    if page is not None:
        k, v = (cache.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1).contiguous() for cache in (k, v))
        options["block_table"] = torch.arange(576 // page, dtype=torch.int32)[None]
    right = attend(q, k, v, lengths, **options)
    check(right, q, k, v, lengths, **options)
    gpu.lengths_before = torch.tensor([before], dtype=torch.int32)
    assert torch.equal(attend(q, k, v, lengths, **options)[0], right[0])


def masked(length: int, **given: Any) -> None:
    """Masked attention of a row beside the reference, and the caches with its new token."""
    _, k, v, lengths = case([length], dim=128, capacity=576)
    qkv, options = randn(1, 8, 128, seed=4), NO_OPTIONS | given
    found, right = ([torch.full((1, 4, 128), 7, dtype=torch.float16), k.clone(), v.clone()] for _ in range(2))
    attend_masked(found[0], qkv, *found[1:], lengths, device=H200, backend="gluon", **options)
    masked_in_torch(right[0], qkv, *right[1:], lengths, **options)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, atol=4e-3, rtol=4e-3, equal_nan=True)


@pytest.mark.parametrize("length", [300, 0, -1])
@pytest.mark.parametrize("before", [300, 299, 0, -1, 575])
def test_nor_with_masked_attention(length: int, before: int, gpu: Gpu) -> None:
    gpu.lengths_before = torch.tensor([before], dtype=torch.int32)
    masked(length)


@pytest.mark.parametrize("finished", [True, False])
def test_nor_does_whether_a_row_was_finished_before_the_wait(finished: bool, gpu: Gpu) -> None:
    gpu.finished_before = torch.tensor([not finished])
    masked(300, finished=torch.tensor([finished]))


# The merge of the Triton kernel in place of Hopper's.
IN_ORDER = Fault(
    "consume",
    "merged_by_lanes(c, partials + first_split, count)",
    "merged(partials + first_split, gl.arange(0, BLOCK_H, layout=None), gl.arange(0, BLOCK_D, layout=None), count, c)",
)


@pytest.mark.parametrize("splits", [2, 7, 8, 9, 16, 17])
def test_a_row_of_any_number_of_splits_is_merged(splits: int, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight at a time, and whatever lies behind the last one does not count."""
    monkeypatch.setattr(triton_impl, "scratch", lambda device, floats: torch.full((floats,), float("nan")))
    operands = case([splits * 64 - 3], heads=16, dim=128, capacity=17 * 64)
    found = attend(*operands, split_size=64)
    check(found, *operands)
    gpu.planted = [IN_ORDER]
    for one, other in zip(attend(*operands, split_size=64), found, strict=True):
        assert torch.equal(one, other)
    gpu.planted = [Fault("folded", "gl.where(ahead < left, outputs[ahead], 0.0)", "outputs[ahead]")]
    assert bool(attend(*operands, split_size=64)[0].isfinite().all()) == (splits % 8 == 0)


@pytest.mark.parametrize(("length", "window", "queries"), [(104, 40, 2), (65, 1, 2), (200, 70, 4), (576, 63, 3)])
def test_of_a_rows_splits_all_but_the_last_may_be_empty(length: int, window: int, queries: int, gpu: Gpu) -> None:
    """One query of several sees keys that another does not."""
    operands = case([length], dim=128, queries=queries, capacity=576)
    found = attend(*operands, window=window)
    check(found, *operands, window=window)
    gpu.planted = [IN_ORDER]
    for one, other in zip(attend(*operands, window=window), found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("hidden", [64, 130, 270, 299, 300, 301])
def test_a_mask_may_hide_any_number_of_first_keys(hidden: int, gpu: Gpu) -> None:
    src_mask = torch.randn(1, 4, 1, 576, generator=torch.Generator().manual_seed(9))
    src_mask[..., :hidden] = float("-inf")
    masked(300, src_mask=src_mask)


@pytest.mark.parametrize("seed", [0, 1])
def test_delays_anywhere_change_nothing(seed: int, gpu: Gpu) -> None:
    operands = case([300, 5, 520, 64])
    right = attend(*operands)
    draw = random.Random(seed)
    gpu.pause = lambda: time.sleep(draw.choice((0, 0, 0.001)))
    assert torch.equal(attend(*operands)[0], right[0])


GOES = "mbarrier.arrive(c.empty.index(place), count=1)\n            "
FAULTS = {
    "no wait for a free place": (
        [Fault("load_tiles", "mbarrier.wait(c.empty", "mbarrier.luck(c.empty")], "a copy by TMA writes what consume"
    ),
    "no wait for values": (
        [Fault("consume", "mbarrier.wait(c.v_full", "mbarrier.luck(c.v_full")], "consume .* reads what a copy by TMA"
    ),
    "a place goes before anything orders its loads and the next copies": (
        [Fault("consume", "fence_async_shared()", "pass")], "a copy by TMA writes what consume .* read"
    ),
    "a place goes before it is read": (
        [Fault("consume", GOES, ""), Fault("consume", "k = keys_of", GOES + "k = keys_of")],
        "a copy by TMA writes what consume|consume .* reads what a copy by TMA",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str, gpu: Gpu) -> None:
    gpu.planted, complaint = FAULTS[name]
    with pytest.raises(Race, match=complaint):
        attend(*case([520] * 12))
