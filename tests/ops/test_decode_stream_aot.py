"""Hopper's decode kernel compiled for sm_90 without a card: registers, copies by TMA, barriers a tile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from decode_stream_aot import CASES

# Of an SM, with 1 KiB beside each program.
SHARED = 228 * 1024


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("decode_stream_aot.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["name"]: line for line in lines}


def guesses(name: str) -> bool:
    """Whether the loader asks for its first tiles by the lengths of before the wait."""
    return "pages" not in name and "mmha" not in name


@pytest.mark.parametrize("name", CASES)
def test_it_compiles_without_spilling(name: str, reports: dict[str, Any]) -> None:
    report = reports[name]
    assert report["stack"] == 0
    assert report["registers"] <= 128
    assert report["shared"] + 1024 <= SHARED
    assert report["products"] > 0
    assert report["early"] == []
    assert report["lost"] == report["endless"] == []
    assert report["marked"] == report["copies"] > 0  # keys and values are read once


@pytest.mark.parametrize("name", CASES)
def test_nothing_but_what_to_ask_for_is_read_before_the_wait(name: str, reports: dict[str, Any]) -> None:
    # Of several rows all lengths, and then the first row's; whether they are finished as well.
    loads = (1 if "one row" in name else 2) * (2 if CASES[name].get("HAS_FINISHED") else 1)
    workers, loader = reports[name]["unwaited"]
    assert workers.pop("prefetch", 0) == (0 if "pages" in name else 2)
    assert workers == ({"cg": loads} if "one row" in name or "pages" not in name else {})
    assert loader == ({"cg": loads} if "one row" in name or guesses(name) else {})


@pytest.mark.parametrize("name", CASES)
def test_the_loader_takes_all_it_counts_from_row_to_row(name: str, reports: dict[str, Any]) -> None:
    # Slot, phase, the pair behind, tiles asked for, and where the row begins in the list: Triton 3.6 drops a value that
    # reaches nothing but an inner loop's bounds (docs/log/compilers.md), and all rows but the first read other keys.
    # And how many tiles were guessed. With a single row there is no such loop.
    assert reports[name]["carried"] == (0 if "one row" in name else 7 if guesses(name) else 6)


@pytest.mark.parametrize("name", [name for name in CASES if guesses(name)])
def test_guessed_tiles_are_asked_for_right_behind_the_wait(name: str, reports: dict[str, Any]) -> None:
    # ptxas had put what says which they are there, too: 100 to 180 instructions, most of them one after another.
    assert reports[name]["prompt"] < 60


@pytest.mark.parametrize("name", ["one row", "mmha, one row"])
def test_with_few_keys_the_next_launch_begins_beside_this_one(name: str, reports: dict[str, Any]) -> None:
    assert 2 * (reports[name]["shared"] + 1024) <= SHARED


def test_keys_and_values_come_by_tma(reports: dict[str, Any]) -> None:
    # A copy for every 64 columns of keys and of values, and as many for each of the two tiles that are guessed; pages
    # of 16 keys: 4 times as many.
    assert reports["batch"]["copies"] == 3 * 4
    assert reports["D64"]["copies"] == 3 * 2
    assert reports["mmha"]["copies"] == 4
    assert reports["pages of 16"]["copies"] == 16


def test_a_tile_costs_three_barriers(reports: dict[str, Any]) -> None:
    # One for the maxima, one for the weights, and one that Triton puts after a slot is let go.
    assert reports["batch"]["barriers"] == 3
