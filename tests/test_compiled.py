"""The committed reports are of today's kernels: nothing is compiled here, and a changed kernel is found."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from kit.analysers.wave_source import HURRIED
from kit.compiled import FILE, REGISTERS_AN_SM, SHARED_A_BLOCK, committed, stale
from kit.processes import python

TESTS = Path(__file__).parent
SOURCES = TESTS.parent / "src" / "onewave"
SIZE = 1 << 20


LOOKS = """
import json
from kit.compiled import kernels, keys
from kit.source_digest import called_by, digest_of_function, forget

found = {"keys": keys(), "statement": [], "comment": [], "functions": [], "all": 0}
for kernel in kernels():
    before = digest_of_function(kernel)
    for function in called_by(kernel):
        name = f"{kernel.__name__}: {function.__module__}.{function.__qualname__}"
        found["functions"].append(f"{function.__module__}.{function.__qualname__}")
        text = function.src.rstrip()
        for kind, change in (("statement", chr(10) + "    0 + 1"), ("comment", "  # why")):
            function._src = text + change
            forget(function)
            if digest_of_function(kernel) != before:
                found[kind].append(name)
        function._src = text
        forget(function)
        assert digest_of_function(kernel) == before, name
        found["all"] += 1
print(json.dumps(found))
"""


@pytest.fixture(scope="session")
def looked_at(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Today's keys, and which changes of a function's own text changed the digest of a kernel that calls it."""
    # Once for all of pytest's processes.
    kept = tmp_path_factory.getbasetemp().parent / "looked_at.json"
    with (kept.with_suffix(".lock")).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists() or not os.environ.get("PYTEST_XDIST_WORKER"):
            kept.write_text(python("-c", LOOKS))
        return json.loads(kept.read_text())


def test_every_report_is_of_todays_kernels(looked_at: dict[str, Any]) -> None:
    found = stale(looked_at["keys"], committed())
    assert not found, f"{', '.join(found)}: stale; run make compiled"


def test_a_key_that_is_missing_left_over_or_another_is_stale() -> None:
    reports = {"a": {"key": "1"}, "b": {"key": "2"}, "c": {"key": "3"}}
    assert stale({"a": "1", "b": "4", "d": "5"}, reports) == ["b", "c", "d"]


def test_the_file_is_sorted_has_a_line_a_case_and_names_no_place() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert len(text) < SIZE
    assert list(json.loads(text)) == sorted(json.loads(text))
    assert len(text.splitlines()) == len(committed()) + 2
    assert not re.search(r"/\w+/|\.py\b", text)


def test_every_block_of_every_kernel_fits_the_device_it_is_for() -> None:
    """A float32 bias once took more shared memory than there is from 136 columns on: it is copied ahead, too."""
    for case, report in committed().items():
        assert report["shared"] <= SHARED_A_BLOCK[report["sm"]], case
        # Registers come in lots of 8 a thread.
        assert -(-report["registers"] // 8) * 8 * report["threads"] <= REGISTERS_AN_SM, case


# Bytes of stack. Triton's kernels may take a few outside their loops, or where operands are as wide as they come;
# Hopper's have a frame of 32 that nothing is stored in, and with a softcap or in float8 one word or a few.
MAY_SPILL = {
    "attention fp8 D128 causal": 24, "attention fp8 D128 causal window packed softcap lse": 8,
    "attention gluon D64": 32, "attention gluon D128": 32, "attention gluon D128 causal few tiles": 32,
    "attention gluon D256": 32, "attention gluon D128 softcap": 40, "attention triton D256 bf16 bias": 648,
    "attention triton D256 bool mask": 496, "attention triton D256 fp32 bias": 816,
    "attention triton D256 fp32 bias odd": 1616, "attention triton D64 bool mask": 32,
    "attention triton D64 fp32 bias sm_89": 552, "decode triton 16 rows 5 queries D40": 32,
    "decode triton 16 rows 8 queries": 32, "decode triton 16 rows 8 queries D120 pages of 16": 128,
    "decode triton 16 rows 8 queries int8": 320, "decode triton 16 rows mmha fp32 mask int8 out": 32,
}  # fmt: skip


def test_no_kernel_spills_but_those_that_may() -> None:
    spilled = {case: report for case, report in committed().items() if report["stack"] + report["STL"] + report["LDL"]}
    assert {case: each["stack"] for case, each in spilled.items() if each["stack"] > MAY_SPILL.get(case, -1)} == {}


@pytest.mark.parametrize(
    "finding",
    [
        "early",  # arrivals before what they announce
        "lost",  # buffers that nobody reads
        "endless",  # loops whose condition never changes
        "torn",  # reductions through shared memory that another partition uses
        "unset",  # registers that only another branch has set: ptxas 12.8 made such a kernel of head_dim 64
    ],
)
def test_analysers_find_nothing_in_any_kernel(finding: str) -> None:
    looked_at = {case: report[finding] for case, report in committed().items() if finding in report}
    assert len(looked_at) > 40
    assert {case: found for case, found in looked_at.items() if found} == {}


def test_one_statement_more_in_any_function_of_any_kernel_is_seen(looked_at: dict[str, Any]) -> None:
    assert len(looked_at["statement"]) == looked_at["all"]
    assert len(looked_at["statement"]) > 450
    assert looked_at["comment"] == []


def test_every_function_that_triton_compiles_is_part_of_a_case(looked_at: dict[str, Any]) -> None:
    found = set[str]()
    for path in sorted(SOURCES.rglob("*.py")):
        module = ".".join(("onewave", *path.relative_to(SOURCES).with_suffix("").parts))
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            decorators = map(ast.unparse, getattr(node, "decorator_list", ()))
            if any(each.startswith(("gluon.jit", "triton.jit")) for each in decorators):
                found.add(f"{module}.{node.name}")
    assert sorted(found - set(looked_at["functions"])) == []
    assert len(found) > 300


def test_the_functions_that_no_barrier_may_hold_up_are_the_waves(looked_at: dict[str, Any]) -> None:
    assert set(HURRIED) <= {name.rpartition(".")[2] for name in looked_at["functions"] if "onewave.wave." in name}


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_everything_compiled_anew_is_what_the_file_says() -> None:
    assert "compiled" in python("-m", "kit.compiled", "--all")
