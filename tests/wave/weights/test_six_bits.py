"""6-bit weights: GGUF's Q6_K exactly, its tiles in a stream, and the instructions that widen them again."""

from typing import Any

import numpy as np
import pytest
import torch

from kit.models.tiny_gguf import k_blocks
from kit.operands.nested import nested_rows
from kit.ptx.ptx_text import executed
from onewave.base.blocks import BLOCK_FORMATS, open_blocks
from onewave.base.weight_formats import NESTED, SIX_BITS, mixed
from onewave.engine.load import kept
from onewave.wave.kernel.widen import halves, nested_digits, operands, six_bits
from onewave.wave.plan.layout import tile_shape
from onewave.wave.weights.formats import tile_format
from onewave.wave.weights.formats.six_bits import six_images
from onewave.wave.weights.formats.tile_format import UnpackedRows
from onewave.wave.weights.rounding import bytes_of_threads

FORM, CPU = mixed(NESTED, {"down0": SIX_BITS}), torch.device("cpu")


@pytest.mark.parametrize(("batch", "images", "cols"), [(1, 4, 2304), (16, 2, 768)])
def test_q6_k_has_its_very_values_in_six_bits_and_comes_back(batch: int, images: int, cols: int) -> None:
    shape = tile_shape(batch, weight_bytes=FORM.weight_bytes, images=images)
    count = 2 * shape.rows
    matrix = open_blocks(k_blocks(np.random.default_rng(5).standard_normal((count, cols), np.float32), "Q6_K"), "Q6_K")
    rows, exact = kept._nested(matrix.on(CPU), FORM, SIX_BITS)
    assert exact
    tiles = tile_format(FORM, shape, torch.float32, SIX_BITS)
    expected = torch.from_numpy(matrix.dequantize())
    assert torch.equal(tiles.restore_groups(rows), expected)
    packed = tiles.pack_groups(rows)
    assert packed.images.shape[1] == tiles.shape.tile_bytes == shape.tile_bytes
    assert torch.equal(tiles.restore(packed, cols), expected)
    out = torch.full((1, count, cols), torch.nan)
    tiles.unpack(packed, torch.arange(len(packed.images)).int(), UnpackedRows(out, 1, 0, 0, 2))
    assert torch.equal(out[0], expected)


def test_any_codes_and_steps_come_back_in_rows_that_end_within_a_tile() -> None:
    shape = tile_shape(4, weight_bytes=FORM.weight_bytes, images=4)
    rows = nested_rows(shape.rows, 1120, 6)
    tiles = tile_format(FORM, shape, torch.float16, SIX_BITS)
    packed = tiles.pack_groups(rows)
    assert torch.equal(tiles.restore(packed, 1120), tiles.restore_groups(rows))
    out = torch.full((1, shape.rows, 1120), torch.nan, dtype=torch.float16)
    tiles.unpack(packed, torch.arange(len(packed.images)).int(), UnpackedRows(out, 1, 0, 0, 1))
    assert torch.equal(out[0], tiles.restore_groups(rows))


def test_only_what_six_bits_hold_is_put_there() -> None:
    widths = {name: kept._width((form,), FORM) for name, form in BLOCK_FORMATS.items()}
    assert widths == dict.fromkeys(BLOCK_FORMATS, 2) | {"Q4_K": 1, "Q6_K": SIX_BITS}
    assert kept._width((BLOCK_FORMATS["Q4_K"], BLOCK_FORMATS["Q6_K"]), FORM) == 2


@pytest.mark.parametrize(("text", "bits"), [(six_bits._BF16, torch.bfloat16), (six_bits._FP16, torch.float16)])
def test_all_codes_widen_exactly_in_every_place_of_a_threads_words(text: Any, bits: torch.dtype) -> None:
    codes = torch.arange(64, dtype=torch.uint8).repeat(128 * 64 // 64).view(1, 128, 64).transpose(1, 2).contiguous()
    codes = codes.roll(7, 2) ^ torch.arange(128, dtype=torch.uint8) % 64
    words = six_images(codes)[0].view(torch.int32).view(3, 4, 8, 4, 4).numpy().view(np.uint32)
    made = executed(text.value, {f"${16 + at}": words[at].ravel() for at in range(3)})
    unit = 2.0**-131 if bits is torch.bfloat16 else 2.0**-22
    cut = (codes.double() - 32).view(4, 2, 8, 4, 4, 4, 2)  # 16 rows, half, row, 32 columns, 8 of them, pair, column
    for at in range(16):
        expected = cut[:, at // 2 % 2, :, :, at // 4, :, at % 2].permute(0, 1, 3, 2).reshape(-1)
        found = torch.from_numpy(np.ascontiguousarray(made[f"${at}"])).view(bits)
        assert torch.equal(found.double(), expected * unit)


def test_all_codes_become_bytes_whose_every_other_has_sixteen_columns() -> None:
    codes = torch.arange(64, dtype=torch.uint8).repeat(128).view(1, 64, 128)
    codes = codes.roll(7, 2) ^ torch.arange(64, dtype=torch.uint8)[:, None]
    words = six_images(codes)[0].view(torch.int32).view(3, -1).numpy().view(np.uint32)
    made = executed(nested_digits._SIXES.value, {f"${4 + at}": words[at] for at in range(3)})
    # [16 rows, half, row, 32 columns, 16 of them, 8 of them, pair, column]
    cut = (4 * (codes.int() - 32)).view(4, 2, 8, 4, 2, 2, 4, 2).permute(5, 1, 0, 2, 6, 3, 7, 4).reshape(4, -1).numpy()
    for at in range(4):
        assert (np.ascontiguousarray(made[f"${at}"]).view(np.int8) == cut[at]).all()
        apart = executed(nested_digits._EVERY_OTHER.value, {"$2": made[f"${at}"]})
        for half in range(2):
            kept = np.where(np.arange(cut.shape[1]) % 2 == half, cut[at], 0)
            assert (np.ascontiguousarray(apart[f"${half}"]).view(np.int8) == kept).all()


def test_bytes_of_eight_bits_come_into_the_order_of_nibbles() -> None:
    codes = torch.randint(256, (1, 64, 128), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    words = bytes_of_threads(codes)[0].view(torch.int32).view(4, 4, 8, 4, 4).flatten(0, 3).numpy().view(np.uint32)
    made = executed(halves._WIDE.value, {f"${4 + at}": np.ascontiguousarray(words[:, at]) for at in range(4)})
    # [16 rows, half, row, 32 columns, 16 of them, 8 of them, pair, column]
    cut = (codes.int() - 128).view(4, 2, 8, 4, 2, 2, 4, 2).permute(5, 1, 3, 0, 2, 6, 7, 4).reshape(4, -1).numpy()
    for at in range(4):
        assert (np.ascontiguousarray(made[f"${at}"]).view(np.int8) == cut[at]).all()


def test_nibbles_become_bytes() -> None:
    byte = np.arange(256, dtype=np.uint32)
    words = byte | (byte ^ 77) << 8 | (byte ^ 130) << 16 | (byte ^ 255) << 24
    made = executed(nested_digits._UNSIGNED.value, {"$2": words})
    assert (made["$0"].view(np.uint8) == words.view(np.uint8) & 15).all()
    assert (made["$1"].view(np.uint8) == words.view(np.uint8) >> 4).all()


def test_integers_of_groups_keep_their_signs() -> None:
    byte = np.arange(256, dtype=np.uint32)
    words = byte | (byte ^ 77) << 8 | (byte ^ 130) << 16 | (byte ^ 255) << 24
    expected = words.view(np.int8).reshape(-1, 4)
    four = executed(nested_digits._INTEGERS.value, {"$4": words})
    two = executed(halves._PAIR_OF_BYTES.value, {"$2": words})
    for at in range(4):
        assert (np.ascontiguousarray(four[f"${at}"]).view(np.int32) == expected[:, at]).all()
        assert at > 1 or (np.ascontiguousarray(two[f"${at}"]).view(np.int32) == expected[:, at]).all()


@pytest.mark.parametrize(("text", "first"), [(operands._STEPS, 1.0), (operands._SIXTEENTHS, 1 / 16)])
def test_all_integers_of_groups_become_float32(text: Any, first: float) -> None:
    byte = np.arange(256, dtype=np.uint32)
    made = executed(text.value, {"$4": byte | (byte ^ 77) << 8 | (byte ^ 130) << 16 | (byte ^ 255) << 24})
    for at, other in enumerate((0, 77, 130, 255)):
        found = np.ascontiguousarray(made[f"${at}"]).view(np.float32)
        assert (found == (byte ^ other).astype(np.uint8).view(np.int8) * (first if at % 2 == 0 else 1)).all()
