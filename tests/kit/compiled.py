"""Reports of all kernels, compiled ahead of time and committed: `python -m kit.compiled` compiles what is stale.

data/compiled.json holds a line a case: a key, and the report. The key is a digest of all that the kernel is compiled
from and of the code that reports on it. Tests compute keys, compile nothing, and assert what the reports say.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "data" / "compiled.json"
REGISTERS_AN_SM = 64 << 10
SHARED_A_BLOCK = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
"""Bytes of shared memory that a block may have, by compute capability."""

_SHARED_AN_SM = {80: 164 << 10, 90: 228 << 10}
_PROCESSES = 2


def committed() -> dict[str, dict[str, Any]]:
    """Return the committed reports by case."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def reports_of(kind: str) -> dict[str, dict[str, Any]]:
    """Return the committed reports of the cases whose names begin with a kind, by the rest of the name."""
    return {case.removeprefix(kind): report for case, report in committed().items() if case.startswith(kind)}


def blocks_an_sm(report: dict[str, Any]) -> int:
    """Return how many blocks of a kernel an SM of sm_80 or sm_90 holds at once."""
    registers = -(-report["registers"] // 8) * 8 * report["threads"]  # handed out in portions of 256 a warp
    shared = _SHARED_AN_SM[report["sm"]] // (report["shared"] + 1024)
    return min(REGISTERS_AN_SM // registers, shared, 2048 // report["threads"], 32)


def keys() -> dict[str, str]:
    """Record all calls, compile nothing, and return each case's key."""
    return {case: _key(case, call) for call in _calls() for case in _cases(call)}


def stale(found: dict[str, str], reports: dict[str, dict[str, Any]]) -> list[str]:
    """Return the cases whose key is not the committed one, and those that are no more."""
    return sorted(case for case in {*found, *reports} if found.get(case) != reports.get(case, {}).get("key"))


def kernels() -> list[Any]:
    """Return each kernel that some call launches, once."""
    launches = [each for call in _calls() for each in _cases(call).values()]
    return list({id(each.asked.function): each.asked.function for each in launches}.values())


@cache
def _calls() -> dict[str, Any]:
    # Late: whoever only reads reports needs neither Triton nor kernels.
    from kit.calls import CALLS

    return CALLS


@cache
def _cases(call: str) -> dict[str, Any]:
    """A call's launches by case."""
    from kit.recorder import record

    asked = _calls()[call]
    with asked.inside():
        launches = record(asked.make, asked.capability, sms=asked.sms)
    launches = [each for each in launches if not asked.kernels or each.kernel in asked.kernels]
    found: dict[str, Any] = {}
    for each in launches:
        name = call if len(launches) == 1 else f"{call}: {each.kernel}"
        number = sum(case == name or case.startswith(f"{name} #") for case in found)
        found[f"{name} #{number + 1}" if number else name] = each
    return found


def _key(case: str, call: str) -> str:
    from kit.reports import checks_of

    recorded, asked = _cases(call)[case], _calls()[call]
    with asked.inside():
        words = f"{recorded.words()}\n{checks_of(recorded, asked)}"
    return hashlib.sha256(words.encode()).hexdigest()[:32]


def _report(case: str, call: str) -> dict[str, Any]:
    from kit.build import build
    from kit.reports import report_of

    recorded, asked = _cases(call)[case], _calls()[call]
    with asked.inside():
        built = build(recorded)
    report = report_of(recorded, built, asked)
    return {"key": _key(case, call), "kernel": recorded.kernel, "sm": recorded.target.arch, **report}


def _written(reports: dict[str, dict[str, Any]]) -> None:
    lines = [f"{json.dumps(case)}: {json.dumps(reports[case], sort_keys=True)}" for case in sorted(reports)]
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _compiled(wanted: Iterable[str]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Compile cases, in two processes side by side; each and its report as it comes."""
    calls = {case: call for call in _calls() for case in _cases(call)}
    with ProcessPoolExecutor(_PROCESSES, mp_context=get_context("spawn")) as pool:
        made = {pool.submit(_report, case, calls[case]): case for case in wanted}
        for each in as_completed(made):
            yield made[each], each.result()


def main(arguments: list[str]) -> int:
    """Bring the file up to date; --all: compile everything anew and compare with the file; --keys: print keys alone."""
    parser = argparse.ArgumentParser(prog="python -m kit.compiled", description=main.__doc__)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--write", action="store_true", help="with --all: write what came out instead")
    parser.add_argument("--keys", action="store_true")
    parser.add_argument("--only", default="", help="cases with this in their name")
    chosen = parser.parse_args(arguments)
    found, reports = keys(), committed()
    if chosen.keys:
        print(json.dumps(found))
        return 0
    old, writes = set(reports) - set(found), chosen.write or not chosen.all
    wanted = [case for case in found if chosen.only in case and (chosen.all or case in stale(found, reports))]
    changed: list[str] = []
    for number, (case, report) in enumerate(_compiled(wanted), 1):
        if report != reports.get(case):
            changed.append(case)
        print(f"{number}/{len(wanted)} {case}", flush=True)
        if writes:
            _written(committed() | {case: report})
    if old and writes:
        _written({case: report for case, report in committed().items() if case in found})
    if not writes and (changed or old):
        print(f"not what {FILE.name} says: {', '.join([*changed, *sorted(old)])}; run make compiled", file=sys.stderr)
        return 1
    print(f"{len(wanted)} of {len(found)} compiled")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
