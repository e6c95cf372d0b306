"""Kernels compiled in processes of their own are those that Triton looks for."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit.lanes import slow
from kit.processes import python
from onewave.gpu import compile_pool
from onewave.gpu.compile_pool import _launcher_beside, processes


def compiled(count: int, cache: Path, *more: str) -> dict[str, Any]:
    return json.loads(python("-m", "kit.alone.compile_pool_alone", str(count), *more, TRITON_CACHE_DIR=str(cache)))


def test_triton_finds_what_the_pool_has_compiled(tmp_path: Path) -> None:
    kernels = {"doubled": "found", "tripled": "found"}
    found = compiled(2, tmp_path)
    assert found.pop("launchers") == ["doubled", "tripled"]  # made beside them
    assert found == {"pool": True, **kernels, "refused": True, "hook": True}


def test_without_a_pool_triton_compiles_itself_and_there_is_nothing_to_give_up(tmp_path: Path) -> None:
    kernels = {"doubled": "compiled", "tripled": "compiled"}
    found = compiled(1, tmp_path, "give up")
    assert found.pop("launchers") == []  # by Triton, where it launches
    assert found == {"pool": False, **kernels, "refused": True, "hook": True}


def test_when_one_of_its_processes_dies_triton_compiles_itself(tmp_path: Path) -> None:
    found = compiled(2, tmp_path, "kill")
    assert found["refused"]
    assert found["hook"]
    assert found["tripled"] == "compiled"  # by then the pool has noticed


def test_what_an_interrupted_caller_gives_up_is_neither_compiled_nor_waited_for(tmp_path: Path) -> None:
    assert compiled(2, tmp_path, "give up") == {"pool": True, "given up": "_GivenUpError"}


def test_a_result_on_its_way_does_not_hold_up_who_gives_up() -> None:
    """A process killed amid its result once left the pool to wait for the rest of it, for ever."""
    code = """
import threading
from multiprocessing.connection import Connection
from onewave.gpu.compile_pool import compile_in, processes

begun, given_up, recv = threading.Event(), threading.Event(), Connection._recv

def result():
    return bytearray(1 << 20)

def recv_late(self, size, *more):
    if size > 1 << 20:  # its length has come, and the pipe holds no more than a beginning
        begun.set()
        assert given_up.wait(60)
    return recv(self, size, *more)

with processes(2) as pool, compile_in(pool) as give_up:
    Connection._recv = recv_late
    job = pool.submit(result)
    assert begun.wait(60)
    give_up()
    given_up.set()
assert job.exception() is not None
"""
    python("-c", code)


@pytest.mark.parametrize("others", [None, lambda *given: None if given else ("a key", "a digest")])
def test_a_later_tritons_question_what_the_hook_does_is_answered(others: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton from 3.7 on calls the hook of a compilation's stages without arguments, for (key, digest)."""
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", others)
    with _launcher_beside(None):
        stages = {"llir": lambda module, metadata: module}
        assert knobs.runtime.add_stages_inspection_hook(None, stages, None, None, None) is None
        assert knobs.runtime.add_stages_inspection_hook() == (("", "") if others is None else ("a key", "a digest"))
        assert stages["llir"]("module", {}) == "module"
    assert knobs.runtime.add_stages_inspection_hook is others


def test_without_another_thread_a_kernel_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with _launcher_beside(None):
        stages = {"llir": lambda module, metadata: module}
        knobs.runtime.add_stages_inspection_hook(None, stages, None, None, None)
        assert stages["llir"]("module", {}) == "module"


@pytest.mark.parametrize("because", ["of other threads", slow("it uses CUDA")])
def test_a_process_that_can_not_be_forked_spawns_others_which_do_not_run_its_script(
    because: str, tmp_path: Path
) -> None:
    script = tmp_path / "without_a_guard.py"
    threads = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
    cuda = "torch.cuda.is_initialized = lambda: True"
    script.write_text(f"""
import multiprocessing, os, threading, torch
from onewave.gpu.compile_pool import processes
os.fork = None
{threads if because == "of other threads" else cuda}
with processes(2) as pool:
    print(pool.submit(abs, -3).result(), len(pool._processes), multiprocessing.active_children() != [])
""")
    assert python(str(script)) == "3 2 True\n"


@pytest.mark.parametrize(("threads", "uses_cuda", "way"), [(1, False, "fork"), (1, True, "spawn"), (2, False, "spawn")])
def test_processes_are_forked_from_one_thread_that_does_not_use_cuda(
    threads: int, uses_cuda: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def executor(count: int, context: Any, **options: Any) -> Any:
        asked.append(context.get_start_method())
        return nullcontext(SimpleNamespace(submit=lambda job: None))

    monkeypatch.setattr(compile_pool, "ProcessPoolExecutor", executor)
    monkeypatch.setattr(threading, "active_count", lambda: threads)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: uses_cuda)
    with processes(2):
        assert asked == [way]


def test_a_daemon_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "current_process", lambda: SimpleNamespace(daemon=True))
    with processes(4) as pool:
        assert pool is None


def test_where_the_system_has_room_for_some_of_the_processes_only_there_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    fork, forked = os.fork, list[int]()

    def once() -> int:
        if forked:
            raise BlockingIOError("no more processes")
        forked.append(fork())
        return forked[0]

    monkeypatch.setattr(os, "fork", once)
    with processes(4) as pool:
        assert pool is None
    for process in multiprocessing.active_children():
        process.join(60)
    assert forked[0] not in [process.pid for process in multiprocessing.active_children()]


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for it")
def test_processes_end_when_the_one_that_forked_them_is_killed() -> None:
    code = """
import os, signal
from onewave.gpu.compile_pool import processes
with processes(3) as pool:
    pool.submit(int).result()
    print(*pool._processes, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -9
    numbers = [int(number) for number in done.stdout.split()]
    assert len(numbers) == 3
    end = time.monotonic() + 60
    while any(_runs(number) for number in numbers):
        assert time.monotonic() < end, "a process goes on without its parent"
        time.sleep(0.05)


def _runs(number: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{number}/status").read_text()
    except FileNotFoundError:
        return False
