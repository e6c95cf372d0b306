"""The kernel for many rows compiles for sm_90, without a card and without a spill, to what it is meant to be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED_BYTES = 227 * 1024
REGISTER_FILE = 65_536


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).parent / "ffn_chain_aot.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["name"]: line for line in lines}


def test_no_build_spills_and_all_fit_a_multiprocessor(reports: dict[str, dict[str, Any]]) -> None:
    assert len(reports) == 7
    for name, found in reports.items():
        assert found["stack"] == found["STL"] == found["LDL"] == 0, f"{name} spills: {found}"
        assert found["shared"] <= SHARED_BYTES, name
        assert found["early"] == [], name
        assert found["lost"] == found["endless"] == [], name
        # Registers come in lots of 8 a thread.
        assert -(-found["registers"] // 8) * 8 * found["threads"] <= REGISTER_FILE, name


def test_products_run_on_tensor_cores_and_tiles_travel_by_tma(reports: dict[str, dict[str, Any]]) -> None:
    for name, found in reports.items():
        if name == "watcher":
            continue
        tile_products = 1 if name.startswith("few") else 2
        # A step of 64 along K is four instructions of 16, once for each warpgroup's code.
        assert found["HGMMA"] == 4 * tile_products, name
        assert found["UTMALDG"] > 0, name
        assert found["UTMASTG"] > 0, name
        assert found["USETMAXREG"] > 0, name


def test_a_post_comes_after_the_stores_have_been_written_and_fenced(reports: dict[str, dict[str, Any]]) -> None:
    order = reports["many rows"]["order"]
    post = len(order) - 1 - order[::-1].index("ATOMG")
    stored = len(order) - 1 - order[::-1].index("UTMASTG")
    assert stored < post
    # wait_group 0 (and what it invalidates), fence.proxy.async, release.
    expected = ["DEPBAR.LE SB0", "CCTL.IVALL", "MEMBAR.ALL.GPU", "FENCE.VIEW.ASYNC", "MEMBAR.ALL.GPU", "ATOMG"]
    assert order[post - len(expected) + 1 : post + 1] == expected


def test_the_watcher_fits_beside_a_block_of_the_kernel(reports: dict[str, dict[str, Any]]) -> None:
    watcher, many = reports["watcher"], reports["many rows, ungated, marked"]
    left = REGISTER_FILE - many["registers"] * many["threads"]
    assert -(-watcher["registers"] // 8) * 8 * watcher["threads"] <= left
    assert many["shared"] + watcher["shared"] + 2048 <= 228 * 1024
