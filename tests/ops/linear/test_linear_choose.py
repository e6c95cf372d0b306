"""What multiplies by dense weights on a GPU, and in which tiles."""

from __future__ import annotations

import pytest
import torch

from onewave.base.device import Device
from onewave.ops.choice import Asked, Choice
from onewave.ops.linear.choose import ProductChoice, choose, describe

HOPPER, AMPERE = Device((9, 0), 132), Device((8, 0), 108)


def chosen(rows: int, width: int, cols: int, *, device: Device = HOPPER, **options: object) -> Choice:
    return choose(describe(Asked("linear", ((rows, cols), (width, cols)), device, torch.bfloat16, options)))


@pytest.mark.parametrize("rows", [2, 64, 2048])
def test_hopper_multiplies_several_rows_in_one_order(rows: int) -> None:
    choice = chosen(rows, 4096, 4096)
    assert isinstance(choice, ProductChoice)
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
        assert isinstance(choice, ProductChoice)
        assert (choice.warpgroups, choice.columns) == tile, (rows, width, cols)


@pytest.mark.parametrize("rows", [2, 9, 33, 64, 65, 300, 5000])
@pytest.mark.parametrize("width", [8, 77, 2048, 28672])
def test_tiles_cover_the_result_and_fit_shared_memory(rows: int, width: int) -> None:
    choice = chosen(rows, width, 4096)
    assert isinstance(choice, ProductChoice)
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
    assert isinstance(choice, ProductChoice)
    assert not choice.to_map
