"""Kernels compiled while a first program is planned: those that the load launches later, never in the load's way."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.models.plain_wave import LOCATION, PlainWave
from kit.models.plain_wave import how as options_of
from kit.models.tiny_decoders import BASE, STORED
from kit.processes import python
from onewave.base.errors import UnsupportedError
from onewave.base.weight_formats import COMPACT, NESTED, NIBBLES, ROUNDINGS, SIX_BITS, mixed
from onewave.bench.engine.random_codes import q4_k_m
from onewave.engine import llm
from onewave.engine.load import first_load, sketches
from onewave.engine.load.checkpoint import open_parts
from onewave.engine.load.first_load import compilers, plan_and_compile
from onewave.engine.load.options import KeptBits, LoadOptions
from onewave.engine.load.plan_cache import program_path, save_program
from onewave.engine.load.self_check import self_check
from onewave.engine.load.streamed import stream_model
from onewave.gpu import prebuilt
from onewave.memory.kv_cache import KVCache
from onewave.models import llama, llama_plan
from onewave.models.config.model_config import ModelConfig
from onewave.models.config.read import builtin_config
from onewave.models.llama_plan import DecodeStep, plan_decode, workers_for
from onewave.ops.post_attention import PostAttentionWeights
from onewave.wave.launch import launch
from onewave.wave.weights import pack
from onewave.weights.fetch.sources import ModelLocation

GPU = torch.device("cuda", 0)
OPERATORS = ("append_kv", "attention", "embedding", "linear", "post_attention_rows", "rms_norm")
FAMILIES = STORED | {"norms of q and k, a sliding window": replace(BASE, qk_norm=True, layer_windows=(7, None))}


how = partial(options_of, max_num_seqs=3, max_model_len=400)


class FullWave(PlainWave):
    """All of whose steps have as many sequences as it takes."""

    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        assert len(tokens) == self.batch
        return super().__call__(tokens, positions, slots)


class NoWave:
    """Launches nothing."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def bind_cache(self, kv: KVCache) -> None: ...

    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        return torch.zeros(len(tokens), self._vocab_size)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A CPU that passes for a GPU; what happened on it, in no order."""
    seen: list[str] = []

    def noting(name: str, right: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any, **named: Any) -> Any:
            seen.append(name)
            return right(*arguments, **named)

        return act

    monkeypatch.setattr(launch, "co_resident", lambda device: 3)
    monkeypatch.setattr(sketches, "DecodeWave", FullWave)
    monkeypatch.setattr(first_load, "compile_kernels", lambda vocab_size, device: seen.append("sampler"))
    monkeypatch.setattr(first_load, "_run_plainly", noting("plain operators", first_load._run_plainly))
    monkeypatch.setattr(sketches, "compile_step", noting("the wave", sketches.compile_step))
    monkeypatch.setattr(sketches, "compile_packing", noting("packing", sketches.compile_packing))

    def planned(step: DecodeStep, **given: Any) -> llama_plan.DecodePlan:
        seen.append("planned" if step.config.num_layers > 1 else "one layer planned")
        return plan_decode(step, **given)

    monkeypatch.setattr(llama_plan, "plan_decode", planned)
    return seen


def seen_by(value: Any) -> Any:
    """All of an argument that a kernel may be compiled for, and more."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.data_ptr() % 16
    if isinstance(value, pack.StreamMatrix):
        return value.height, value.cols, value.count
    if isinstance(value, PostAttentionWeights):
        # A matrix in a stream multiplies 16-bit rows, whichever layer it is of.
        return tuple(seen_by(getattr(value, each.name)) for each in fields(value) if each.name != "next_matrix")
    return value


def calls_of(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """Every call of an operator that the model makes meanwhile."""
    found: set[Any] = set()

    def noting(name: str, right: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any, **named: Any) -> Any:
            given = {key: seen_by(value) for key, value in sorted(named.items())}
            found.add((name, tuple(seen_by(each) for each in arguments), tuple(given.items())))
            return right(*arguments, **named)

        return act

    with monkeypatch.context() as patched:
        for name in OPERATORS:
            patched.setattr(llama, name, noting(name, getattr(llama, name)))
        work()
    return found


@pytest.mark.parametrize(
    ("family", "rounded", "max_model_len"),
    [*((family, rounded, 40) for family in FAMILIES for rounded in (False, True)), ("own head", False, 400)],
)
def test_what_plain_operators_launch_ahead_is_what_the_self_check_launches(
    made: list[str],
    family: str,
    rounded: bool,
    max_model_len: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, rounding = FAMILIES[family], ROUNDINGS["int8"] if rounded else None
    monkeypatch.setattr(pack, "_PART_BYTES", 50 * 2 * config.hidden_size)  # the head in three parts
    load = how(tmp_path, weight_format=rounding, max_model_len=max_model_len)
    program = plan_decode(load.step(config), workers=3).program
    with open_parts(LOCATION, config, load) as parts:
        whole = stream_model(parts, config, program, load)
    later = calls_of(lambda: self_check(whole.model, NoWave(config.vocab_size), 3), monkeypatch)

    monkeypatch.setattr(sketches, "compile_step", lambda *given, **named: None)  # the wave's own operators

    found = calls_of(lambda: first_load.launches_of_load(config, load, None), monkeypatch)
    assert {name for name, _, _ in later} == set(OPERATORS)
    assert found == later


def test_with_processes_everything_is_launched_and_one_of_them_plans(made: list[str], tmp_path: Path) -> None:
    with ThreadPoolExecutor(1, thread_name_prefix="other process") as pool:
        found = plan_and_compile(BASE, how(tmp_path, compilers=pool), 3)
    expected = plan_decode(DecodeStep(BASE, 3), workers=3).program
    assert (found.steps == expected.steps).all()
    assert sorted(made) == ["one layer planned", "packing", "plain operators", "planned", "sampler", "the wave"]


@pytest.mark.parametrize("widths", [{}, {"head": 4}])
def test_a_step_takes_the_shipped_program_of_its_own_widths(
    widths: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, form = builtin_config("llama-3.2-1b"), mixed(NIBBLES[128, False], widths)
    monkeypatch.setattr(llama_plan, "plan_program", lambda *given, **named: "planned")
    workers = workers_for(DecodeStep(config, 1, form), available=132)
    found = plan_and_compile(config, how(tmp_path, max_num_seqs=1, weight_format=form), workers)
    assert (found == "planned") == bool(widths)


def test_without_processes_nothing_is_launched_ahead(made: list[str], tmp_path: Path) -> None:
    plan_and_compile(BASE, how(tmp_path), 3)
    assert made == ["planned"]


@pytest.mark.parametrize("ending", ["dies", "is dead"])
def test_when_the_processes_die_this_one_plans(made: list[str], ending: str, tmp_path: Path) -> None:
    class Broken(ThreadPoolExecutor):
        def submit(self, *given: Any, **named: Any) -> Any:
            if ending == "is dead":
                raise RuntimeError("broken pool")
            return super().submit(lambda: 1 // 0)

    with Broken(1) as pool:
        found = plan_and_compile(BASE, how(tmp_path, compilers=pool), 3)
    assert len(found.steps)
    assert made.count("planned") == 1


def test_what_can_not_be_planned_is_said_in_its_own_words(made: list[str], tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(UnsupportedError, match="up to 16 sequences"):
        plan_and_compile(BASE, how(tmp_path, compilers=pool, max_num_seqs=17), 3)


def test_what_fails_to_compile_is_told_to_who_debugs_and_stops_nothing(
    made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*given: Any, **named: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(first_load, "compile_kernels", fails)
    caplog.set_level(logging.DEBUG, "onewave")
    before = threading.active_count()
    with ThreadPoolExecutor(1) as pool:
        found = plan_and_compile(BASE, how(tmp_path, compilers=pool), 3)
    assert threading.active_count() == before
    assert len(found.steps)
    (record,) = caplog.records
    assert record.levelname == "DEBUG"
    assert record.getMessage() == "not everything is compiled ahead: RuntimeError: no such kernel"
    assert "plain operators" in made


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many processes were asked for; none are made."""
    counts: list[int] = []

    @contextmanager
    def processes(count: int) -> Any:
        counts.append(count)
        yield None

    monkeypatch.setattr(first_load, "processes", processes)
    monkeypatch.setattr(first_load, "begin_first_launch", lambda *given: None)
    monkeypatch.setattr(first_load, "keep_first_launch", lambda cache_dir: None)
    monkeypatch.setattr(first_load, "_MODULES", ())
    return counts


def enter(path: str, load: LoadOptions, config: ModelConfig = BASE) -> None:
    with compilers(path, config, load):
        pass


@pytest.mark.parametrize("path", ["auto", "wave"])
def test_there_are_processes_where_a_wave_may_be_planned(forked: list[int], path: str, tmp_path: Path) -> None:
    enter(path, how(tmp_path, device=GPU))
    assert forked == [first_load._PROCESSES]
    assert not torch.cuda.is_initialized()


def test_there_are_none_where_no_wave_is_tried(forked: list[int], tmp_path: Path) -> None:
    enter("graph", how(tmp_path, device=GPU))
    enter("auto", how(tmp_path))
    enter("wave", how(tmp_path, device=GPU, max_num_seqs=17))
    enter("wave", how(tmp_path, device=GPU), replace(BASE, head_dim=48))
    assert forked == [0, 0, 0, 0]


@pytest.mark.parametrize("path", ["auto", "wave", "graph", "eager"])
def test_a_gpus_first_launch_is_begun_after_the_forks(
    forked: list[int], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    monkeypatch.setattr(first_load, "begin_first_launch", lambda *given: begun.append(len(forked)))
    enter(path, how(tmp_path, device=GPU))
    assert begun == [1]
    enter(path, how(tmp_path))
    assert begun == [1]


def test_there_are_none_where_a_program_is_kept_whatever_the_gpu(forked: list[int], tmp_path: Path) -> None:
    program = plan_decode(DecodeStep(BASE, 3), workers=3).program
    assert save_program(program, program_path(DecodeStep(BASE, 3), workers=3, cache_dir=tmp_path))
    enter("auto", how(tmp_path, device=GPU))
    enter("auto", how(tmp_path, device=GPU, max_num_seqs=1))
    enter("auto", how(tmp_path, device=GPU, weight_format=ROUNDINGS["fp8"]))
    enter("auto", how(tmp_path, device=GPU), replace(BASE, qk_norm=True))
    assert [count > 0 for count in forked] == [False, True, True, True]


def test_of_a_quantised_checkpoint_its_own_bits_say_what_is_to_be_planned(
    forked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, launchers = builtin_config("llama-3.2-1b"), list[int]()
    monkeypatch.setattr(first_load, "begin_first_launch", lambda *given: launchers.append(len(given[2])))
    monkeypatch.setattr(first_load, "_import_launching", lambda options: None)
    monkeypatch.setattr(prebuilt, "has_prebuilt", lambda room: True)
    load = how(tmp_path, device=GPU, dtype=torch.bfloat16, max_num_seqs=1, weight_format=COMPACT)
    # A program of the last one's bytes ships, and no kernel.
    for form in (q4_k_m(config), mixed(NESTED, {"head": SIX_BITS}), mixed(NIBBLES[128, False], {})):
        enter("auto", replace(load, kept=KeptBits(form, 1)), config)
    enter("auto", replace(load, kept=KeptBits()), config)
    assert [count > 0 for count in forked] == [False, True, True, False]
    assert [count > 0 for count in launchers] == [True, False, False, True]


def test_a_triton_without_gluon_is_left_to_the_load(
    forked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_load, "_MODULES", ("onewave.no_such_module",))
    enter("auto", how(tmp_path, device=GPU))
    assert forked == [0]


def test_the_processes_do_not_wait_for_the_waves_kernel_to_be_imported(tmp_path: Path) -> None:
    code = """
import sys
from contextlib import nullcontext
from pathlib import Path
import torch
from onewave.base.settings import Settings
from onewave.engine.load import first_load
from onewave.engine.load.options import LoadOptions
from onewave.models.config.read import load_config
from onewave.weights.fetch.sources import resolve

settings = Settings.from_env()
config = load_config(resolve("llama-3.2-1b", settings, load_format="dummy"))
how = LoadOptions(dtype=torch.bfloat16, device=torch.device("cuda"), max_num_seqs=3, max_model_len=64,
               cache_dir=Path(sys.argv[1]))
first_load.processes, first_load.begin_first_launch = nullcontext, lambda *given: None
with first_load.compilers("wave", config, how) as count:
    launchers = ("onewave.ops.attention.hopper.launch", "onewave.wave.kernel.kernel")
    print(count, *(name in sys.modules for name in launchers))
"""
    assert python("-c", code, str(tmp_path)).split() == [str(first_load._PROCESSES), "True", "False"]


def test_a_model_is_loaded_with_the_processes_forked_before_any_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    before, pool, seen = threading.active_count(), object(), list[Any]()

    @contextmanager
    def noting(path: str, location: ModelLocation, config: ModelConfig, options: LoadOptions) -> Any:
        assert threading.active_count() == before
        yield replace(options, compilers=pool)
        seen.append("ended")

    def load(path: str, location: ModelLocation, config: ModelConfig, options: LoadOptions) -> Any:
        seen.append(options.compilers)
        raise UnsupportedError("enough")

    monkeypatch.setattr(llm, "warm_up", noting)
    monkeypatch.setattr(llm, "load", load)
    with pytest.raises(UnsupportedError, match="enough"):
        llm.LLM("llama-3.2-1b", load_format="dummy", device="cpu")
    assert seen == [pool]


def test_ctrl_c_does_not_wait_for_a_plan() -> None:
    code = """
import os, signal, threading, time
import torch
from onewave.models import llama_plan
from onewave.base.settings import Settings
from onewave.engine.load import first_load
from onewave.engine.load.options import LoadOptions
from onewave.models.config.read import load_config
from onewave.gpu.compile_pool import processes
from onewave.weights.fetch.sources import resolve

def plan(step, *, workers):
    time.sleep(600)

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

llama_plan.plan_program, first_load._compile = plan, lambda config, how, program: None
settings = Settings.from_env()
config = load_config(resolve("llama-3.2-1b", settings, load_format="dummy"))
with processes(3) as pool:
    assert pool is not None
    how = LoadOptions(dtype=torch.bfloat16, device=torch.device("cpu"), max_num_seqs=3, max_model_len=64,
                   cache_dir=settings.cache_dir, compilers=pool)
    try:
        threading.Timer(0.5, interrupt).start()
        first_load.plan_and_compile(config, how, 132)
    except KeyboardInterrupt:
        print("interrupted")
"""
    assert python("-c", code) == "interrupted\n"
