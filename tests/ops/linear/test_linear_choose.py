"""Choice of the kernel that multiplies by dense weights on a GPU, and of its tiles."""

import pytest
import torch

from onewave.base.device import Device
from onewave.base.errors import ShapeError
from onewave.ops.choice import Asked, Choice
from onewave.ops.linear.choose import CompactChoice, PackedChoice, ProductChoice, choose, choose_tiles, describe

HOPPER, AMPERE = Device((9, 0), 132), Device((8, 0), 108)


def chosen(rows: int, width: int, cols: int, *, device: Device = HOPPER, **options: object) -> Choice:
    return choose(describe(Asked("linear", ((rows, cols), (width, cols)), device, torch.bfloat16, options)))


@pytest.mark.parametrize("rows", [2, 64, 2048])
def test_hopper_multiplies_several_rows_in_one_order(rows: int) -> None:
    choice = chosen(rows, 4096, 4096)
    assert choice.backend == "gluon"
    assert "one chain" in str(choice.why[0])


def test_other_devices_and_rows_that_tma_cannot_address_are_left_to_cublas() -> None:
    assert chosen(64, 4096, 4096, device=AMPERE).module == "torch_impl"
    assert chosen(64, 4096, 4097).module == "torch_impl"
    assert chosen(1, 4096, 4096).module == "triton_impl"


def test_few_rows_take_narrow_tiles_and_many_rows_the_largest() -> None:
    """The tiles that were fastest of all on an H200 (docs/log/prompts.md)."""
    sizes = {(64, 4096, 14336): (1, 32), (256, 4096, 4096): (1, 128), (512, 6144, 4096): (2, 192)}
    sizes |= {(8192, 4096, 4096): (2, 256), (64, 28672, 4096): (1, 256)}
    for (rows, width, cols), tile in sizes.items():
        choice = chosen(rows, width, cols)
        assert (choice.warpgroups, choice.columns) == tile, (rows, width, cols)


@pytest.mark.parametrize("rows", [2, 9, 33, 64, 65, 300, 5000])
@pytest.mark.parametrize("width", [8, 77, 2048, 28672])
def test_tiles_cover_the_result_and_fit_shared_memory(rows: int, width: int) -> None:
    choice = chosen(rows, width, 4096)
    assert choice.row_blocks * choice.warpgroups * 64 >= rows
    assert choice.column_blocks * choice.columns >= width
    assert 1 <= choice.num_programs <= min(132, choice.row_blocks * choice.column_blocks)
    assert choice.to_map == (width % 8 == 0)
    # Copies of fewer than 64 rows leave the rest of a warpgroup's rows unread: only where nothing is stored of them.
    assert choice.box_rows == 64 or choice.row_blocks == 1
    assert rows <= choice.box_rows or choice.box_rows == 64
    stage = choice.slices * (choice.warpgroups * 64 + choice.columns) * 128
    assert choice.stages >= 3
    assert choice.stages * stage + choice.warpgroups * 256 * min(choice.columns, 64) <= 227 << 10


def test_a_float32_result_is_stored_plainly() -> None:
    choice = chosen(8, 128_256, 4096, out_dtype="float32")
    assert not choice.to_map


@pytest.mark.parametrize(
    ("tokens", "form", "tile_rows"),
    [
        (2, 3, 8), (9, 3, 16), (64, 3, 8), (65, 3, 32), (300, 3, 16), (2048, 3, 8), (4096, 3, 16),
        (2, 1, 8), (300, 2, 8), (9000, 1, 64), (65, 4, 8), (700, 6, 8), (8, 5, 16), (300, 10, 16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("width", [16, 6144, 28672])
def test_tiles_of_packed_rows_cover_the_result_and_fit_shared_memory(
    tokens: int, form: int, tile_rows: int, width: int
) -> None:
    choice = choose_tiles(tokens, width, 4096, (form, tile_rows, 1), None, 132, gated=width == 28672)
    assert choice.to_map
    assert choice.stages >= 3
    if isinstance(choice, PackedChoice):
        assert choice.token_blocks * choice.tokens >= tokens
        assert choice.row_blocks * choice.rows >= width
        assert 1 <= choice.num_programs <= min(132, choice.token_blocks * choice.row_blocks)
        # Bytes of a row's 64 columns: planes, which units share, and what lies beside them.
        planes, beside = {3: (96, 8), 4: (64, 8), 5: (64, 8), 6: (64, 16), 10: (64, 32)}.get(form, (64, 0))
        blocks = 2 if tile_rows == 8 else 1
        shared = {1: blocks, 2: blocks, 3: 1}.get(form, 2 * blocks)
        assert choice.word_slots * shared >= choice.stages
        words = choice.rows * blocks * (choice.stages * beside + choice.word_slots * planes)
        staging = choice.rows // 64 * 256 * min(choice.tokens, 64)
        assert choice.stages * choice.tokens * 128 + words + staging <= 227 << 10
    else:
        assert choice.columns in (32, 64)
        assert choice.column_blocks * choice.columns >= width


def test_few_packed_rows_and_tokens_are_widened_into_shared_memory_and_others_in_registers() -> None:
    """The faster choice on an H200 (docs/log/prompts.md), of tiles of 16 rows."""
    sizes = {(8, 4096, 14336): None, (64, 4096, 4096): None, (64, 28672, 4096): (128, 64), (8, 6144, 4096): (64, 16)}
    sizes |= {(256, 4096, 14336): (64, 128), (256, 28672, 4096): (128, 256), (2048, 6144, 4096): (128, 256)}
    for (tokens, rows, cols), tile in sizes.items():
        choice = choose_tiles(tokens, rows, cols, (3, 16, 1), None, 132, gated=rows == 28672)
        assert (None if isinstance(choice, CompactChoice) else (choice.rows, choice.tokens)) == tile


@pytest.mark.parametrize("tiles", [{}, {"tiles": "int8", "sequences": 8}])
def test_a_gated_question_is_answered_with_the_gated_product(tiles: dict[str, object]) -> None:
    choice = chosen(64, 28672, 4096, gated=True, **tiles)
    assert isinstance(choice, PackedChoice if tiles else ProductChoice)
    assert choice.gated
    with pytest.raises(ShapeError, match="an even number"):
        chosen(64, 28671, 4096, gated=True)
