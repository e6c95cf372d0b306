"""The split-KV kernel compiled for sm_80 and sm_90 without a card: registers, tensor cores, asynchronous copies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from decode_attention_aot import CASES

# Of 227 KiB: what a program may have on the cards that it compiles for.
SHARED = {"sm_90": 227 * 1024, "sm_80": 163 * 1024}
# A few registers of the prologue and epilogue, outside the loop over the keys, may go to the stack.
FEW_SPILLED = 32
SPILLED = {
    "sm_90 eight queries, int8": 320, "sm_90 eight queries, D120, pages": 128, "sm_90 mmha D64, float16 mask": 96,
}  # fmt: skip


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("decode_attention_aot.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", CASES)
def test_it_compiles_for_the_card_with_tensor_cores_and_copies_ahead(name: str, reports: dict[str, Any]) -> None:
    report = reports[name]
    assert report["products"] > 0
    assert (report["copies"] > 0) == ("rows anywhere" not in name)
    assert report["shared"] <= SHARED[name.split()[0]]
    assert report["stack"] <= SPILLED.get(name, FEW_SPILLED)


@pytest.mark.parametrize("name", CASES)
def test_nothing_touches_memory_before_the_wait_for_the_launch_before(name: str, reports: dict[str, Any]) -> None:
    assert reports[name]["unwaited"] == ([] if name.startswith("sm_90") else None)


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_read_that_was_not_written(name: str, reports: dict[str, Any]) -> None:
    assert reports[name]["unset"] == []


@pytest.mark.parametrize("name", CASES)
def test_keys_are_summed_in_the_products_layout_as_hoppers_kernel_does(name: str, reports: dict[str, Any]) -> None:
    """A 16-bit mask once drew them out of it: the same keys summed to other bits than stream_impl's."""
    assert reports[name]["sums"] == ["mma"]


@pytest.mark.parametrize(
    "name",
    [
        "sm_90 one row", "sm_90 one row, mmha", "sm_90 batch", "sm_90 D64", "sm_90 D256", "sm_80 batch",
        *[name for name in CASES if "rows anywhere" in name],
    ],
)  # fmt: skip
def test_plain_decoding_does_not_spill(name: str, reports: dict[str, Any]) -> None:
    assert reports[name]["stack"] == 0


@pytest.mark.parametrize(("name", "loads"), [("sm_90 one row", 1), ("sm_90 one row, mmha", 7)])
def test_one_rows_query_is_asked_for_before_its_length(name: str, loads: int, reports: dict[str, Any]) -> None:
    # The length is loaded after the first barrier; before it come the query and, with mmha, the new key, what both turn
    # with, cosines, sines and the new value, each in one load of neighbours.
    assert reports[name]["asked_first"] >= loads


@pytest.mark.parametrize("name", ["sm_90 one row", "sm_90 one row, mmha", "sm_90 batch", "sm_90 D64"])
def test_nearly_all_partials_are_asked_for_before_the_first_is_folded(name: str, reports: dict[str, Any]) -> None:
    # Three loads or four for each of 16 partials; what comes after the first maximum waits for memory once more.
    assert reports[name]["merged_at_once"] >= 40


def test_only_where_a_program_may_have_several_rows_is_one_asked_for_ahead(reports: dict[str, Any]) -> None:
    asked = {name for name, report in reports.items() if report["asked_ahead"]}
    assert {"sm_90 batch", "sm_90 D64", "sm_90 mmha", "sm_90 int8"} <= asked
    assert not asked & {"sm_90 one row", "sm_90 one row, mmha", "sm_90 eight queries", "sm_90 many rows", "sm_80 batch"}


def test_many_splits_of_few_heads_compile_as_fast_as_others(reports: dict[str, Any]) -> None:
    # Triton took minutes where 128 partials stood in the code by themselves.
    assert reports["sm_90 one head, D64"]["seconds"] < 5 * max(2.0, reports["sm_90 one row"]["seconds"])
