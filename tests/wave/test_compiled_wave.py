"""The wave's kernel as it is compiled for sm_90, from the committed reports: every shape of tile, both hand-offs, all
formats of weights, attention at each head_dim and group size, plain caches and pages, the test build, the trace."""

import re

import pytest

from kit.compiled import blocks_an_sm, committed, reports_of

STEPS, BLOCKS, PACKING = reports_of("wave step "), reports_of("wave block "), reports_of("wave packing ")
WAVE = {name: report for name, report in {**STEPS, **BLOCKS}.items() if report["kernel"] == "wave_kernel"}
RUNS = {
    name: report
    for name, report in committed().items()
    if name.startswith(("run of attend ", "run of combine ", "run of merge "))
}
# 16 warps (rounded up from 4 + 8 + 1) share 65,536 registers when the kernel starts; with a second partition that
# multiplies 20 do.
REGISTERS_AT_START, REGISTERS_OF_TWO = 128, 96
# int8 weights for one sequence, and of four bits those without float16 minima for up to four.
BY_DIGITS = {
    name for name in WAVE if re.search(r"\b(1 row int8|[124] rows? (int4|q4_k_m))", name) and "minima" not in name
}


def in_16_bits(name: str) -> bool:
    weights = name.replace("int8 cache", "").replace("fp8 cache", "")
    return not any(word in weights for word in ("int4", "q4_k_m", "int8", "fp8", "compact"))


@pytest.mark.parametrize("name", WAVE)
def test_the_warps_of_every_kernel_of_the_wave_find_registers_when_it_starts(name: str) -> None:
    two = name.startswith("32 rows") and "compact" in name
    assert WAVE[name]["registers"] <= (REGISTERS_OF_TWO if two else REGISTERS_AT_START)


def test_nothing_of_the_launch_before_is_read_before_the_wait_for_it() -> None:
    assert {name: report["unwaited"] for name, report in WAVE.items() if report["unwaited"]} == {}


@pytest.mark.parametrize("name", WAVE)
def test_no_barrier_of_tritons_stands_between_a_products_end_and_whoever_waits_for_it(name: str) -> None:
    # Before the poll, where it costs nothing, and nowhere behind it.
    allowed = "load_merged: mbarrier.wait(activations.empty"
    assert [place for place in WAVE[name]["unwritten"] if not place.startswith(allowed)] == []


@pytest.mark.parametrize("name", WAVE)
def test_weights_are_read_once_and_records_and_keys_more_often(name: str) -> None:
    assert WAVE[name]["marked"] == ["request_tile"]
    assert "request_tile" not in WAVE[name]["unmarked"]


@pytest.mark.parametrize("name", WAVE)
def test_neighbouring_words_are_stored_together(name: str) -> None:
    # Slices' sums and the residual stream by fours, hidden values by twos.
    assert not {"finish_blocks", "reduce_pieces"} & {*WAVE[name]["alone"]}
    assert ("put" in WAVE[name]["alone"]) == ("ungated" not in name)


@pytest.mark.parametrize("name", WAVE)
def test_weights_come_by_tma_and_are_multiplied_by_tensor_cores(name: str) -> None:
    report = WAVE[name]
    # One-byte and compact weights become numbers in registers, and int8 and 4-bit ones beside few sequences are bytes,
    # multiplied by mma.sync, beside attention's own.
    if in_16_bits(name):
        assert report["HGMMA"] > 0
    else:
        assert report["HGMMA"] == 0
        if name in BY_DIGITS:
            assert report["HMMA"] + 2 * report["IMMA"] > 32  # a product of bytes has twice the columns
        else:
            assert report["HMMA"] > 32
        assert (report["IMMA"] > 0) == (name in BY_DIGITS)
        assert report["LDSM"] > 0
    assert report["UTMALDG"] > 0
    # The partitions really trade registers.
    assert report["USETMAXREG"] > 0


@pytest.mark.parametrize("name", [name for name in PACKING if "compact" in name])
def test_what_packs_compact_weights_leaves_room_for_others_and_flushes_nothing(name: str) -> None:
    report = PACKING[name]
    # Two blocks of 512 threads an SM; of 256 threads, where a gain is multiplied in, three.
    assert report["registers"] <= (80 if report["threads"] < 512 else 64)
    assert blocks_an_sm(report) >= (3 if report["threads"] < 512 else 2)
    # Subnormal numbers are not flushed to zero: weights become such on their way.
    assert report["flushed"] == 0


def test_what_packs_weights_without_a_gain_takes_no_more_registers_than_two_blocks_of_512_threads_have() -> None:
    assert PACKING["360M compact: _pack_kernel #2"]["registers"] <= 64
    assert PACKING["360M compact: _unpack_kernel"]["registers"] <= 64


def test_what_packs_compact_weights_moves_sixteen_bytes_at_a_time() -> None:
    def wide(name: str) -> list[int]:
        return [PACKING[name][word] for word in ("LDG.E.128", "STG.E.128")]

    assert wide("1B compact: _bases_kernel #3") == [4, 0]
    assert wide("360M compact: _pack_kernel #2") == [4, 3]
    assert wide("360M compact: _unpack_kernel") == [3, 4]
    assert wide("1B compact: _pack_kernel #3") == [8, 3]
    assert wide("1B compact: _unpack_kernel #2") == [3, 4]


@pytest.mark.parametrize("name", RUNS)
def test_what_is_compiled_of_attention_agrees_with_plain_numbers(name: str) -> None:
    assert RUNS[name]["agrees"] is True
