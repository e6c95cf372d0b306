"""Rows rounded to four bits, their tiles in a stream, and the instructions that widen them again."""

import itertools
import threading
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from kit.numpy_gpu.gluon_in_numpy import Gluon
from kit.numpy_gpu.numpy_memory import Memory, digit_words, wrapped
from kit.operands.random import randn
from kit.ptx.ptx_text import executed
from onewave.base.group_rounding import restore_groups, round_groups
from onewave.base.weight_formats import NIBBLES, GroupRounding, mixed
from onewave.wave.kernel.finish import to_float
from onewave.wave.kernel.widen import digits, nibble_values
from onewave.wave.kernel.words import (
    group_of,
    has_minima,
    scale_rows,
    takes_digits,
    tile_bytes,
    wide_group,
    wide_number,
)
from onewave.wave.plan.layout import tile_shape
from onewave.wave.weights.formats import Tiles, tile_format
from onewave.wave.weights.formats.group_nibbles import codes_of, nibble_images
from onewave.wave.weights.formats.tile_format import UnpackedRows

ALL = pytest.mark.parametrize("form", NIBBLES.values(), ids=lambda form: form.name)
INT4 = NIBBLES[128, False]


@ALL
def test_a_scale_leaves_no_more_than_the_one_of_the_largest_magnitude(form: GroupRounding) -> None:
    rows = randn(5, 960) * torch.tensor([1e-3, 1.0, 30.0, 1e-15, 1e15])[:, None]
    made = round_groups(rows, form)
    found = restore_groups(made, form.group, torch.float32)
    padded = torch.nn.functional.pad(rows, (0, -960 % form.group)).view(5, -1, form.group)
    if form.minima:
        step = (padded.amax(2).clamp(min=0) - padded.amin(2).clamp(max=0)) / 15
        error = (found - rows).abs() / step.repeat_interleave(form.group, dim=1)[:, :960]
        assert error.max() < 0.52
    else:
        step = padded.abs().amax(2, keepdim=True) / 8
        plain = ((padded / step).round().clamp(-8, 7) * step - padded).square().sum(1)
        least = torch.nn.functional.pad(found - rows, (0, -960 % form.group)).view(5, -1, form.group).square().sum(1)
        assert (least.sum(1) < 0.9 * plain.sum(1)).all()
    assert torch.equal(made.row_scales.frexp().mantissa, torch.full((5,), 0.5))


@ALL
def test_rows_of_zeros_stay_zeros_and_rows_of_nonsense_show(form: GroupRounding) -> None:
    rows = torch.zeros(4, 128)
    rows[1, 3], rows[2, 100], rows[3, 0] = torch.nan, torch.inf, 1e-41
    found = restore_groups(round_groups(rows, form), form.group, torch.float32)
    assert torch.equal(found[0], rows[0])
    assert found[1:3].isnan().any(1).all()
    assert found[3].abs().max() < 1e-37


def test_every_group_is_rounded_alike_however_many_rows_there_are() -> None:
    rows = randn(300, 512)
    whole, alone = round_groups(rows, INT4), round_groups(rows[7:8], INT4)
    assert torch.equal(whole.codes[7:8], alone.codes)
    assert torch.equal(whole.scales[7:8], alone.scales)


@pytest.mark.parametrize(
    ("text", "bits", "less"),
    [
        (nibble_values._NIBBLES, torch.bfloat16, 0),
        (nibble_values._NIBBLES, torch.float16, 0),
        (nibble_values._SIGNED_BF16, torch.bfloat16, 8),
        (nibble_values._SIGNED_FP16, torch.float16, 8),
    ],
)
def test_all_nibbles_widen_exactly_in_every_place_of_a_word(text: Any, bits: torch.dtype, less: int) -> None:
    words = np.random.default_rng(1).integers(0, 1 << 32, 4096, dtype=np.uint32)
    words[:16] = np.arange(16) * 0x11111111
    made = executed(text.value, {"$8": words})
    unit = 2.0**-133 if bits is torch.bfloat16 else 2.0**-24
    for place in range(8):
        byte, second = place % 4, place // 4
        expected = torch.from_numpy((words >> (8 * byte + 4 * second) & 15).astype(np.float64)) - less
        found = torch.from_numpy(np.ascontiguousarray(made[f"${place}"])).view(bits)
        assert torch.equal(found.double(), expected * unit * 16**second)


def test_all_nibbles_widen_exactly_to_bytes() -> None:
    words = np.random.default_rng(1).integers(0, 1 << 32, 4096, dtype=np.uint32)
    words[:16] = np.arange(16) * 0x11111111
    made, raw = executed(digits._NIBBLE_BYTES.value, {"$2": words}), words.view(np.uint8).astype(int)
    assert (made["$0"].view(np.int8) == 16 * ((raw & 15) - 8)).all()
    assert (made["$1"].view(np.int8) == 16 * ((raw >> 4) - 8)).all()


def test_two_bytes_hold_every_whole_number_that_activations_are_rounded_to() -> None:
    numbers = np.arange(-32768, 32640).reshape(-1, 4)
    placed = (numbers + digits._PLACED.value).astype(np.float32).view(np.uint32)
    made = executed(digits._DIGITS.value, {f"${at + 2}": placed[:, at].copy() for at in range(4)})
    high, low = (made[name].view(np.int8).reshape(-1, 4).astype(int) for name in ("$0", "$1"))
    assert (256 * high + low == numbers).all()


def test_activations_keep_sixteen_bits_beside_the_largest_of_128_and_show_what_is_not_finite() -> None:
    rows = randn(6, 128) * torch.logspace(-3, 3, 6)[:, None]
    rows[0], rows[1, 5], rows[2, 7], rows[3, 9] = 0, torch.inf, torch.nan, 255 / 128 * 2.0**12
    words = rows.bfloat16().view(torch.int32).numpy().reshape(6, 1, 4, 2, 8)
    gl = Gluon(Memory(), 0, (1, 1), threading.Lock())
    space: dict[str, Any] = {"gl": gl, "tl": gl, "digit_words": digit_words, "_PLACED": digits._PLACED.value}
    space |= {"_INFINITE": digits._INFINITE.value, "_PLACED_BITS": digits._PLACED_BITS.value}
    for made in (digits.digits_of, digits.larger, digits.placed, to_float):
        space[made.fn.__name__] = types.FunctionType(made.fn.__code__, space)
    parts = (wrapped(words[:, :, :, half].reshape(6, 1, 32)) for half in range(2))
    *both, scale, sums = space["digits_of"](*parts, ml_dtypes.bfloat16, INT4.number)
    high, low = (np.asarray(part).view(np.int8).reshape(6, 128).astype(float) for part in both)
    column = np.arange(128)
    place = column & ~31 | (column & 8) << 1 | (column & 6) << 1 | (column & 1) << 1 | column >> 4 & 1
    found = (256 * high + low)[:, place] * np.asarray(scale, float) * 2.0 ** (4 + 133 - 64)
    assert (np.asarray(sums)[[0, 3, 4, 5], 0] == (256 * high + low).reshape(6, 4, 32).sum(2)[[0, 3, 4, 5]]).all()
    exact = rows.bfloat16().double().numpy()
    assert np.isnan(scale[1:3]).all()
    for row in (0, 3, 4, 5):
        assert (abs(found[row] - exact[row]) <= abs(exact[row]).max() * 2.0**-14.99).all()


@ALL
def test_host_and_kernel_agree_on_a_format(form: GroupRounding) -> None:
    assert (group_of.fn(form.number), has_minima.fn(form.number)) == (form.group, form.minima)
    assert scale_rows.fn(form.number) == form.beside_rows
    assert takes_digits.fn(form.number, 4) == form.digits
    for images in (1, 2, 4):
        shape = tile_shape(1, weight_bytes=form.weight_bytes, images=images)
        assert tile_bytes.fn(form.number, images) == shape.tile_bytes == 128 * images * (32 + form.beside_rows)


def test_an_image_holds_operand_a_in_the_order_that_threads_read() -> None:
    operands = torch.randint(16, (3, 64, 128), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    images = nibble_images(operands)
    assert torch.equal(codes_of(images), operands)
    words = images.view(torch.int32).view(3, 2, 4, 8, 4, 2, 2)  # 32 columns, 16 rows, row, pair, half of 16 rows, eight
    for step, warp, row, pair, below, eight in itertools.product(range(2), (0, 3), (0, 5), (0, 3), range(2), range(2)):
        word = int(words[2, step, warp, row, pair, below, eight])
        for second, sixteen, column in itertools.product(range(2), range(2), range(2)):
            at = (16 * warp + 8 * below + row, 64 * second + 32 * step + 16 * sixteen + 8 * eight + 2 * pair + column)
            assert word >> (16 * column + 8 * sixteen + 4 * second) & 15 == operands[2, *at]


@ALL
@pytest.mark.parametrize(("batch", "images", "cols"), [(1, 2, 2100), (4, 4, 600), (16, 1, 256)])
def test_packed_rows_come_back_with_their_scales(form: GroupRounding, batch: int, images: int, cols: int) -> None:
    shape = tile_shape(batch, weight_bytes=form.weight_bytes, images=images)
    made = round_groups(randn(2 * shape.rows, cols), form)
    tiles = tile_format(form, shape, torch.bfloat16)
    packed = tiles.pack_groups(made)
    assert packed.images.shape == (2 * -(-cols // shape.cols), shape.tile_bytes)
    assert torch.equal(tiles.restore(packed, cols), restore_groups(made, form.group, torch.bfloat16))


@pytest.mark.parametrize(
    ("form", "batch", "images", "height", "cols", "count"),
    [(INT4, 1, 2, 40, 1100, 1), (NIBBLES[32, True], 4, 2, 33, 600, 2), (NIBBLES[64, False], 16, 1, 64, 256, 2)],
    ids=lambda given: getattr(given, "name", given),
)
def test_the_unpacking_kernel_reads_what_was_packed(
    form: GroupRounding, batch: int, images: int, height: int, cols: int, count: int
) -> None:
    shape = tile_shape(batch, weight_bytes=form.weight_bytes, images=images)
    matrices = [randn(height, cols, seed=seed) for seed in range(count)]
    blocks, tiles = -(-height * count // shape.rows), -(-cols // shape.cols)
    rows = torch.stack(matrices, dim=1).view(-1, cols)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, blocks * shape.rows - len(rows)))
    layout = tile_format(form, shape, torch.float16)
    packed = layout.pack(rows)
    places = torch.randperm(blocks * tiles + 3, generator=torch.Generator().manual_seed(0))[: blocks * tiles].int()
    stream = torch.zeros(blocks * tiles + 3, shape.tile_bytes, dtype=torch.uint8)
    stream[places.long()] = packed.images
    for first, last in ((0, height), (5, 17), (height - 1, height)):
        out = torch.full((count, last - first, cols), torch.nan, dtype=torch.float16)
        low, high = first * count // shape.rows, -(-last * count // shape.rows)
        part = UnpackedRows(out, count, first, low, high - low)
        layout.unpack(Tiles(stream, packed.scales), places, part)
        for found, matrix in zip(out, matrices, strict=True):
            expected = restore_groups(round_groups(matrix[first:last], form), form.group, torch.float16)
            assert torch.equal(found, expected)


@pytest.mark.parametrize(("nibbles", "width", "batch", "cols"), [
    (INT4, 2, 4, 600), (NIBBLES[32, True], 2, 1, 1500), (INT4, 4, 2, 700), (NIBBLES[64, True], 4, 8, 130),
], ids=lambda given: getattr(given, "name", given))  # fmt: skip
def test_wider_rows_come_back_by_plain_indexing_and_by_the_kernel(
    nibbles: GroupRounding, width: int, batch: int, cols: int
) -> None:
    form = mixed(nibbles, {"down0": width})
    assert (wide_group.fn(form.number), wide_number.fn(form.number)) == (form.wide_group, form.wide_number)
    shape = tile_shape(batch, weight_bytes=form.weight_bytes, images=4)
    tiles = tile_format(form, shape, torch.float16, width)
    assert tiles.shape.tile_bytes == shape.tile_bytes
    rows = randn(2 * shape.rows, cols)
    rows = rows if tiles.wide else rows.half()
    packed = tiles.pack(rows)
    found = tiles.restore(packed, cols)
    assert packed.images.shape[1] == shape.tile_bytes
    assert torch.equal(found, tiles.expected(rows))
    assert (found.float() - rows.float()).abs().max() <= (0.02 if width == 2 else 0)
    out = torch.full((1, 2 * shape.rows, cols), torch.nan, dtype=torch.float16)
    tiles.unpack(packed, torch.arange(len(packed.images)).int(), UnpackedRows(out, 1, 0, 0, 2))
    assert torch.equal(out[0], found)


def test_all_bytes_widen_exactly_in_every_place_of_a_word() -> None:
    words = np.random.default_rng(2).integers(0, 1 << 32, 4096, dtype=np.uint32)
    words[:256] = np.arange(256) * 0x01010101
    made = executed(nibble_values._CODES_OF_WORD.value, {"$4": words})
    for place in range(4):
        found = torch.from_numpy(np.ascontiguousarray(made[f"${place}"])).view(torch.bfloat16)
        expected = torch.from_numpy((words >> (8 * place) & 255).astype(np.float64))
        assert torch.equal(found.double(), expected * 2.0**-133)
