"""Hopper's attention kernels, their own source executed in NumPy: protocol, masks, pages, packed sequences, float8."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.numpy_gpu.attention_in_numpy import NumpyKernel, kernels_in_numpy
from onewave.base.errors import UnsupportedError
from onewave.ops.attention import choose as choose_impl
from onewave.ops.attention.fp8 import launch as fp8_impl
from onewave.ops.attention.fp8.op import attention_fp8
from onewave.ops.attention.hopper import launch as gluon_impl
from onewave.ops.attention.hopper import order as gluon_order_impl
from onewave.ops.attention.hopper import plan as gluon_plan_impl
from onewave.ops.attention.op import attention, attention_varlen
from onewave.ops.attention.reference import attention as in_torch

NAN = float("nan")
MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window": 90, "softcap": 5.0},
    {"window": (37, 11), "align": "top-left", "sinks": True},
]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, NumpyKernel]:
    return kernels_in_numpy(monkeypatch, programs=3)


def randn(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def near(out: Tensor, exact: Tensor) -> None:
    # The output is rounded to bfloat16, and nothing else is.
    torch.testing.assert_close(out.float(), exact.float(), atol=1e-3, rtol=8e-3)


@pytest.mark.parametrize(
    ("head_dim", "lengths", "mask"),
    [
        *((128, (150, 400), mask) for mask in MASKS),
        *((64, (200, 333), mask) for mask in MASKS),
        *((192, (150, 333), mask) for mask in MASKS[1:]),
        (128, (5, 1), {}),
        (72, (1, 300), {"causal": True, "softcap": 5.0}),
        (192, (70, 70), {"causal": True, "align": "top-left"}),
    ],
)
def test_every_mask_gives_attention(
    kernels: dict[str, NumpyKernel], head_dim: int, lengths: tuple[int, int], mask: dict[str, Any]
) -> None:
    batch = 1 if lengths[1] > 300 else 2
    q = randn(batch, lengths[0], 2, head_dim, seed=2).transpose(1, 2)
    k, v = (randn(batch, 1, lengths[1], head_dim, seed=seed) for seed in (1, 3))
    given = dict(mask)
    if given.pop("sinks", False):
        given["sinks"] = torch.tensor([[0.5, 7.0], [-1.0, 7.0]])[:, 0]  # not side by side
    out, lse = attention(q, k, v, return_lse=True, backend="gluon", **given)
    exact, exact_lse = in_torch(q.float(), k.float(), v.float(), **given)
    near(out, exact)
    torch.testing.assert_close(lse, exact_lse, atol=1e-4, rtol=1e-4)
    assert kernels["attention_kernel"].launches == 1


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("mask", [{"window": (37, 11)}, {"causal": True, "window": 9}])
def test_keys_before_and_beyond_all_that_is_seen_may_hold_nan(mask: dict[str, Any]) -> None:
    q, k, v = (randn(1, 1, n, 128, seed=n) for n in (20, 500, 501))
    v = v[:, :, :500].clone()
    left, right = mask["window"] if isinstance(mask["window"], tuple) else (mask["window"] - 1, 0)
    k[:, :, : 480 - left], v[:, :, : 480 - left] = NAN, NAN
    short = torch.full((1, 1, 700, 128), NAN).bfloat16()
    first = [short.index_copy(2, torch.arange(20 + right), t[:, :, -20 - right :]) for t in (k, v)]
    assert not attention(q, *first, backend="gluon", **mask, align="top-left").isnan().any()
    near(
        attention(q, k, v, backend="gluon", **mask),
        in_torch(q.float(), k.float(), v.float(), **mask)[0],
    )


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("mask", [{}, {"causal": True, "align": "top-left"}])
def test_rows_beyond_the_longest_that_was_said_and_behind_all_sequences_are_left_alone(mask: dict[str, Any]) -> None:
    lengths, key_lengths, longest = [3, 0, 200, 64], [130, 5, 0, 64], 130
    starts, key_starts = (torch.tensor([0, *n]).cumsum(0).int() for n in (lengths, key_lengths))
    q, (k, v) = randn(sum(lengths) + 4, 2, 128, seed=0), (randn(sum(key_lengths), 1, 128, seed=n) for n in (1, 2))
    sinks = torch.tensor([[0.5, 7.0], [-1.0, 7.0]])[:, 0]
    out = torch.full_like(q, 7.0)
    given: dict[str, Any] = {"sinks": sinks, "return_lse": True} | mask
    _, lse = attention_varlen(q, k, v, starts, key_starts, longest, 130, out=out, backend="gluon", **given)
    exact, exact_lse = in_torch(q[:267].float(), k.float(), v.float(), starts, key_starts, **mask, sinks=sinks)
    left_alone = torch.arange(len(q)) >= sum(lengths)
    left_alone[3 + longest : 203] = True
    assert (out[left_alone] == 7.0).all()
    near(out[~left_alone], exact[~left_alone[:267]])
    torch.testing.assert_close(lse[:, ~left_alone], exact_lse[:, ~left_alone[:267]], atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("kernels")
def test_sequences_without_any_key_give_zeros() -> None:
    starts, none = torch.tensor([0, 3, 5]).int(), torch.zeros(3).int()
    q, k = randn(5, 2, 64, seed=0), randn(0, 1, 64, seed=1)
    out, lse = attention_varlen(q, k, k, starts, none, 3, 0, return_lse=True, backend="gluon")
    assert not out.any()
    assert (lse == -torch.inf).all()
    dense = randn(1, 2, 5, 64, seed=0)
    assert not attention(dense, dense[:, :, :0], dense[:, :, :0], backend="gluon").any()


@pytest.mark.parametrize("causal", [False, True])
def test_scores_that_outgrow_the_first_tile_are_computed_anew(kernels: dict[str, NumpyKernel], causal: bool) -> None:
    q, k, v = randn(1, 1, 130, 128, seed=0), randn(1, 1, 600, 128, seed=1), randn(1, 1, 600, 128, seed=2)
    k[:, :, 5] *= 60
    k[:, :, 300] *= 30
    out = attention(q, k, v, causal=causal, backend="gluon")
    near(out, in_torch(q.float(), k.float(), v.float(), causal=causal)[0])


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": True, "window": 70, "softcap": 5.0}])
def test_tiles_of_two_and_of_three_warpgroups_give_the_same_bits(
    kernels: dict[str, NumpyKernel], monkeypatch: pytest.MonkeyPatch, mask: dict[str, Any]
) -> None:
    q, k, v = (randn(1, 1, n, 64, seed=seed, scale=2.0) for seed, n in enumerate((333, 400, 400)))
    tiles, found = gluon_plan_impl._tiles(64), []
    for tile in tiles:
        monkeypatch.setattr(gluon_plan_impl, "_tile_for", lambda *_, tile=tile: tile)
        gluon_plan_impl.schedule.cache_clear()
        choose_impl._on_gpu.cache_clear()
        found.append(attention(q, k, v, return_lse=True, backend="gluon", **mask))
    assert [tile["config"]["WARPGROUPS"] for tile in tiles] == [3, 2]
    assert all(torch.equal(three, two) for three, two in zip(*found, strict=True))
    near(found[0][0], in_torch(q.float(), k.float(), v.float(), **mask)[0])
    gluon_plan_impl.schedule.cache_clear()
    choose_impl._on_gpu.cache_clear()


@pytest.mark.parametrize("head_dim", [40, 80, 96, 136, 192, 256])
def test_heads_that_are_padded_in_shared_memory_leave_their_neighbours_alone(
    kernels: dict[str, NumpyKernel], head_dim: int
) -> None:
    q, k, v = (
        torch.full((1, 2, n + 3, head_dim + 16), NAN).bfloat16()[:, :heads, 1 : n + 1, 8 : head_dim + 8]
        for n, heads in ((150, 2), (200, 1), (200, 1))
    )
    for seed, tensor in enumerate((q, k, v)):
        tensor.copy_(randn(*tensor.shape, seed=seed))
    frame = torch.full((1, 2, 153, head_dim + 16), 7.0).bfloat16()
    out = frame[:, :, 1:151, 8 : head_dim + 8]
    attention(q, k, v, causal=True, out=out, backend="gluon")
    near(out, in_torch(q.float(), k.float(), v.float(), causal=True)[0])
    out.fill_(7.0)
    assert (frame == 7.0).all()
    assert kernels["attention_kernel"].launches == 1


def multiplications(kernel: NumpyKernel, num_queries: int, num_keys: int, **options: Any) -> int:
    """Count the multiplications of one head's attention, which has to be right."""
    q, k, v = (randn(1, 1, n, 128, seed=seed) for seed, n in enumerate((num_queries, num_keys, num_keys)))
    before = kernel.multiplications
    out = attention(q, k, v, backend="gluon", **options)
    near(out, in_torch(q.float(), k.float(), v.float(), **options)[0])
    return kernel.multiplications - before


def test_a_warpgroup_without_rows_multiplies_one_tile_of_keys(kernels: dict[str, NumpyKernel]) -> None:
    kernel = kernels["attention_kernel"]
    assert multiplications(kernel, 64, 1024) < 0.65 * multiplications(kernel, 128, 1024)


def test_half_of_a_causal_tiles_last_keys_is_not_multiplied_for_its_first_rows(
    kernels: dict[str, NumpyKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, tuned = kernels["attention_kernel"], gluon_impl.config(128)
    with_halves = multiplications(kernel, 128, 256, causal=True)
    monkeypatch.setattr(gluon_impl, "config", lambda *_, **__: tuned | {"HALF_TILES": False})
    tile_rows, half, head_dim = 64, 64, 128
    # One more for either warpgroup where nothing comes after the last tile.
    assert multiplications(kernel, 128, 256, causal=True) - with_halves == 3 * tile_rows * half * head_dim


LENGTHS, KEY_LENGTHS = [3, 0, 200, 64], [130, 5, 300, 64]


@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.usefixtures("kernels")
def test_tiles_taken_from_a_queue_give_the_bits_of_tiles_in_turns(
    monkeypatch: pytest.MonkeyPatch, head_dim: int
) -> None:
    q, k, v = (randn(sum(LENGTHS if heads > 1 else KEY_LENGTHS), heads, head_dim, seed=heads) for heads in (3, 1, 1))
    starts, key_starts = (torch.tensor([0, *n]).cumsum(0).int() for n in (LENGTHS, KEY_LENGTHS))
    given = {"causal": True, "return_lse": True, "backend": "gluon"}
    call = (q, k, v, starts, key_starts, max(LENGTHS), max(KEY_LENGTHS))
    in_turns = attention_varlen(*call, **given)
    counters: list[Tensor] = []

    def order_of(plan: Any, *_: Any, **__: Any) -> tuple[Tensor, int, int]:
        slots = range(plan.slots)
        counters.append(torch.tensor([*slots[1::2], *slots[::2], 0]).int())
        return counters[-1], gluon_order_impl.QUEUE, plan.tiles

    monkeypatch.setattr(gluon_impl, "order_of", order_of)
    taken = attention_varlen(*call, **given)
    assert all(torch.equal(a, b) for a, b in zip(in_turns, taken, strict=True))
    # Every place by the first of the three programs, and one beyond the end by each of the others.
    assert counters[0][-1] == 3 * (len(counters[0]) - 1) + 2


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("module", "first", "last"),
    [(gluon_impl, "order_of", "attention_kernel"), (fp8_impl, "_turned", "fp8_kernel")],
)
def test_scratch_is_held_from_the_launch_that_fills_it_to_the_one_that_reads_it(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, first: str, last: str
) -> None:
    said: list[str] = []

    @contextmanager
    def held(device: torch.device) -> Iterator[None]:
        said.append(f"held on {device}")
        yield
        said.append("let go")

    class Kernel:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            said.append(last)
            return self.kernel[grid]

    fill = getattr(module, first)
    monkeypatch.setattr(module, "held", held)
    monkeypatch.setattr(module, first, lambda *args, **named: (said.append(first), fill(*args, **named))[1])
    monkeypatch.setattr(module, last, Kernel(getattr(module, last)))
    q, k, v = (randn(400, heads, 128, seed=heads) for heads in (2, 1, 1))
    starts = torch.arange(0, 401, 50, dtype=torch.int32)  # so many that their tiles are sorted
    if module is gluon_impl:
        attention_varlen(q, k, v, starts, starts, 50, 50, causal=True, backend="gluon")
    else:
        q, k, v = (tensor.transpose(0, 1)[None].to(torch.float8_e4m3fn) for tensor in (q, k, v))
        attention_fp8(q, k, v, causal=True, backend="gluon")
    assert said == ["held on cpu", first, last, "let go"]


@pytest.mark.parametrize(
    ("size", "head_dim"), [(0, 128), (16, 128), (256, 128), (64, 80), (16, 192), (16, 64), (0, 64)]
)
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": True, "window": 40}, {"window": (20, 3)}])
def test_packed_sequences_and_pages_see_no_neighbours(
    kernels: dict[str, NumpyKernel], mask: dict[str, Any], size: int, head_dim: int
) -> None:
    starts, key_starts = (torch.tensor([0, *n]).cumsum(0).int() for n in (LENGTHS, KEY_LENGTHS))
    q = randn(sum(LENGTHS), 2, head_dim, seed=0)
    k, v = (randn(sum(KEY_LENGTHS) + 50, 1, head_dim, seed=seed) for seed in (1, 2))
    exact, exact_lse = in_torch(q.float(), k.float(), v.float(), starts, key_starts, **mask)
    for tensor in (k, v):
        tensor[sum(KEY_LENGTHS) :] = NAN
        left = mask.get("window", (-1,))
        left = left - 1 if isinstance(left, int) else left[0]
        for at, n, m in zip(key_starts.tolist(), LENGTHS, KEY_LENGTHS, strict=False):
            if left >= 0:
                tensor[at : at + max(0, min(m, m - n - left))] = NAN
    given: dict[str, Any] = {"return_lse": True, "backend": "gluon", **mask}
    if size:
        pages = [torch.full((60, size, 1, head_dim), NAN).bfloat16() for _ in "kv"]
        table = torch.full((4, 300 // size + 3), 10**9, dtype=torch.int32)
        page = 60
        for row, m in enumerate(KEY_LENGTHS):
            for first in range(0, m, size):
                page -= 1
                table[row, first // size] = page
                at, rows = int(key_starts[row]) + first, min(size, m - first)
                for into, tensor in zip(pages, (k, v), strict=True):
                    into[page, :rows] = tensor[at : at + rows]
        k, v = pages
        given["block_table"] = table
    out, lse = attention_varlen(q, k, v, starts, key_starts, 200, 300, **given)
    near(out, exact)
    torch.testing.assert_close(lse, exact_lse, atol=1e-4, rtol=1e-4)


def test_without_a_single_page_every_sequence_gives_zeros(kernels: dict[str, NumpyKernel]) -> None:
    starts, none = torch.tensor([0, 2, 5]).int(), torch.zeros(3).int()
    pages, table = randn(0, 16, 1, 128, seed=1), torch.full((2, 3), -1, dtype=torch.int32)
    given: dict[str, Any] = {"block_table": table, "return_lse": True, "backend": "gluon"}
    out, lse = attention_varlen(randn(5, 2, 128, seed=0), pages, pages, starts, none, 3, 40, **given)
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert kernels["attention_kernel"].launches == 1


@pytest.mark.parametrize("axis", [0, 1])
def test_pages_that_are_expanded_are_copied_first(kernels: dict[str, NumpyKernel], axis: int) -> None:
    starts, key_starts = torch.tensor([0, 2, 5]).int(), torch.tensor([0, 20, 30]).int()
    shape = [4, 16, 1, 64]
    shape[axis] = 1
    pages, q = randn(*shape, seed=1).expand(4, 16, 1, 64), randn(5, 2, 64, seed=0)
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    given: dict[str, Any] = {"block_table": table}
    out = attention_varlen(q, pages, pages, starts, key_starts, 3, 20, **given)
    right = attention_varlen(q, *[pages.contiguous()] * 2, starts, key_starts, 3, 20, backend="gluon", **given)
    near(out, right)
    assert kernels["attention_kernel"].launches == 2
    with pytest.raises(UnsupportedError, match="strides"):
        attention_varlen(q, pages, pages, starts, key_starts, 3, 20, backend="gluon", **given)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("packed", [False, True])
def test_float8_rounds_nothing_but_its_weights(
    kernels: dict[str, NumpyKernel], mask: dict[str, Any], packed: bool
) -> None:
    given = dict(mask)
    if given.pop("sinks", False):
        given["sinks"] = torch.tensor([0.5, -1.0])
    scales: dict[str, Any] = {
        "q_scale": torch.tensor([0.5, 1.5]), "k_scale": torch.tensor([0.7]), "v_scale": torch.tensor([2.0])
    }  # fmt: skip
    if packed:
        starts, key_starts = (torch.tensor([0, *n]).cumsum(0).int() for n in (LENGTHS, KEY_LENGTHS))
        given |= {"cu_seqlens_q": starts, "cu_seqlens_k": key_starts, "max_seqlen_q": 200, "max_seqlen_k": 300}
        shapes = ((sum(LENGTHS), 2, 96), (sum(KEY_LENGTHS), 1, 96), (sum(KEY_LENGTHS), 1, 96))
    else:
        shapes = ((1, 2, 150, 96), (1, 1, 400, 96), (1, 1, 400, 96))
    q, k, v = (randn(*shape, seed=seed).to(torch.float8_e4m3fn) for seed, shape in enumerate(shapes))
    exact, exact_lse = attention_fp8(q, k, v, return_lse=True, backend="reference", **scales, **given)
    found, lse = attention_fp8(q, k, v, return_lse=True, backend="gluon", **scales, **given)
    torch.testing.assert_close(lse, exact_lse, atol=1e-4, rtol=1e-4)
    for out in (found, attention_fp8(q, k, v, backend="gluon", **scales, **given)):
        assert (out.float() - exact.float()).abs().max() <= 2.0 * v.float().abs().max() / 16
        assert (out.float() - exact.float()).pow(2).mean().sqrt() <= 0.04 * exact.float().pow(2).mean().sqrt()
    assert kernels["fp8_kernel"].launches == 2


@pytest.mark.parametrize("q_scale", [1e3, 1e5, 1e6, 5e6])
def test_float8_scores_up_to_2_to_the_25_octaves_give_the_values_of_their_highest(
    kernels: dict[str, NumpyKernel], q_scale: float
) -> None:
    """Rounding lifts none above e4m3's largest number, whose next one is NaN."""
    q, k, v = (randn(1, 1, n, 128, seed=n).to(torch.float8_e4m3fn) for n in (66, 300, 301))
    v = v[:, :, :300]
    scales = {"q_scale": torch.tensor([q_scale])}
    out = attention_fp8(q, k, v, backend="gluon", **scales).float()
    exact = attention_fp8(q, k, v, backend="reference", **scales).float()
    # Where float32 tells two scores apart, one weight is all there is.
    assert (out - exact).abs().max() <= v.float().abs().max() / 16
    assert kernels["fp8_kernel"].launches == 1


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("octaves", [8.0, 16.0, 24.0])
@pytest.mark.parametrize("peak", [0, 400, 1150, 2047])
def test_float8_many_keys_far_below_one_weigh_what_they_should(
    kernels: dict[str, NumpyKernel], octaves: float, peak: int, return_lse: bool
) -> None:
    """Relative to the row's highest score they would be 0, wherever that is read before them."""
    q = torch.zeros(1, 1, 70, 64)
    k, v = torch.zeros(1, 1, 2048, 64), torch.ones(1, 1, 2048, 64)
    q[..., 0] = 1.0
    k[:, :, peak, 0], v[:, :, peak] = octaves, -1.0
    stored = [tensor.to(torch.float8_e4m3fn) for tensor in (q, k, v)]
    found = attention_fp8(*stored, scale=math.log(2), backend="gluon", return_lse=return_lse)
    out = found[0] if isinstance(found, tuple) else found
    # The peak's own 128 keys count relative to it.
    others = (2047 if octaves < 14 else 2048 - 128) * 2.0**-octaves
    torch.testing.assert_close(out.float(), torch.full(out.shape, (others - 1) / (others + 1)), atol=6e-3, rtol=0.0)
    assert kernels["fp8_kernel"].launches == 1


def test_float8_rows_whose_window_begins_beyond_their_sequence_read_no_neighbour(
    kernels: dict[str, NumpyKernel],
) -> None:
    starts, key_starts = torch.tensor([0, 260, 400]).int(), torch.tensor([0, 5, 205]).int()
    q, k, v = (randn(n, 2, 64, seed=seed).float() for seed, n in enumerate((400, 205, 205)))
    v[5:] = NAN
    v[:, 1] = NAN
    stored = [tensor.to(torch.float8_e4m3fn) for tensor in (q, k, v)]
    given: dict[str, Any] = {"window": (60, 0), "align": "top-left", "backend": "gluon"}
    packing = {"cu_seqlens_q": starts, "cu_seqlens_k": key_starts, "max_seqlen_q": 260, "max_seqlen_k": 200}
    out = attention_fp8(*stored, **packing, **given)
    assert not out[:260, 0].isnan().any()
    assert out[:5, 1].isnan().all()
    assert not out[65:260, 0].any()
    assert kernels["fp8_kernel"].launches == 1


def test_float8_rows_beyond_the_last_keys_window_are_zeros_whatever_other_heads_hold(
    kernels: dict[str, NumpyKernel],
) -> None:
    q, k, v = (randn(1, 2, n, 64, seed=n) for n in (260, 5, 6))
    v = v[:, :, :5].clone()
    v[:, 1] = NAN
    stored = [tensor.to(torch.float8_e4m3fn) for tensor in (q, k, v)]
    out = attention_fp8(*stored, window=(60, 0), align="top-left", backend="gluon")
    assert not out[:, 0].isnan().any()
    assert out[:, 1, :5].isnan().all()
    assert not out[:, 0, 65:].any()
    assert kernels["fp8_kernel"].launches == 1
