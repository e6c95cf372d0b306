"""Timing starts: a worker that speaks the protocol stands in for the model's processes."""

import json
from pathlib import Path

import pytest

from onewave.bench.engine import startup
from onewave.bench.engine.startup import Job, StartupError, measure_startup, measure_warm

# It takes 8 seconds where its caches are empty and 2 where it finds what it left there, and keeps a list of its jobs.
WORKER = """
import json, os, pathlib, sys
print("imported", flush=True)
job = json.loads(sys.stdin.readline())
options = job["options"]
caches = [pathlib.Path(os.environ[name]) for name in ("ONEWAVE_CACHE", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR")]
assert len(set(caches)) == 3
with open(options["model"], "a") as log: print(json.dumps(job), file=log)
if options["decode"] == "broken": sys.exit("no such path")
if options["decode"] == "silent": sys.exit(0)
if options["decode"] == "killed": os.kill(os.getpid(), 9)
if options["decode"] == "aborted": print("oh", file=sys.stderr, flush=True); os.kill(os.getpid(), 6)
seconds = 2 if caches[1].exists() else 8
for each in caches: each.mkdir(parents=True, exist_ok=True)
print("loading ...")
path = {"auto": "wave"}.get(options["decode"], options["decode"])
memory = {"peak_bytes": 10 * seconds, "kept_bytes": 20} if path == "wave" else {"peak_bytes": None, "kept_bytes": None}
times = {"import_s": 1, "load_s": seconds, "first_answer_s": 0.1}
times |= {"phases": {"weights": seconds / 2}, "cache_bytes": 7}
print(json.dumps({**times, "decode_path": path, "compact": path == "wave", **memory}))
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(startup, "_WORKER", worker)
    return lambda decode: Job.of({"model": str(tmp_path / "jobs"), "decode": decode}, vocab_size=5, max_model_len=99)


def jobs(tmp_path: Path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "jobs").read_text().splitlines()]


def test_every_first_start_finds_empty_caches_and_every_second_one_what_that_left(job, tmp_path):
    empty, filled = measure_startup(job("eager"), reps=2)
    assert (empty.caches, empty.load_s.p50, empty.load_s.n) == ("empty", 8, 2)
    assert (filled.caches, filled.load_s.p50, filled.load_s.n) == ("filled", 2, 2)
    assert empty.peak_bytes is None
    assert [each["options"]["decode"] for each in jobs(tmp_path)] == ["eager"] * 4
    assert max(jobs(tmp_path)[0]["prompt"]) < 5


@pytest.mark.parametrize(("most", "prompt"), [(3, [0]), (6, [0, 1, 2, 0]), (18, [*range(3)] * 5 + [0])])
def test_a_prompt_and_its_answer_fit_the_model(most, prompt):
    assert Job.of({}, vocab_size=3, max_model_len=most).prompt == prompt


def test_beside_the_wave_stands_plain_loading_whose_first_start_does_not_count(job, tmp_path):
    empty, filled, plain = measure_startup(job("auto"), reps=2)
    assert [each.decode_path for each in (empty, filled, plain)] == ["wave", "wave", "graph"]
    assert [each.compact for each in (empty, filled, plain)] == [True, True, False]
    assert (plain.caches, plain.load_s.p50, plain.load_s.n) == ("filled", 2, 2)
    assert (empty.peak_bytes, filled.peak_bytes, filled.kept_bytes) == (80, 20, 20)
    assert [each["options"]["decode"] for each in jobs(tmp_path)].count("graph") == 3
    assert len(measure_startup(job("auto"), reps=1, graphs=False)) == 2


def test_the_ledger_gets_loading_and_the_first_answer(job):
    empty = measure_startup(job("auto"), reps=1)[0]
    load, answer = empty.measurements("tiny", {"batch_size": 1})
    assert (load.metric, load.summary.p50, load.extra["caches"]) == ("load", 8, "empty")
    assert load.extra["compact"] is True
    assert (load.extra["phases"], load.extra["cache_bytes"]) == ({"weights": 4}, 7)
    assert (answer.metric, answer.summary.p50, answer.extra["batch_size"]) == ("first_answer", 0.1, 1)


@pytest.mark.parametrize(
    ("decode", "said"),
    [
        ("broken", "status 1, no such path"),
        ("silent", "status 0, nothing on stderr"),
        ("killed", "killed by signal 9, probably out of memory$"),
        ("aborted", "killed by signal 6, oh$"),
    ],
)
def test_a_start_that_fails_says_why(job, decode, said):
    with pytest.raises(StartupError, match=said):
        measure_startup(job(decode), reps=1)


def test_first_calls_side_by_side_and_one_after_another(monkeypatch):
    ran: list[tuple[bool, Path]] = []

    def run(arguments, caches, prebuilt):
        assert "--every" not in arguments
        alone = "--threads" in arguments
        ran.append((alone, caches))
        seconds = (4.0 if alone else 1.0) * (1 if ran.count((alone, caches)) == 1 else 0.1) * (1 if prebuilt else 10)
        return {"seconds": seconds, "calls": [{"name": "full", "seconds": seconds / 2}]}

    monkeypatch.setattr(startup, "_in_new_process", run)
    results = {(each.order, each.caches, each.prebuilt): each for each in measure_warm("cuda:0", reps=2)}
    assert results["side by side", "empty", True].seconds.p50 == 1.0
    assert results["one after another", "empty", True].calls["full"].p50 == 2.0
    assert results["one after another", "filled", True].seconds.p50 == pytest.approx(0.4)
    assert results["one after another", "empty", False].calls["full"].p50 == 20.0
    assert len({caches for _, caches in ran}) == 8
    lines = [line for each in results.values() for line in each.measurements()]
    assert [line.metric for line in lines] == ["warm"] * 3 + ["warm", "first_call"] * 3
    assert [line.extra["prebuilt"] for line in lines] == [True, True, False, True, True, True, True, False, False]
    assert {line.extra["calls"] for line in lines if line.metric == "warm"} == {1}


def test_every_kind_of_first_call_is_timed_as_it_comes(monkeypatch):
    """Compiling as many, one after another, would take minutes."""

    def run(arguments, caches, prebuilt):
        assert "--every" in arguments
        assert prebuilt
        return {"seconds": 2.0, "calls": [{"name": name, "seconds": 1.0} for name in ("full", "window")]}

    monkeypatch.setattr(startup, "_in_new_process", run)
    results = measure_warm("cuda:0", reps=1, every=True)
    kinds = [(order, caches) for order in ("side by side", "one after another") for caches in ("empty", "filled")]
    assert [(each.order, each.caches) for each in results] == kinds
    assert {line.extra["calls"] for each in results for line in each.measurements() if line.metric == "warm"} == {2}
