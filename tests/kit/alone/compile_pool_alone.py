"""Compiles two small kernels in processes of their own, for sm_90 and without a GPU; prints as JSON what Triton found.

A script, as kernels under test run in Triton's interpreter, which compiles nothing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime import driver

from onewave.gpu.compile_pool import compile_in, processes

LAUNCHERS = Path(os.environ["TRITON_CACHE_DIR"]) / "launchers"


@triton.jit
def doubled(x, out, COUNT: tl.constexpr, DTYPE: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, (tl.load(x + at) * 2).to(DTYPE))


@gluon.jit
def tripled(x, out, COUNT: gl.constexpr, DTYPE: gl.constexpr):
    at = gl.arange(0, COUNT, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    gl.store(out + at, (gl.load(x + at) * 3).to(DTYPE))


@triton.jit
def refused(x, COUNT: tl.constexpr):
    tl.static_assert(COUNT > 1000, "too few")
    tl.store(x, 0.0)


def run(count: int, kills: bool, gives_up: bool) -> dict[str, Any]:
    """List what Triton compiled or found, kernel by kernel, and what it refused. kills: one of the processes, first.
    gives_up: as an interrupted caller does."""
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
        )
    )
    found: dict[str, Any] = {}

    def listener(*, src: Any, cache_hit: bool, **others: Any) -> None:
        found[src.fn.__name__] = "found" if cache_hit else "compiled"

    def launcher(source: Any, metadata: Any) -> None:
        assert metadata.num_ctas == 1
        assert metadata.profile_scratch_align
        assert not metadata.tensordesc_meta
        (LAUNCHERS / source.fn.__name__).touch()

    knobs.compilation.listener = listener
    nvidia.CudaLauncher = launcher
    LAUNCHERS.mkdir()
    with processes(count) as pool, compile_in(pool) as give_up:
        found["pool"] = pool is not None
        if gives_up:
            give_up()
        if gives_up and pool is not None:
            try:
                doubled.warmup(torch.float32, torch.bfloat16, 64, tl.bfloat16, grid=(1,), num_warps=2)
            except Exception as error:
                return found | {"given up": type(error).__name__}
        if kills:
            os.kill(next(iter(pool._processes)), signal.SIGKILL)
        doubled.warmup(torch.float32, torch.bfloat16, 64, tl.bfloat16, grid=(1,), num_warps=2)
        tripled.warmup(torch.float32, torch.float16, 128, gl.float16, grid=(1,), num_warps=4)
        try:
            refused.warmup(torch.float32, 64, grid=(1,))
        except triton.CompilationError as error:
            found["refused"] = "too few" in str(error)
    found["hook"] = knobs.runtime.jit_cache_hook is None
    found["launchers"] = sorted(made.name for made in LAUNCHERS.iterdir())
    return found


if __name__ == "__main__":
    # As the module that other processes know by its name.
    from kit.alone.compile_pool_alone import run as run_as_module

    print(json.dumps(run_as_module(int(sys.argv[1]), "kill" in sys.argv, "give up" in sys.argv)))
