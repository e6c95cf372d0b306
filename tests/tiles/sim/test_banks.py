"""Shared memory's banks: what conflicts, what does not, and which swizzles remove it."""

import pytest

from onewave.base.errors import InvalidArgumentError
from onewave.tiles.sim.banks import Swizzle, conflicts, copied_rows, matrices, passes


def test_a_word_to_each_bank_takes_one_pass_and_a_word_for_all_lanes_too() -> None:
    assert passes([4 * lane for lane in range(32)], 4) == 1
    assert passes([4 * (31 - lane) for lane in range(32)], 4) == 1
    assert passes([64] * 32, 4) == 1
    assert passes([2 * lane for lane in range(32)], 2) == 1


@pytest.mark.parametrize(("stride", "needed"), [(1, 1), (2, 2), (4, 4), (32, 32), (33, 1), (48, 16), (5, 1)])
def test_strided_words_conflict_by_what_the_stride_shares_with_the_banks(stride: int, needed: int) -> None:
    assert passes([4 * stride * lane for lane in range(32)], 4) == needed
    assert conflicts([4 * stride * lane for lane in range(32)], 4) == needed - 1


def test_wide_accesses_go_in_passes_of_as_many_lanes_as_fill_the_banks() -> None:
    assert passes([16 * lane for lane in range(32)], 16) == 4
    assert passes([8 * lane for lane in range(32)], 8) == 2
    # Lanes 0 and 8 share a bank but not a pass; lanes 0 and 1 share both.
    assert conflicts([128 * (lane // 8) + 16 * (lane % 8) for lane in range(32)], 16) == 0
    assert conflicts([128 * (lane % 8) + 16 * (lane // 8) for lane in range(32)], 16) == 28


def test_lanes_that_sit_out_cost_nothing() -> None:
    assert passes([None] * 32, 4) == 0
    assert conflicts([None] * 24 + [128 * lane for lane in range(8)], 16) == 7
    assert conflicts([0] + [None] * 31, 16) == 0


def test_a_swizzle_is_a_permutation_of_the_tile() -> None:
    for tile in (
        Swizzle(128),
        Swizzle(64),
        Swizzle(32, per_phase=2, max_phase=4),
        Swizzle(16, per_phase=4, max_phase=2),
    ):
        offsets = [tile.offset(row, column) for row in range(32) for column in range(tile.columns)]
        assert sorted(offsets) == [2 * i for i in range(32 * tile.columns)]


@pytest.mark.parametrize("columns", [16, 32, 64, 128, 256])
def test_without_a_swizzle_every_matrix_conflicts_and_with_the_right_one_none(columns: int) -> None:
    line = max(1, 64 // columns)
    plain, swizzled = Swizzle(columns, max_phase=1), Swizzle(columns, per_phase=line, max_phase=8 // line)
    assert {conflicts(rows, 16) for rows in matrices(plain, 64)} == {8 // line - 1}
    assert {conflicts(rows, 16) for rows in matrices(swizzled, 64)} == {0}
    assert {conflicts(lanes, 16) for lanes in copied_rows(swizzled, 64, width=16)} == {0}
    if line > 1:
        # Rows of less than a line of banks, each with a phase of its own.
        wrong = Swizzle(columns, max_phase=8 // line)
        assert max(conflicts(rows, 16) for rows in matrices(wrong, 64)) > 0


def test_what_is_no_access_or_no_swizzle_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="33 lanes of 4 bytes"):
        passes([0] * 33, 4)
    with pytest.raises(InvalidArgumentError, match="a multiple of 16"):
        passes([8], 16)
    with pytest.raises(InvalidArgumentError, match="vec x max_phase = 64"):
        Swizzle(32)


@pytest.mark.parametrize("field", ["columns", "vec", "per_phase", "max_phase", "item_bytes"])
@pytest.mark.parametrize("value", [0, -64])
def test_a_swizzle_of_nothing_is_refused(field: str, value: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"swizzle: {field}: {value}; allowed: 1 or more"):
        Swizzle(**{"columns": 64, field: value})


@pytest.mark.parametrize("phases", [3, 5, 6, 12])
def test_phases_that_would_leave_the_row_are_refused(phases: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"max_phase: {phases}; allowed: a power of two"):
        Swizzle(8 * phases, max_phase=phases)


@pytest.mark.parametrize("item_bytes", [1, 2, 4])
def test_matrices_hold_each_byte_of_a_tile_once_whatever_an_item_is(item_bytes: int) -> None:
    tile = Swizzle(128, vec=16 // item_bytes, max_phase=4, item_bytes=item_bytes)
    found = sorted(address for rows in matrices(tile, 16) for address in rows)
    assert found == list(range(0, 16 * 128 * item_bytes, 16))


def test_a_swizzle_that_takes_rows_or_lanes_apart_is_refused() -> None:
    for tile, rows in ((Swizzle(64, vec=4), 8), (Swizzle(24, item_bytes=32, max_phase=1), 8), (Swizzle(64), 12)):
        with pytest.raises(InvalidArgumentError, match="multiples of 8 rows and of 16 bytes"):
            next(matrices(tile, rows))
    for width in (0, 1, 3, 6, 32):
        with pytest.raises(InvalidArgumentError, match=f"width: {width}; allowed: a multiple of 2 that divides .* 16"):
            next(copied_rows(Swizzle(64), 8, width=width))
