"""The kernels of compact tiles pack and unpack bit for bit as plain PyTorch does, and compile without a spill."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kit.lanes import slow
from kit.operands.compact import bits_of, shape_of
from kit.operands.random import randn
from kit.operands.read_back import differs
from onewave.base.weight_formats import COMPACT
from onewave.engine.load.sketches import BlankStream, compile_packing
from onewave.ops.ffn.sizes import FFNSizes
from onewave.ops.ffn.wave.plan import plan_ffn
from onewave.wave.plan.layout import LIST_WORDS, TileShape
from onewave.wave.weights import compact_impl
from onewave.wave.weights.compact import bases_of, compact_images, scales_of
from onewave.wave.weights.compact_impl import pack_compact, unpack_compact
from onewave.wave.weights.formats.tile_format import UnpackedRows
from onewave.wave.weights.pack import Weight, WeightStream

CPU = torch.device("cpu")
MORE = 3  # tiles of a stream beside a matrix's


def packed(weight: Weight, shape: TileShape) -> tuple[tuple[Tensor, ...], bool]:
    """Images, lists, places and scales as the kernels make them of a matrix, and whether they hold all of it."""
    height, cols = weight.matrices[0].shape
    blocks, tiles = -(-height * len(weight.matrices) // shape.rows), -(-cols // shape.cols)
    places = torch.randperm(blocks * tiles + MORE, generator=torch.Generator().manual_seed(0))[: blocks * tiles].int()
    images = torch.full((blocks * tiles + MORE, shape.tile_bytes), 99, dtype=torch.uint8)
    lists = torch.full((blocks * tiles + MORE, LIST_WORDS), 99, dtype=torch.int32)
    scales = torch.full((blocks * shape.rows,), float("nan"))
    reached = torch.ones((), dtype=torch.bool)
    pack_compact(images, lists, scales, reached, places, weight.matrices, weight.gain, shape)
    return (images, lists, places, scales), bool(reached)


def check(weight: Weight, shape: TileShape, *, holds_all: bool = True) -> Tensor:
    """Pack as the kernels do and as PyTorch does, and read back what was packed. Returns the tiles' lists."""
    (images, lists, places, scales), reached = packed(weight, shape)
    rows = weight.block(0, len(scales), CPU)
    bases = bases_of(rows)
    expected_images, expected_lists, expected = compact_images(rows, bases, shape)
    assert reached is bool(expected) is holds_all
    assert torch.equal(scales, scales_of(bases))
    assert torch.equal(images[places.long()], expected_images)
    assert torch.equal(lists[places.long()], expected_lists)
    assert (images == 99).all(dim=1).sum() == (lists == 99).all(dim=1).sum() == MORE
    if holds_all:
        count, (height, cols) = len(weight.matrices), weight.matrices[0].shape
        wanted = rows[: count * height].view(height, count, cols).transpose(0, 1)
        for first, last in {(0, height), (min(5, height - 1), min(17, height)), (height - 1, height)}:
            out = torch.full((count, last - first, cols), float("nan"), dtype=torch.bfloat16)
            low, high = first * count // shape.rows, -(-last * count // shape.rows)
            part = UnpackedRows(out, count, first, low, high - low)
            unpack_compact(images, lists, places, scales, part, shape)
            assert torch.equal(bits_of(out), bits_of(wanted[:, first:last]))
    return expected_lists


def matrices_of(count: int, height: int, cols: int, *, apart: int = 0) -> tuple[Tensor, ...]:
    """Matrices of weights of all kinds; rows are so many values further apart than they are long."""
    found = tuple((randn(height, cols + apart, seed=seed) * 0.02).bfloat16()[:, :cols] for seed in range(count))
    for at, matrix in enumerate(found):
        matrix *= torch.logspace(-6, 6, height)[:, None]
        matrix[at::3, ::5] = 0.0
        matrix[1::5, 3::7] = -0.0
        matrix[height // 2] = 0.0
        matrix[height // 3, 11::160] *= 1e-18
        matrix[-1, -1] = -1.3e-20
    return found


@pytest.mark.parametrize(
    ("batch", "images", "count", "gained", "height", "cols"),
    [
        (1, 1, 1, True, 21, 1100),  # columns that do not fill tiles, rows that do not fill row blocks
        slow(1, 2, 2, False, 5, 4096),
        slow(1, 2, 1, True, 9, 2050),
        (2, 1, 2, True, 23, 1024),
        (2, 2, 1, False, 17, 1102),
        slow(8, 1, 1, False, 16, 130),
        (8, 2, 2, True, 20, 1026),
        (16, 1, 2, False, 40, 70),
        slow(16, 2, 1, True, 40, 576),
        (64, 2, 1, True, 70, 300),
        (1, 1, 2, False, 9, 1023),  # odd ones: no two weights are a word in every row
        slow(1, 1, 2, True, 9, 1023),
    ],
)
def test_the_kernels_pack_and_unpack_as_plain_indexing_does(
    batch: int, images: int, count: int, gained: bool, height: int, cols: int
) -> None:
    gain = (randn(cols, seed=9) / 4).bfloat16() if gained else None
    lists = check(Weight(matrices_of(count, height, cols), gain), shape_of(batch, images))
    assert lists[:, 0].any()


@pytest.mark.parametrize("apart", [64, 7])
def test_rows_may_lie_apart_and_begin_anywhere(apart: int) -> None:
    matrices = matrices_of(2, 10, 300, apart=apart)
    check(Weight(matrices, (randn(300, seed=9) / 4).bfloat16()), shape_of(1, 1))
    check(Weight(tuple(matrix[:, 1:65] for matrix in matrices)), shape_of(1, 1))


def test_a_gain_may_have_more_bits_than_weights() -> None:
    check(Weight(matrices_of(1, 8, 1024), 1 + randn(1024, seed=9) / 1000), shape_of(1, 1))


def test_products_are_rounded_to_the_nearest_and_ties_to_even() -> None:
    cols = 1024
    bits = torch.randint(-(1 << 15), 1 << 15, (8, cols), generator=torch.Generator().manual_seed(2)).to(torch.int16)
    rows = (bits & -0x7F01) | 0x3F00  # exponents near 1, any mantissa and sign
    gain = torch.tensor([1.0, 1.5, 1.25, 1.0078125, 0.99609375, 3.0, 1.9921875, 1.0]).bfloat16().repeat(cols // 8)
    check(Weight((rows.view(torch.bfloat16),), gain), shape_of(1, 1))


@pytest.mark.parametrize("largest", [0.0, 1e-40, 2.0**-126, 2.0**-96, 2.0**-95, 2.0**-90, 1.0, 1.99 * 2.0**94])
def test_every_distance_from_a_rows_largest_weight_is_kept_or_listed(largest: float) -> None:
    """The exponents below a row's largest one, and some so far below that they need the list."""
    shape = shape_of(2, 1)
    rows = torch.full((shape.rows, shape.cols), largest, dtype=torch.bfloat16)
    exponent = int(bits_of(rows)[0, 0]) >> 7
    dice = torch.Generator().manual_seed(1)
    low = torch.arange(max(exponent - 31, 0), exponent + 1)
    bits = torch.randint(0, 128, (shape.rows, len(low)), generator=dice) | (low << 7)
    bits_of(rows)[:, 100 : 100 + len(low)] = torch.minimum(bits, bits_of(rows)[:, :1]).to(torch.int16)
    rows[1::2] *= -1
    for listed in range(12 if exponent > 47 else 0):
        rows[listed % shape.rows, 7 * listed + 2] = largest * 2.0 ** (-40 - listed % 7) * 1.0078125
    lists = check(Weight((rows,)), shape)
    assert bool(lists[:, 0].sum() >= 12) == (exponent > 47)


def test_tiles_of_nothing_but_zeros_list_nothing() -> None:
    rows = torch.zeros(20, 1100, dtype=torch.bfloat16)
    rows[::2, ::3] = -0.0
    assert not check(Weight((rows,)), shape_of(1, 2)).any()


@pytest.mark.parametrize(("batch", "images"), [(1, 1), slow(2, 2), slow(8, 1), (16, 2)])
def test_a_list_holds_thirty_one_weights_in_their_order_and_no_more(batch: int, images: int) -> None:
    shape = shape_of(batch, images)
    rows = (0.5 + randn(shape.rows, 2 * shape.cols, seed=3).abs()).bfloat16()
    at = torch.randperm(shape.rows * shape.cols, generator=torch.Generator().manual_seed(batch))[:40]
    for many in (LIST_WORDS - 1, 40):
        row, column = at[:many] // shape.cols, at[:many] % shape.cols
        rows[row, column + shape.cols] = (1e-12 * (1 + torch.arange(many) / 16) * (-1) ** torch.arange(many)).bfloat16()
        lists = check(Weight((rows,)), shape, holds_all=many < LIST_WORDS)
        assert lists[:, 0].tolist() == [0, LIST_WORDS - 1]


def test_weights_out_of_reach_clear_the_flag() -> None:
    rows = (0.5 + randn(5, 1030, seed=3).abs()).bfloat16()
    for far in (2.0**-96, -1e-30, 1e-39):
        rows[4, 1029] = far
        check(Weight((rows,)), shape_of(1, 1), holds_all=False)


@pytest.mark.parametrize(
    ("value", "gain"), [(float("nan"), None), (float("inf"), 1.0), (-float("inf"), None), (1e38, 1.0), (2.0**95, None)]
)
def test_rows_of_too_large_weights_and_of_nonsense_clear_the_flag(value: float, gain: float | None) -> None:
    rows = torch.full((3, 200), 0.5, dtype=torch.bfloat16)
    rows[2, 199] = value
    gains = None if gain is None else torch.full((200,), gain, dtype=torch.bfloat16)
    assert not packed(Weight((rows,), gains), shape_of(1, 1))[1]


def test_a_gain_may_make_weights_too_large_or_small_enough() -> None:
    rows = torch.full((8, 1024), 0.5, dtype=torch.bfloat16)
    rows[3, 9] = 2.0**96
    gain = torch.ones(1024, dtype=torch.bfloat16)
    assert not packed(Weight((rows,), gain), shape_of(1, 1))[1]
    gain[9] = 2.0**-90
    check(Weight((rows,), gain), shape_of(1, 1))


def stream(kind: type[WeightStream] = WeightStream) -> Any:
    plan = plan_ffn(FFNSizes(2, 64, 128, 64, True), workers=5, compact=True)
    return kind(plan.programs[0], torch.bfloat16, CPU, COMPACT)


def test_a_stream_is_the_same_whoever_packs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gain = (1 + randn(64, seed=3) / 4).bfloat16()
    weights = {"up": Weight(matrices_of(2, 128, 64), gain), "down": Weight(matrices_of(1, 64, 128))}
    by_kernel, plain = stream(), stream()
    for name, weight in weights.items():
        plain.put(name, weight)
        with monkeypatch.context() as patch:
            patch.setattr(WeightStream, "_is_here", lambda *_: True)
            by_kernel.put(name, weight)
        assert not differs(by_kernel, name, weight)
    assert by_kernel.reached
    for one, other in (
        (by_kernel.images, plain.images),
        (by_kernel.lists, plain.lists),
        (by_kernel.scales, plain.scales),
    ):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_what_compiles_the_kernels_ahead_launches_them_as_they_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[str, bool, int, bool]] = []

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **constants: Any) -> None:
        launched.append((kernel.__name__, constants["PAIRED"], constants["COUNT"], constants.get("GAIN", False)))

    monkeypatch.setattr(compact_impl, "launch_kernel", launch)
    compile_packing(stream(BlankStream))
    assert set(launched) == {
        (name, True, count, gained)
        for count, gained in ((1, True), (1, False), (2, True))
        for name in ("_bases_kernel", "_pack_kernel")
    } | {("_unpack_kernel", True, count, False) for count in (1, 2)}
