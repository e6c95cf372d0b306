"""A loop that cannot end is found, and no other."""

import pytest

from kit.analysers.endless_loops import endless_loops

LOOP = """
    %going = arith.cmpi ne, %exists, %c0_i32 : i32
    %tile:2 = scf.while (%tile_1 = %c0_i32, %exists_2 = %exists) : (i32, i32) -> (i32, i32) {
      %more = arith.cmpi ne, %exists_2, %c0_i32 : i32
      scf.condition(CONDITION) %tile_1, %exists_2 : i32, i32
    } do {
    ^bb0(%tile_3: i32, %exists_4: i32):
      scf.yield %tile_3, %exists_4 : i32, i32
    }
"""


@pytest.mark.parametrize(("condition", "endless"), [("%going", True), ("%more", False), ("%exists_2", False)])
def test_a_condition_that_was_made_before_the_loop_is_found(condition: str, endless: bool) -> None:
    assert endless_loops(LOOP.replace("CONDITION", condition)) == [condition] * endless


def test_each_loop_is_asked_for_itself() -> None:
    second = LOOP.replace("CONDITION", "%more").replace("%more =", "%other =")
    assert endless_loops(LOOP.replace("CONDITION", "%more") + second) == ["%more"]
