"""A first load makes everything ready that it launches, from the package or compiled in other processes while the
program is planned, and gives the memory back."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kit.operands.on_gpu import ON_WAVE

pytestmark = ON_WAVE
SCRIPT = """
import json, os, sys, threading, time
import torch
from triton import knobs
from triton.runtime import build
from onewave import LLM
from onewave.engine import wave_decode
from onewave.engine.load import wave as load_module
from onewave.engine.load import first_load
from onewave.gpu import launch as launch_module

main, phase, compiled, built, memory, by_hand = os.getpid(), ["before"], [], [], {}, build._build
pool, shipped = [], []

def listener(*, src, cache_hit, **others):
    if os.getpid() == main:
        compiled.append((phase[0], src.fn.__name__, cache_hit))

def building(name, *given):
    if os.getpid() == main:
        built.append((name, threading.current_thread() is threading.main_thread()))
    return by_hand(name, *given)

def taking(given, right=launch_module.take_prebuilt):
    taken = right(given)
    if os.getpid() == main and taken:
        shipped.append(given.function.__name__)
    return taken

def during(module, name):
    right = getattr(module, name)

    def act(*given, **named):
        phase[0] = name
        if name == "plan_and_compile":
            pool.append(given[1].compilers is not None)
        try:
            return right(*given, **named)
        finally:
            phase[0] = "after " + name
            torch.cuda.synchronize()
            memory[name] = torch.cuda.memory_allocated()

    setattr(module, name, act)

if __name__ == "__main__":
    knobs.compilation.listener = listener
    build._build, launch_module.take_prebuilt = building, taking
    during(load_module, "plan_and_compile")
    during(wave_decode, "self_check")
    start = time.perf_counter()
    options = json.loads(sys.argv[2])
    llm = LLM(sys.argv[1], load_format="dummy", device="cuda", max_model_len=512, **options)
    seconds = time.perf_counter() - start
    prefixes = {thread.name.split("-")[0].split("_")[0] for thread in threading.enumerate()}
    told = {"path": llm.decode_path, "compiled": compiled, "built": built, "memory": memory, "seconds": seconds}
    print(json.dumps(told | {"threads": sorted(prefixes), "pool": pool, "shipped": shipped}))
"""


def load(folder: Path, model: str, **options: Any) -> dict[str, Any]:
    script = folder / "load.py"
    script.write_text(SCRIPT)
    caches = {"TRITON_CACHE_DIR": str(folder / "triton"), "ONEWAVE_CACHE": str(folder / "onewave")}
    command = [sys.executable, str(script), model, json.dumps(options)]
    done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 1}, {"quantization": "int8"}, {"quantization": "int4"}])
def test_a_load_of_a_built_in_shape_compiles_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    found = load(tmp_path, "llama-3.2-1b", **options)
    assert found["path"] == "wave"
    assert found["pool"] == [False]
    assert {"wave_kernel", "append_halves_kernel", "rms_norm_kernel"} <= set(found["shipped"])
    assert [name for _, name, from_cache in found["compiled"] if not from_cache] == []
    # Threads have made their launchers, in C, before.
    assert ["__triton_launcher", True] not in found["built"]
    assert ["__triton_launcher", False] in found["built"]
    assert found["threads"] == ["MainThread"]


def test_another_load_compiles_nothing_after_the_program_is_planned(tmp_path: Path) -> None:
    found = load(tmp_path, "llama-3.2-1b", dtype="float16")
    assert found["path"] == "wave"
    ahead = [name for phase, name, _ in found["compiled"] if phase == "plan_and_compile"]
    assert {"wave_kernel", "append_halves_kernel", "_best_of_row"} <= set(ahead)
    assert [entry for entry in found["compiled"] if entry[0] != "plan_and_compile"] == []
    # All that it launched came from the cache: from the package, or the processes had compiled it.
    assert [name for _, name, from_cache in found["compiled"] if not from_cache] == []
    assert found["pool"] == [True]
    # And what launches it, in C: they had made that, too, but for kernels from the package.
    assert [name for name, _ in found["built"]].count("__triton_launcher") <= len(found["shipped"])
    # Workspaces of the matrix products and kernels' scratch are all that stays.
    assert found["memory"]["plan_and_compile"] < 192 << 20
    assert found["threads"] == ["MainThread"]
