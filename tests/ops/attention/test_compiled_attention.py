"""Prefill attention's kernels as they are compiled for sm_80, sm_89 and sm_90, from the committed reports."""

from itertools import product
from typing import Any

import pytest

from kit.compiled import blocks_an_sm, reports_of
from onewave.ops.attention.mma.plan import mma_tile
from onewave.tiles.sim.banks import Swizzle, conflicts, copied_rows, matrices

PORTABLE, HOPPER = reports_of("attention triton "), reports_of("attention gluon ")
FLOAT8, MMA, RUNS = reports_of("attention fp8 "), reports_of("attention mma "), reports_of("run of mma ")
OURS = HOPPER | {f"fp8 {name}": report for name, report in FLOAT8.items()}
FP8_CAUSAL, FP8_PACKED = "fp8 D128 causal", "fp8 D128 causal window packed softcap lse"


@pytest.mark.parametrize("name", ["D128", "D128 causal", "D64 causal", "D80 causal packed lse"])
def test_on_hopper_the_portable_kernel_streams_keys_through_tma(name: str) -> None:
    assert PORTABLE[name]["UTMALDG"] > 0
    assert PORTABLE[name]["HGMMA"] + PORTABLE[name]["HMMA"] > 0


def test_on_ampere_the_portable_kernel_uses_tensor_cores() -> None:
    assert PORTABLE["D128 causal sm_80"]["UTMALDG"] == 0
    assert PORTABLE["D128 causal sm_80"]["HMMA"] > 0


@pytest.mark.parametrize(("name", "blocks"), [("D128", 2), ("D128 causal", 2), ("D64 causal", 3)])
def test_as_many_blocks_fit_an_sm_as_the_tiles_were_chosen_for(name: str, blocks: int) -> None:
    assert blocks_an_sm(PORTABLE[name]) >= blocks


def test_a_mask_does_not_change_the_order_in_which_a_row_is_summed() -> None:
    """A loaded mask once drew the scores out of the product's layout: the same keys summed to other bits."""
    assert all(layout.startswith("mma") for report in PORTABLE.values() for layout in report["sums"])
    assert PORTABLE["D64 bool mask"]["sums"] == PORTABLE["D64 causal"]["sums"]


def test_the_portable_kernels_exponents_are_made_in_one_way_in_whole_and_in_cut_tiles() -> None:
    assert PORTABLE["D128"]["exponents_of_sums"] < 16
    assert PORTABLE["D128 causal softcap"]["exponents_of_sums"] < 16
    below = PORTABLE["D128 causal scale below 0"]
    assert below["exponents_of_sums"] == below["MUFU.EX2"]


def test_hoppers_kernels_compile_to_asynchronous_products_and_tma() -> None:
    for name, report in OURS.items():
        products, others = ("QGMMA", "HGMMA") if name.startswith("fp8") else ("HGMMA", "QGMMA")
        assert min(report[word] for word in (products, "UTMALDG", "UTMASTG", "USETMAXREG")) > 0, name
        assert report[others] == 0, name


def test_hoppers_kernels_spill_few_words_where_they_spill_at_all() -> None:
    spills = {name: report["STL"] + report["LDL"] for name, report in OURS.items()}
    pages = {name for name in spills if name.startswith("D64 causal window packed pages of 16")}
    assert {name for name, count in spills.items() if count} <= {*pages, FP8_CAUSAL, FP8_PACKED, "D128 softcap"}
    assert spills["D128 softcap"] < 4
    assert max(spills[name] for name in pages) < 600
    assert max(spills[FP8_CAUSAL], spills[FP8_PACKED]) < 60


def test_products_run_beside_each_other_and_beside_exponentials() -> None:
    """Where ptxas cannot follow which are under way, it waits for each behind it: a quarter slower on an H200."""
    for name, report in OURS.items():
        assert report["WARPGROUP.DEPBAR"] * 3 < report["HGMMA"] + report["QGMMA"], name


def test_a_whole_step_waits_for_its_warpgroup_as_often_as_it_must() -> None:
    """Before its products and before the arrivals for K and V, and for its turn; one more costs 2 % of long rows."""
    assert all(report["barriers"] for report in HOPPER.values())
    assert max(barriers for report in HOPPER.values() for barriers in report["barriers"]) <= 4
    assert max(HOPPER["D64"]["barriers"] + HOPPER["D64 causal lse"]["barriers"]) == 3


def test_a_scores_exponent_is_one_multiply_add_in_every_loop() -> None:
    """Where one loop multiplies and then subtracts, a row's bits depend on which of them took its keys."""
    # The factors of sums are left: two rows a thread, a dozen places.
    assert max(report["exponents_of_sums"] for report in OURS.values()) < 64


def test_the_vote_is_one_barrier() -> None:
    """By reduction it goes through shared memory, more than once a tile."""
    assert {name for name, report in OURS.items() if not report["BAR.RED"]} == {FP8_CAUSAL, FP8_PACKED}


def test_warpgroups_run_one_copy_of_their_code() -> None:
    """One vote a copy, or a loop. With turns the loop of whole steps is there for each, and all else once, but where
    a table deals many tiles with a limit to the right, or with a softcap; with that three have a copy each."""
    turns, three = {name for name in HOPPER if name.startswith("D128")}, {"D64 causal softcap"}
    copies = {name: 2 if name in turns else 3 if name in three else 1 for name in HOPPER}
    assert {name: report["BAR.RED"] for name, report in HOPPER.items()} == copies
    split = {name for name in turns if HOPPER[name]["HGMMA"] < 100}
    assert turns - split == {"D128 causal", "D128 softcap"}
    # Two loops with the three barriers of a whole step that are no turn.
    assert {name for name, report in OURS.items() if report["own"]} == split
    assert {OURS[name]["own"] for name in split} == {6}
    # Nothing of a warpgroup's own lies where the others would put theirs.
    assert {name: report["scratch"] for name, report in OURS.items() if report["scratch"]} == {}
    # A wait for scores and one for values.
    assert OURS[FP8_CAUSAL]["WARPGROUP.DEPBAR"] == OURS[FP8_PACKED]["WARPGROUP.DEPBAR"] == 2


def test_weights_in_float8_come_from_no_exponential_and_are_put_together_once() -> None:
    """A thread has 64 of a step's: four are put into a word, two are added at a time as float16."""
    assert OURS[FP8_CAUSAL]["PRMT"] == 64 // 4
    assert OURS[FP8_CAUSAL]["MUFU.EX2"] <= 4
    assert OURS[FP8_CAUSAL]["HADD2"] <= 64 // 2 + 4
    # Where the LSE is asked for they are exponentials, which are not taken apart and put together.
    assert OURS[FP8_PACKED]["PRMT"] == 0
    assert OURS[FP8_PACKED]["MUFU.EX2"] > 64


def test_one_block_fills_an_sm_where_the_portable_kernel_shares_it() -> None:
    assert {blocks_an_sm(report) for report in OURS.values()} == {1}
    assert blocks_an_sm(PORTABLE["D128"]) == 2


def tile(name: str) -> Any:
    head_dim, width = name.split()[:2]
    return mma_tile(int(head_dim.removeprefix("D")), narrow=width == "narrow")


@pytest.mark.parametrize("name", MMA)
def test_no_kernel_of_few_registers_exceeds_its_tiles(name: str) -> None:
    assert MMA[name]["registers"] <= tile(name).registers


@pytest.mark.parametrize("name", MMA)
def test_the_products_are_m16n8k16_on_operands_from_ldmatrix_and_movmatrix(name: str) -> None:
    used, report = tile(name), MMA[name]
    columns = used.queries // used.warps // 8
    steps = (used.keys // 16) * (used.width // 16) * columns
    # Both products of a tile once in the code, and nothing computed twice.
    assert report["HMMA.16816.F32"] == report["products"] == 2 * steps
    # An operand of K and of V is loaded once for all of a warp's queries, four matrices at a time.
    assert report["LDSM.16.M88.4"] == report["LDSM.16.MT88.4"] == steps // columns
    # P, block by block, and the output.
    assert report["MOVM"] == (used.keys + used.width) // 8 * columns


@pytest.mark.parametrize("name", MMA)
def test_maxima_and_sums_are_butterflies_over_the_eight_lane_groups(name: str) -> None:
    # Three steps for each of a thread's queries, two a column of blocks: the max in the loop, the sum after it.
    queries = tile(name).queries // tile(name).warps // 4
    assert MMA[name]["shuffles"] == dict.fromkeys(("16", "8", "4"), 2 * queries)


@pytest.mark.parametrize("name", MMA)
def test_keys_and_values_come_by_cp_async_and_scores_never_touch_shared_memory(name: str) -> None:
    used, report = tile(name), MMA[name]
    # 16 bytes a thread, before the loop and in it.
    assert report["LDGSTS"] == 4 * used.keys * used.width // 8 // report["threads"]
    assert report["shared"] == used.shared_bytes
    # All that is stored there is the output: by stmatrix on sm_90, else word by word.
    assert report["stored_words"] == used.queries * used.width // 2 // report["threads"]


@pytest.mark.parametrize(("sm", "options"), [*product((80, 90), ("causal", "everything"))])
def test_at_head_dim_128_k_takes_at_most_12_kib_and_five_blocks_share_an_sm(sm: int, options: str) -> None:
    assert blocks_an_sm(MMA[f"D128 wide {options} sm_{sm}"]) == 3
    assert blocks_an_sm(MMA[f"D128 narrow {options} sm_{sm}"]) == 5
    # Q goes from device memory to registers.
    assert MMA[f"D128 narrow {options} sm_{sm}"]["shared"] // 2 <= 12 << 10


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("narrow", [False, True])
def test_the_layout_tool_finds_no_conflict_in_any_access_to_any_place_of_the_tiles(head_dim: int, narrow: bool) -> None:
    """Exhaustively; that the compiled kernel makes these accesses and no others, its runs show."""
    used = mma_tile(head_dim, narrow=narrow)
    line = max(1, 64 // used.width)
    swizzled = Swizzle(used.width, vec=8, per_phase=line, max_phase=8 // line)
    rows = max(2 * used.keys, used.queries)
    # Operands of both products (.trans reads the same rows), and the output's matrices.
    assert {conflicts(found, 16) for found in matrices(swizzled, rows)} == {0}
    # cp.async in and the output out: lanes along rows, 16 bytes each.
    assert {conflicts(found, 16) for found in copied_rows(swizzled, rows, width=16)} == {0}
    # The output on sm_80: an 8 x 8 block a warp, 4 bytes a lane.
    for first, column in product(range(0, used.queries, 8), range(0, used.width, 8)):
        lanes = [swizzled.offset(first + lane // 4, column + lane % 4 * 2) for lane in range(32)]
        assert conflicts(lanes, 4) == 0
    # Without the swizzle the operands would conflict.
    plain = Swizzle(used.width, max_phase=1)
    assert min(conflicts(found, 16) for found in matrices(plain, rows)) == 8 // line - 1


@pytest.mark.parametrize("name", RUNS)
def test_what_is_compiled_agrees_with_float64_without_a_race_a_stray_access_or_a_conflict(name: str) -> None:
    report = RUNS[name]
    assert report["agrees"]
    assert report["strange"] == []
    assert report["whole"]
    assert {"ldmatrix", "ld"} <= set(report["kinds"])
    assert {"st", "stmatrix"} & set(report["kinds"])


def test_a_rows_bits_do_not_depend_on_how_many_queries_a_tile_has() -> None:
    narrow, wide = RUNS["128 sm_90"], RUNS["128 sm_90 wide"]
    assert narrow["registers"] <= 96 < wide["registers"]
    assert narrow["queries"] < wide["queries"]
    assert narrow["bits"] == wide["bits"]


def test_without_any_one_of_its_barriers_or_waits_a_run_finds_a_race() -> None:
    """That the runs found none means something."""
    assert RUNS["128 sm_90"]["unguarded"]["guards"] >= 6
    assert RUNS["128 sm_90"]["unguarded"]["unnoticed"] == []
