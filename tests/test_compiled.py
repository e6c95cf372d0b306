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
from kit.compiled import FILE, committed, stale
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
