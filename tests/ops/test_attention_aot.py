"""The attention kernel compiled for sm_80 and sm_90 without a card: registers, tensor cores, TMA, the order of sums."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("attention_aot.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", ["sm_90 128", "sm_90 128 causal", "sm_90 64 causal", "sm_90 80 packed"])
def test_on_hopper_it_streams_keys_through_tma_without_spilling(name: str, reports: dict[str, Any]) -> None:
    assert reports[name]["stack"] == 0
    assert reports[name]["tma"] > 0
    assert reports[name]["products"] > 0


def test_on_ampere_it_uses_tensor_cores_without_spilling(reports: dict[str, Any]) -> None:
    assert reports["sm_80 128 causal"]["stack"] == 0
    assert reports["sm_80 128 causal"]["tma"] == 0
    assert reports["sm_80 128 causal"]["products"] > 0


@pytest.mark.parametrize(("name", "programs"), [("sm_90 128 causal", 2), ("sm_90 64 causal", 3)])
def test_as_many_programs_fit_an_sm_as_the_tiles_were_chosen_for(
    name: str, programs: int, reports: dict[str, Any]
) -> None:
    # 228 KiB and 65,536 registers an SM; a program takes 1 KiB beside its own and registers in eights for 128 threads.
    assert programs * (reports[name]["shared"] + 1024) <= 228 * 1024
    assert programs * 128 * -(-reports[name]["registers"] // 8) * 8 <= 65536


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("sm_90 128 causal", 227),
        ("sm_90 256 bool mask", 227),
        ("sm_90 256 bfloat16 bias", 227),
        ("sm_90 256 float bias", 227),
        ("sm_90 256 float bias, pointers", 227),
        ("sm_80 128 causal", 163),
        ("sm_89 64 float bias", 99),
    ],
)
def test_a_program_fits_the_cards_shared_memory(name: str, allowed: int, reports: dict[str, Any]) -> None:
    """A float32 bias once took more than there is from 136 columns on: it is copied ahead, too."""
    assert reports[name]["shared"] <= allowed * 1024


def test_a_mask_does_not_change_the_order_in_which_a_row_is_summed(reports: dict[str, Any]) -> None:
    """A loaded mask once drew the scores out of the product's layout: the same keys summed to other bits."""
    assert all(layout.startswith("mma") for report in reports.values() for layout in report["sums"])
    assert reports["sm_90 64 bool mask"]["sums"] == reports["sm_90 64 causal"]["sums"]
