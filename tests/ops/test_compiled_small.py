"""The feed-forward chain's and the smaller operators' kernels as they are compiled, from the committed reports."""

import pytest

from kit.compiled import REGISTERS_AN_SM, committed, reports_of

CHAIN = reports_of("ffn chain ")
STREAMS = "8192 rows ungated streams: "
WATCHER = CHAIN[f"{STREAMS}started_kernel"]
DEPENDENT = [
    "rms_norm", "add_rms_norm", "swiglu", "append_kv int8 bias norms pages scales", "append_kv 2048 rows",
    "linear 1 row", "linear 16 rows",
]  # fmt: skip
BLOCKS = {name: report for name, report in CHAIN.items() if report["kernel"] == "chain_kernel"}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_chains_products_run_on_tensor_cores_and_tiles_travel_by_tma(name: str) -> None:
    # A step of 64 along K is four instructions of 16, once for each warpgroup's code.
    assert BLOCKS[name]["HGMMA"] == 4 * (1 if name.startswith("16 rows") else 2)
    assert min(BLOCKS[name][word] for word in ("UTMALDG", "UTMASTG", "USETMAXREG")) > 0


def test_a_post_of_the_chain_comes_after_the_stores_have_been_written_and_fenced() -> None:
    # wait_group 0 (and what it invalidates), fence.proxy.async, release.
    expected = ["DEPBAR.LE SB0", "CCTL.IVALL", "MEMBAR.ALL.GPU", "FENCE.VIEW.ASYNC", "MEMBAR.ALL.GPU", "ATOMG"]
    order = BLOCKS["8192 rows"]["order"]
    assert order[-len(expected) :] == expected
    assert order[0] == "UTMASTG"


def test_the_watcher_fits_beside_a_block_of_the_chain() -> None:
    many = CHAIN[f"{STREAMS}chain_kernel"]
    left = REGISTERS_AN_SM - many["registers"] * many["threads"]
    assert -(-WATCHER["registers"] // 8) * 8 * WATCHER["threads"] <= left
    assert many["shared"] + WATCHER["shared"] + 2048 <= 228 * 1024


@pytest.mark.parametrize("name", DEPENDENT)
def test_nothing_but_a_request_of_the_cache_comes_before_the_wait_for_the_launch_before(name: str) -> None:
    words = committed()[f"{name} sm_90"]["memory"]
    before = words[: words.index("ACQBULK")]
    assert before == (["UBLKPF"] if name == "linear 1 row" else [])
    # Nobody leaves without having waited, and the next kernel is let in by this one's first blocks.
    assert words[len(before) + 1] == "PREEXIT"
    assert "STG" in words[len(before) :]


@pytest.mark.parametrize("name", DEPENDENT)
def test_older_devices_know_nothing_of_it(name: str) -> None:
    words = committed()[f"{name} sm_80"]["memory"]
    assert not {"ACQBULK", "PREEXIT", "UBLKPF"} & set(words)
    assert "STG" in words


def test_a_prompts_append_has_registers_for_all_its_heads_and_six_blocks_an_sm() -> None:
    assert committed()["append_kv 2048 rows sm_90"]["registers"] <= 80  # 48 KB under way


def test_the_conversion_to_float8_keeps_a_number_that_is_none() -> None:
    """It was once stored as -448, which the reference does not."""
    cast, *bounds = committed()["append_kv float8"]["conversions"]
    assert cast == "cvt.rn.satfinite.e4m3x2.f32"
    assert bounds
    assert all(".NaN" in bound for bound in bounds)


def test_two_blocks_of_the_search_for_a_token_fit_an_sm() -> None:
    assert committed()["sample top_k top_p: draw_limited_kernel"]["registers"] <= 128
