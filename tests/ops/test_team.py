"""The team of CPU threads: every item done exactly once, whoever calls and however often."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from onewave.ops.numba_math_impl import doubles, integers
from onewave.ops.numba_team_impl import kernel, run
from onewave.ops.precompile import precompile


@kernel
def add_to_each(table_at, first, last):  # type: ignore[no-untyped-def]  # compiled by Numba
    table = integers(table_at, 19)
    out = integers(table[1], table[2])
    for i in range(first, last):
        out[i] += table[18] + np.int64(doubles(table_at, 1)[0])


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


def test_precompiling_finds_every_kernel() -> None:
    # Six weight formats and their block sums; norm, SwiGLU, append and attention.
    assert precompile() == 11


def test_kernels_run_where_nothing_may_be_kept_on_disk() -> None:
    # The only place for compiled code that Numba may look for is one that nobody named.
    environment = os.environ | {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator", "NUMBA_CACHE_DIR": ""}
    code = "import torch; from onewave import ops; print(ops.swiglu(torch.tensor([[0.0, 3.0]])).item())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0.0\n", "")
