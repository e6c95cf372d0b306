"""What a model's first load does at once: planning the program of its decode step, and compiling all kernels that the
load then launches.

Both are Python, seconds of it each. So processes do the work: they plan, and compile what threads of this one ask for,
which launch on zeros what the self-check and the sampler are going to launch. Where there are no such processes the
load plans, and compiles as it launches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from onewave.engine.load.options import LoadOptions
from onewave.engine.load.plan_cache import planned_before
from onewave.engine.load.self_check import CHECKED_CAPACITY, checked_lengths, self_check
from onewave.engine.sampler import compile_kernels
from onewave.gpu.compile_pool import begin_first_launch, compile_in, done_by, processes
from onewave.memory.kv_cache import StaticKVCache
from onewave.models.batch import Batch
from onewave.models.config.model_config import ModelConfig
from onewave.ops.warm import side_by_side
from onewave.wave.plan.program import WaveProgram

_log = logging.getLogger("onewave")
# Planning, of the model and of one layer, the two kernels that take longest, and the others.
_PROCESSES = 5
# Imported once, before there are several processes: what prompts' attention, the last to be compiled, needs.
_MODULES = ("onewave.engine.load.sketches", "onewave.ops.attention.hopper.launch")


@contextmanager
def compilers(path: str, config: ModelConfig, options: LoadOptions) -> Generator[ProcessPoolExecutor | None]:
    """Processes for a load on that decode path, which have to be there before it uses the GPU or a second thread.
    None where nothing is to be planned, as far as can be said without the GPU, and where there can't be any.

    On a GPU, what the first launch begins with begins here, after the forks and beside the GPU's own start.
    """
    try:
        wanted = _may_plan(path, config, options)
        for module in _MODULES if wanted else ():
            import_module(module)
    except ImportError:  # then the wave doesn't run here, and loading says why
        wanted = False
    with processes(_PROCESSES if wanted else 0) as pool:
        if options.device.type == "cuda":
            begin_first_launch()
        yield pool


def _may_plan(path: str, config: ModelConfig, options: LoadOptions) -> bool:
    from onewave.models.llama_plan import unsupported_because

    batch = options.max_num_seqs
    if path not in ("auto", "wave") or options.device.type != "cuda":
        return False
    if unsupported_because(config, batch) is not None:
        return False
    if options.plan is not None:
        return True
    return not planned_before(config, batch=batch, cache_dir=options.cache_dir, weight_bytes=options.weight_bytes)


def plan_and_compile(config: ModelConfig, options: LoadOptions, workers: int) -> WaveProgram:
    """Plan a model's step for so many workers, and meanwhile, with options.compilers, compile its kernel and what the
    self-check and the sampler launch. What fails to compile is compiled when it is needed. Raises UnsupportedError."""
    job = _planning(config, options, workers)
    pool = options.compilers
    if pool is None:
        return job()
    try:
        with compile_in(pool) as give_up, ThreadPoolExecutor(1, thread_name_prefix="compile") as thread:
            compiling = thread.submit(_compile, config, options)
            try:
                program = done_by(pool, job)
                wait([compiling])
            except KeyboardInterrupt:
                give_up()
                raise
            return program
    finally:
        if options.device.type == "cuda":
            torch.cuda.empty_cache()  # which has kept memory for the threads' streams


def _planning(config: ModelConfig, options: LoadOptions, workers: int) -> Callable[[], WaveProgram]:
    from onewave.models.llama_plan import plan_program
    from onewave.models.step_plan import plan_file_program

    if options.plan is not None:
        return partial(plan_file_program, config, options.plan)
    batch, width = options.max_num_seqs, options.weight_bytes
    return partial(plan_program, config, batch=batch, workers=workers, weight_bytes=width)


def _compile(config: ModelConfig, options: LoadOptions) -> None:
    try:
        launches = _launches(config, options)
        side_by_side(launches, options.device, len(launches))
    except Exception as error:
        # Whatever it was: it comes again, and is reported, where the load itself launches this.
        _log.debug("not everything is compiled ahead: %s: %s", type(error).__name__, error)


def _launches(config: ModelConfig, options: LoadOptions) -> dict[str, Callable[[], object]]:
    """Launches of all that a load is going to launch, by name; each compiles for a while. Prompts' attention, which
    takes longest, is the first, and waits for nothing."""
    from onewave.engine.load.sketches import AttentionSketch

    sequences, device = options.max_num_seqs, options.device
    lengths = checked_lengths(options.positions(config), sequences)
    prompts = [Batch.prefill([(slot, [0] * length, 0)], device) for slot, length in enumerate(lengths)]
    zeros, positions = torch.zeros(sequences, dtype=torch.int64, device=device), torch.tensor(lengths, device=device)
    step = Batch.decode(zeros, positions, torch.arange(sequences, device=device))
    attention = AttentionSketch(config, dtype=options.dtype, device=device)
    cache = attention.new_cache(num_slots=sequences + 1, capacity=CHECKED_CAPACITY)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the launches have streams of their own
    return {
        "attention of prompts": partial(attention.attend, cache, *prompts),
        "attention of a step": partial(attention.attend, cache, step),
        "sampler": partial(compile_kernels, config.vocab_size, device),
        "what takes matrices from a stream": partial(_launch_on_a_stream, config, options),
    }


def _launch_on_a_stream(config: ModelConfig, options: LoadOptions) -> None:
    from onewave.engine.load import sketches

    sequences, device = options.max_num_seqs, options.device
    stream = sketches.blank_stream(config, options)
    model = sketches.PlainSketch(config, stream, max_model_len=min(options.positions(config), CHECKED_CAPACITY))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    launches: dict[str, Callable[[], object]] = {
        "the wave": partial(sketches.compile_step, config, stream, batch=sequences),
        "other plain operators": partial(self_check, model, _NoStep(config.vocab_size), sequences),
        "packing": partial(sketches.compile_packing, stream),
    }
    side_by_side(launches, device, len(launches))


class _NoStep:
    """A step that makes nothing of its tokens."""

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size

    def bind_cache(self, kv: StaticKVCache) -> None:
        pass

    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        return torch.zeros(len(tokens), self._vocab_size, device=tokens.device)
