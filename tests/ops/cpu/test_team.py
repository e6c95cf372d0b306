"""The team of CPU threads: every item done exactly once, whoever calls and however often."""

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
from numba.core.caching import FunctionCache

from kit.processes import is_interrupted
from onewave.ops.cpu import team_impl as numba_team_impl
from onewave.ops.cpu.math_impl import doubles, integers
from onewave.ops.cpu.precompile import precompile
from onewave.ops.cpu.team_impl import Job, JobList, kernel, run


@kernel
def add_to_each(table_at, first, last):
    table = integers(table_at, 19)
    out = integers(table[1], table[2])
    for i in range(first, last):
        out[i] += table[18] + np.int64(doubles(table_at, 1)[0])


@kernel
def double_each(table_at, first, last):
    table = integers(table_at, 19)
    out = integers(table[1], table[2])
    for i in range(first, last):
        out[i] *= 2


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end


def arguments(out: np.ndarray, value: int) -> tuple[int, ...]:
    return (out.ctypes.data, len(out), *[0] * 15, value)


@pytest.mark.parametrize("count", [0, 1, 3, 64, 4095, 100_000])
@pytest.mark.parametrize("alone", [False, True])
def test_every_item_is_done_once(count: int, alone: bool) -> None:
    out = np.zeros(max(count, 1), np.int64)
    run(add_to_each, count, arguments(out, 5), 2.0, alone=alone)
    assert (out[:count] == 7).all()
    assert (out[count:] == 0).all()


def test_many_small_jobs_back_to_back() -> None:
    out = np.zeros(37, np.int64)
    for _ in range(20_000):
        run(add_to_each, 37, arguments(out, 1))
    assert (out == 20_000).all()


def test_a_list_of_jobs_runs_them_in_their_order_each_time() -> None:
    out = np.zeros(300, np.int64)
    doubled = Job(double_each, 300, (out.ctypes.data, 300))
    listed = JobList(
        [Job(add_to_each, 300, arguments(out, 1), 2.0), doubled, Job(add_to_each, 0, ()), doubled._replace(alone=True)]
    )
    for _ in range(9):
        listed.run()
    expected = 0
    for _ in range(9):
        expected = 4 * (expected + 3)
    assert (out == expected).all()


def test_several_callers_at_once_do_not_mix_their_jobs() -> None:
    outs = [np.zeros(101 + i, np.int64) for i in range(6)]

    def call(i: int) -> None:
        for _ in range(2_000):
            run(add_to_each, len(outs[i]), arguments(outs[i], i + 1))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, out in enumerate(outs):
        assert (out == 2_000 * (i + 1)).all()


def test_whenever_ctrl_c_comes_others_still_get_their_jobs_done(monkeypatch: pytest.MonkeyPatch) -> None:
    team = numba_team_impl._Team(3)
    monkeypatch.setattr(numba_team_impl, "_team", lambda: team)
    files = [numba_team_impl.__file__, threading.__file__]
    out = np.zeros(37, np.int64)

    def work() -> None:
        run(add_to_each, 37, arguments(out, 1))

    wait_until(lambda: any(team.asleep))
    place = 1
    while is_interrupted(work, place, files):
        wait_until(lambda: all(team.asleep))
        other = threading.Thread(target=work, daemon=True)
        other.start()
        other.join(60)
        assert not other.is_alive()
        place += 1
        wait_until(lambda: any(team.asleep))
    assert place > 5
    wait_until(lambda: all(team.asleep))  # nobody's bell rings without end


def test_a_job_wakes_all_who_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    # By team, too: a worker of the process's own one, rung by a test before this, may come to it only now.
    times_awake = Counter[tuple[int, int]]()

    def find_nothing_to_do(state_at: int, job: int) -> int:
        times_awake[state_at, threading.get_ident()] += 1
        return job

    monkeypatch.setattr(numba_team_impl, "_work", find_nothing_to_do)
    team = numba_team_impl._Team(4)
    wait_until(lambda: all(team.asleep))
    for _ in range(20):
        before = {worker: times for worker, times in times_awake.copy().items() if worker[0] == team.state_at}
        assert len(before) == 3
        team.wake()
        wait_until(lambda before=before: all(times_awake[worker] > times for worker, times in before.items()))
        wait_until(lambda: all(team.asleep))


def test_precompiling_finds_every_kernel() -> None:
    # Weight formats and their block sums; one-byte products, norm, SwiGLU, append and both attentions.
    assert precompile() == 37


def test_machine_code_older_than_what_it_may_inline_is_compiled_anew(tmp_path: Path) -> None:
    source = tmp_path / "kept.py"
    source.write_text(
        "from onewave.ops.cpu.team_impl import kernel\n@kernel\ndef nothing(table_at, first, last):\n    pass\n"
    )

    def compiled() -> Path:
        given = spec_from_file_location("kept", source)
        module = module_from_spec(given)
        given.loader.exec_module(module)
        assert module.nothing.address
        (index,) = Path(FunctionCache(module.nothing._function).cache_path).glob("kept.nothing-*.nbi")
        return index

    index = compiled()
    written = index.stat().st_mtime_ns
    assert compiled().stat().st_mtime_ns == written
    os.utime(index, (1, 1))
    assert compiled().stat().st_mtime_ns > written


def test_machine_code_that_may_not_be_deleted_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: Callable[..., None]) -> None:
        raise PermissionError

    def nothing(table_at, first, last):
        pass

    monkeypatch.setattr(numba_team_impl, "_drop_stale", refuse)
    made = kernel(nothing)
    assert made.address
    assert made._compiled.cache_hits == 0
    assert not list(Path(FunctionCache(nothing).cache_path).glob(f"*{nothing.__qualname__}*"))


def test_every_file_that_kernels_inline_is_known() -> None:
    folder = Path(numba_team_impl.__file__).parents[1]
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.py") if "from numba " in path.read_text()}
    assert found <= {f"{name}.py" for name in numba_team_impl._INLINED}


def test_kernels_run_where_nothing_may_be_kept_on_disk() -> None:
    # The only place for compiled code that Numba may look for is one that nobody named.
    environment = os.environ | {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator", "NUMBA_CACHE_DIR": ""}
    code = "import torch; from onewave import ops; print(ops.swiglu(torch.tensor([[0.0, 3.0]])).item())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0.0\n", "")
