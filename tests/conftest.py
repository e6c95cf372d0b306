"""Fixtures for every room, and what holds for every process that runs tests."""

import gc
import os
import random
import signal
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pytest

# NumPy's products read it when NumPy is imported, which torch does: with a thread a core, processes side by side wait.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch

# Kernels under test run in Triton's interpreter where there is no GPU. Set before anything imports Triton, which
# prepares its own library for one or the other then; transformers imports it too.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from kit.numpy_gpu import interpreter

    interpreter.prepare()

# One thread a process, children included: pytest starts a process a core, and threads that wait take cores too.
if not torch.cuda.is_available() or "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("ONEWAVE_NUM_THREADS", "1")

# A job in the background ignores SIGINT and hands that on to its children; those of a process with a handler do not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


with suppress(ImportError):  # the tests that need a GPU do without
    from hypothesis import HealthCheck, settings

    # The same examples every time, however slow the machine is.
    unheeded = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    settings.register_profile("same", deadline=None, derandomize=True, database=None, suppress_health_check=unheeded)
    settings.load_profile("same")


# Modules and tests last as long as the process once imported and collected, so no search for garbage need look at them.
gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Have what draws numbers without a seed draw the same ones, whichever tests ran before."""
    random.seed(0)
    torch.default_generator.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow the parameters that show no new pair of values, of a test marked `pairs`, or no new value, of one
    marked `values`. Those that are slow already show nothing."""
    from kit.lanes import covering, going_round

    parametrized = [item for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    for mark, choose in (("pairs", covering), ("values", going_round)):
        cases: dict[tuple[Path, str], list[pytest.Function]] = defaultdict(list)
        for item in parametrized:
            marks = {marker.name for marker in item.iter_markers()}
            if mark in marks and "slow" not in marks:
                cases[item.path, item.originalname].append(item)
        for named in cases.values():
            kept = choose([tuple(map(repr, item.callspec.params.values())) for item in named])
            for at, item in enumerate(named):
                if at not in kept:
                    item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2-135M-Instruct GGUF file, fetched into the user's cache the first time."""
    from onewave.base.settings import Settings
    from onewave.weights.fetch.sources import resolve

    path = resolve("smollm2-135m-instruct", Settings.from_env(), progress=False).path
    assert path is not None
    return path
