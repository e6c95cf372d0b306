"""Decode attention's kernels as they are compiled for sm_80 and sm_90, from the committed reports."""

import pytest

from kit.compiled import blocks_an_sm, reports_of
from kit.processes import python

TRITON, GLUON = reports_of("decode triton "), reports_of("decode gluon ")
ODD = [name for name in TRITON if "odd" in name]
# Shared memory of an SM, with 1 KiB beside each block.
SHARED_AN_SM = 228 << 10


@pytest.mark.parametrize("name", TRITON)
def test_it_compiles_for_the_device_with_tensor_cores_and_copies_ahead(name: str) -> None:
    report = TRITON[name]
    assert report["HGMMA"] + report["HMMA"] > 0
    assert (report["LDGSTS"] > 0) == (name not in ODD)


@pytest.mark.parametrize("name", TRITON)
def test_nothing_touches_memory_before_the_wait_for_the_launch_before(name: str) -> None:
    assert TRITON[name]["unwaited"] == ([] if TRITON[name]["sm"] == 90 else None)


@pytest.mark.parametrize("name", TRITON)
def test_keys_are_summed_in_the_products_layout_as_hoppers_kernel_does(name: str) -> None:
    """A 16-bit mask once drew them out of it: the same keys summed to other bits than Hopper's kernel's."""
    assert TRITON[name]["sums"] == ["mma"]


@pytest.mark.parametrize(("name", "loads"), [("1 row", 1), ("1 row mmha", 7)])
def test_one_rows_query_is_asked_for_before_its_length(name: str, loads: int) -> None:
    # The length is loaded after the first barrier; before it come the query and, with mmha, the new key, what both turn
    # with, cosines, sines and the new value, each in one load of neighbours.
    assert TRITON[name]["asked_first"] >= loads


@pytest.mark.parametrize("name", ["1 row", "1 row mmha", "16 rows", "16 rows D64"])
def test_nearly_all_partials_are_asked_for_before_the_first_is_folded(name: str) -> None:
    # Three loads or four for each of 16 partials; what comes after the first maximum waits for memory once more.
    assert TRITON[name]["merged_at_once"] >= 40


def test_only_where_a_block_may_have_several_rows_is_one_asked_for_ahead() -> None:
    asked = {name for name, report in TRITON.items() if report["UBLKPF"]}
    assert {"16 rows", "16 rows D64", "16 rows mmha fp32 mask", "16 rows int8"} <= asked
    assert not asked & {"1 row", "1 row mmha", "16 rows 8 queries", "300 rows", "16 rows sm_80"}


def guesses(name: str) -> bool:
    """Whether the loader asks for its first tiles by the lengths of before the wait."""
    return "pages" not in name and "mmha" not in name


@pytest.mark.parametrize("name", GLUON)
def test_hoppers_kernel_uses_tensor_cores_and_reads_keys_and_values_once(name: str) -> None:
    report = GLUON[name]
    assert report["registers"] <= 128
    assert report["shared"] + 1024 <= SHARED_AN_SM
    assert report["HMMA"] > 0
    assert report["marked"] == report["copies"] > 0


@pytest.mark.parametrize("name", GLUON)
def test_nothing_but_what_to_ask_for_is_read_before_the_wait(name: str) -> None:
    # Several rows load all lengths, and then the first row's; whether they are finished as well.
    one = name.startswith("1 row")
    loads = (1 if one else 2) * (2 if "finished" in name else 1)
    workers, loader = (dict(each) for each in GLUON[name]["unwaited"])
    assert workers.pop("prefetch", 0) == (0 if "pages" in name else 2)
    assert workers == ({"cg": loads} if one or "pages" not in name else {})
    assert loader == ({"cg": loads} if one or guesses(name) else {})


@pytest.mark.parametrize("name", GLUON)
def test_the_loader_takes_all_it_counts_from_row_to_row(name: str) -> None:
    # Slot, phase, the pair behind, tiles asked for, and where the row begins in the list: Triton 3.6 drops a value that
    # reaches nothing but an inner loop's bounds (docs/log), and all rows but the first read other keys. And how many
    # tiles were guessed. With a single row there is no such loop.
    assert GLUON[name]["carried"] == (0 if name.startswith("1 row") else 7 if guesses(name) else 6)


@pytest.mark.parametrize("name", [name for name in GLUON if guesses(name)])
def test_guessed_tiles_are_asked_for_right_behind_the_wait(name: str) -> None:
    # ptxas had put what says which they are there, too: 100 to 180 instructions, most of them one after another.
    assert GLUON[name]["prompt"] < 60


@pytest.mark.parametrize("name", ["1 row", "1 row mmha"])
def test_with_few_keys_the_next_launch_begins_beside_this_one(name: str) -> None:
    assert 2 * (GLUON[name]["shared"] + 1024) <= SHARED_AN_SM


@pytest.mark.parametrize("name", ["16 rows int8", "16 rows float8", "1 row float8", "256 rows float8 pages of 128"])
def test_of_8_bits_two_programs_share_an_sm(name: str) -> None:
    assert blocks_an_sm(GLUON[name]) == 2


def test_keys_and_values_come_by_tma() -> None:
    # A copy for every 64 columns of keys and of values, and as many for each of the two tiles that are guessed; pages
    # of 16 keys: 4 times as many.
    assert GLUON["16 rows"]["copies"] == 3 * 4
    assert GLUON["16 rows D64"]["copies"] == 3 * 2
    assert GLUON["16 rows mmha fp32 mask finished"]["copies"] == 4
    assert GLUON["16 rows pages of 16"]["copies"] == 16
    assert GLUON["16 rows int8"]["copies"] == 3 * 2


def test_a_tile_costs_three_barriers() -> None:
    # One for the maxima, one for the weights, and one that Triton puts after a slot is let go.
    assert GLUON["16 rows"]["barriers"] == 3


@pytest.mark.slow
def test_many_splits_of_few_heads_compile_as_fast_as_others() -> None:
    """Triton took minutes where 128 partials stood in the code by themselves."""
    code = """
import time
from kit.build import build
from kit.calls import CALLS
from kit.recorder import record
for name in ("1 row", "1 row H1 D64 K131072"):
    [launch] = record(CALLS[f"decode triton {name}"].make)
    begin = time.process_time()
    build(launch)
    print(time.process_time() - begin)
"""
    one, many = map(float, python("-c", code).split())
    assert many < 5 * max(2.0, one)
