"""Every variant of the wave kernel that a plan asks for compiles for sm_90, without a GPU and without a spill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Together they hold every tile shape, both hand-offs, both dtypes, the test build, the trace, and attention at each
# head_dim and group size.
VARIANTS = {
    "one row, ungated": {"batch": 1, "GATED": False},
    "one row, float16, gelu": {"batch": 1, "dtype": "fp16", "ACT": 2},
    "two rows, counters": {"batch": 2, "SYNC": 1},
    "four rows, two slices": {"batch": 4, "SPLITS": 2, "GATED": False},
    "eight rows, four slices": {"batch": 8, "SPLITS": 4},
    "eight rows, four slices, counters": {"batch": 8, "SPLITS": 4, "SYNC": 1},
    "sixteen rows, eight slices": {"batch": 16, "SPLITS": 8},
    "thirty-two rows, sixteen slices, delays, trace": {"batch": 32, "SPLITS": 16, "TEST": 2, "TRACE": True},
    "sixty-four rows, thirty-two slices": {"batch": 64, "SPLITS": 32},
    "a decode step, head_dim 64": {"batch": 1, "D": 64, "GP": 4, "KSPLITS": 16, "FEW": 4},
    "a decode step, head_dim 128": {"batch": 1, "D": 128, "GP": 4, "KSPLITS": 16, "FEW": 8},
    "a decode step, head_dim 128, eight rows": {"batch": 8, "SPLITS": 4, "D": 128, "GP": 4, "CH": 2, "KSPLITS": 2},
    "a decode step, head_dim 128, eight rows, whole sums": {"batch": 8, "D": 128, "GP": 4, "CH": 2, "KSPLITS": 2},
    "a decode step from pages, head_dim 128, eight rows": {
        "batch": 8,
        "D": 128,
        "GP": 4,
        "CH": 2,
        "KSPLITS": 2,
        "PAGE": 16,
    },
    "a decode step, sixteen rows, norms": {"batch": 16, "D": 64, "GP": 4, "CH": 4, "SPLITS": 2, "QKNORM": True},
    "a decode step, head_dim 128, sixteen rows": {"batch": 16, "D": 128, "GP": 4, "CH": 4},
    "a decode step, two rows": {"batch": 2, "D": 64, "GP": 4, "KSPLITS": 8},
    "a decode step, head_dim 128, two rows": {"batch": 2, "D": 128, "GP": 4, "KSPLITS": 8},
    "a decode step, four rows": {"batch": 4, "D": 64, "GP": 4, "KSPLITS": 4},
    "a decode step, eight rows": {"batch": 8, "D": 64, "GP": 4, "CH": 2, "KSPLITS": 2},
    "a decode step, eight heads a group": {"batch": 1, "D": 64, "GP": 8, "KSPLITS": 16},
    "a decode step, one head a group, traced": {"batch": 2, "D": 64, "GP": 1, "KSPLITS": 4, "TRACE": True},
    "a decode step, head_dim 32": {"batch": 1, "D": 32, "GP": 2, "KSPLITS": 8},
    "a decode step from pages, head_dim 64": {"batch": 1, "D": 64, "GP": 4, "KSPLITS": 16, "FEW": 4, "PAGE": 16},
    "a decode step from pages, head_dim 128, one row": {
        "batch": 1,
        "D": 128,
        "GP": 4,
        "KSPLITS": 16,
        "FEW": 8,
        "PAGE": 64,
    },
    "a decode step from pages, head_dim 128": {"batch": 8, "SPLITS": 4, "D": 128, "GP": 4, "CH": 2, "PAGE": 256},
    "int8, head_dim 64": {"batch": 1, "D": 64, "GP": 4, "KSPLITS": 16, "FEW": 4, "FORMAT": 1},
    "fp8, small tiles, float16": {"batch": 1, "D": 64, "GP": 4, "FORMAT": 2, "IMAGES": 1, "dtype": "fp16"},
    "int8, two rows": {"batch": 2, "D": 64, "GP": 4, "KSPLITS": 8, "FORMAT": 1},
    "int8, eight rows": {"batch": 8, "SPLITS": 4, "D": 128, "GP": 4, "CH": 2, "KSPLITS": 2, "FORMAT": 1},
    "fp8, sixteen rows": {"batch": 16, "D": 64, "GP": 4, "CH": 4, "SPLITS": 2, "QKNORM": True, "FORMAT": 2},
} | {
    f"compact, {name}": variant | {"FORMAT": 3}
    for name, variant in {
        "the block, eight rows": {"batch": 8},
        "the block, sixteen rows": {"batch": 16, "R": 64, "SPLITS": 2},
        "the block, 32 rows": {"batch": 32, "SPLITS": 4},
        "the block, 32 rows, ungated": {"batch": 32, "SPLITS": 4, "GATED": False},
        "head_dim 64": {"batch": 1, "D": 64, "GP": 4, "KSPLITS": 16, "FEW": 4},
        "head_dim 128": {"batch": 1, "D": 128, "GP": 4, "KSPLITS": 16, "FEW": 8},
        "small tiles": {"batch": 1, "D": 64, "GP": 4, "KSPLITS": 16, "FEW": 4, "IMAGES": 1},
        "small tiles, head_dim 128": {"batch": 1, "D": 128, "GP": 4, "KSPLITS": 16, "FEW": 8, "IMAGES": 1},
        "two rows": {"batch": 2, "D": 64, "GP": 4, "KSPLITS": 8},
        "two rows, small tiles, head_dim 128": {"batch": 2, "D": 128, "GP": 4, "KSPLITS": 8, "IMAGES": 1},
        "four rows, head_dim 128": {"batch": 4, "D": 128, "GP": 4, "KSPLITS": 4},
        "eight rows, small tiles": {"batch": 8, "D": 64, "GP": 4, "CH": 2, "KSPLITS": 2, "IMAGES": 1},
        "eight rows, head_dim 128": {"batch": 8, "D": 128, "GP": 4, "CH": 2, "KSPLITS": 2},
        "eight rows, head_dim 128, slices": {"batch": 8, "SPLITS": 4, "D": 128, "GP": 4, "CH": 2, "KSPLITS": 2},
        "sixteen rows": {"batch": 16, "D": 64, "GP": 4, "CH": 4, "SPLITS": 2, "QKNORM": True},
        "sixteen rows, small tiles, head_dim 128": {"batch": 16, "D": 128, "GP": 4, "CH": 4, "IMAGES": 1},
        "from pages": {"batch": 1, "D": 128, "GP": 4, "KSPLITS": 16, "FEW": 8, "PAGE": 64},
        "from pages, eight rows": {"batch": 8, "D": 64, "GP": 4, "CH": 2, "KSPLITS": 2, "PAGE": 16},
    }.items()
}
# 16 warps (rounded up from 4 + 8 + 1) share 65,536 registers when the kernel starts; with a second partition that
# multiplies 20 do.
REGISTERS_AT_START, REGISTERS_OF_TWO = 128, 96
SHARED_BYTES = 227 * 1024


# So many compile in the time that a test has on a slow machine.
AT_A_TIME = 8


def groups() -> Iterator[tuple[str, ...]]:
    """Names of variants that are compiled together."""
    for formats in ((0,), (1, 2), (3,)):
        names = [name for name, variant in VARIANTS.items() if variant.get("FORMAT", 0) in formats]
        yield from (tuple(names[first : first + AT_A_TIME]) for first in range(0, len(names), AT_A_TIME))


@pytest.mark.parametrize("names", [*groups()], ids=lambda names: names[0])
def test_every_variant_compiles_without_a_spill_and_uses_tensor_cores_and_bulk_copies(names: tuple[str, ...]) -> None:
    variants = {name: VARIANTS[name] for name in names}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "aot_report.py"
    command = [sys.executable, str(script), json.dumps(list(variants.values()))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == len(variants)
    for name, report in zip(variants, reports, strict=True):
        assert report["stack"] == 0, f"{name} spills: {report}"
        assert report["registers"] <= (REGISTERS_OF_TWO if "the block, 32 rows" in name else REGISTERS_AT_START), name
        assert report["shared"] <= SHARED_BYTES, name
        assert not report["torn"], f"{name}: {report['torn']}"
        assert not report["lost"], f"{name}: {report['lost']}"
        assert not report["endless"], f"{name}: {report['endless']}"
        assert not report["unwaited"], f"{name}: {report['unwaited']}"
        assert not report["early"], f"{name}: {report['early']}"
        # Before the poll, where it costs nothing, and nowhere behind it.
        held_up = [place for place in report["unwritten"] if not place.startswith("load_merged: mbarrier.wait(xempty")]
        assert not held_up, f"{name}: {held_up}"
        # Weights are read once, records and keys more often.
        assert report["marked"] == ["request_tile"], name
        assert "request_tile" not in report["unmarked"], name
        # Neighbouring words are stored together: slices' sums and the residual stream by fours, hidden values by twos.
        assert not {"finish_blocks", "reduce_pieces"} & {*report["alone"]}, name
        assert ("put" in report["alone"]) == variants[name].get("GATED", True), name
        # One-byte and compact weights become numbers in registers, multiplied by mma.sync, beside attention's own.
        if "FORMAT" in variants[name]:
            assert report["HGMMA"] == 0, name
            assert report["HMMA"] > 32, name
            assert report["LDSM"] > 0, name
        else:
            assert report["HGMMA"] > 0, name
        assert report["UTMALDG"] > 0, name
        # The partitions really trade registers.
        assert report["USETMAXREG"] > 0, name
