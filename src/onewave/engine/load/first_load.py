"""Does the work of a model's first load side by side: plans the program of its decode step, and compiles all kernels
that the load then launches.

Programs and kernels of the built-in models' shapes ship with the package, and with them the types of kernels'
arguments: C compilers make what launches each kernel, while Python still imports. Where they do not ship, what a load
will launch is found out by a model of zeros, whose launches are kept and not made (sketches.py). Threads then make each
kernel ready, side by side. Planning and compiling are Python, seconds of it each, so processes do that work for the
threads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from onewave.engine.load import plan_cache
from onewave.engine.load.options import LoadOptions
from onewave.engine.load.self_check import CHECKED_CAPACITY, checked_lengths, prompt_logits
from onewave.engine.prompt.passes import PromptChunk, PromptPasses
from onewave.engine.sampler import compile_kernels
from onewave.gpu.compile_pool import compile_in, done_by, processes
from onewave.gpu.first_launch import await_hashes, begin_first_launch, keep_first_launch
from onewave.models.batch import Batch
from onewave.models.config.model_config import ModelConfig
from onewave.models.llama import Llama
from onewave.ops.warm import side_by_side
from onewave.wave.plan.program import WaveProgram
from onewave.wave.weights.pack import WeightStream

if TYPE_CHECKING:
    from onewave.gpu.prebuilt import Launch

_log = logging.getLogger("onewave")
# Planning, and compiling some forty kernels. More wait for the one that takes longest; fewer, for one another.
_PROCESSES = max(5, min(12, os.cpu_count() or 1))
# Making kernels ready. More wait for Python's lock; fewer, for one C compiler after the other.
_THREADS = 16
# Imported once, before there are several processes: what prompts' attention, the last to be compiled, needs.
_MODULES = ("onewave.engine.load.sketches", "onewave.ops.attention.hopper.launch")
# Imported while the driver makes a context of the GPU: all that a load's first launches would import in turn.
_LAUNCHING = (
    "onewave.engine.load.wave", "onewave.wave.kernel.kernel", "onewave.wave.weights.compact_impl",
    "onewave.ops.linear.stream", "onewave.ops.linear.hopper.stream_launch", "onewave.ops.attention.hopper.launch",
    "onewave.ops.append_kv.triton_impl", "onewave.ops.rms_norm.triton_impl",
    "onewave.ops.post_attention.separate",
)  # fmt: skip


@contextmanager
def compilers(path: str, config: ModelConfig, options: LoadOptions) -> Generator[ProcessPoolExecutor | None]:
    """Processes for a load on that decode path, which have to be there before it uses the GPU or a second thread.
    None where nothing is to be planned, as far as can be said without the GPU, and where there can't be any. Of a
    checkpoint that is kept in its own bits, its format is what counts.

    On a GPU, what the first launch begins with begins here, after the forks and beside the GPU's own start; meanwhile
    what the wave's path launches is imported, unless processes wait for work.
    """
    tried = may_run(path, config, options)
    options = options if options.kept is None else options.in_bits(options.kept)
    launchers: list[tuple[Any, ...]] = []
    try:
        wanted = tried and _is_first(config, options)
        if wanted and _is_prebuilt(config, options):
            launchers = plan_cache.shipped_launchers(options.step(config))
            wanted = not launchers
        for module in _MODULES if wanted else ():
            import_module(module)
    except ImportError:  # then the wave doesn't run here, and loading says why
        wanted = tried = False
    with processes(_PROCESSES if wanted else 0) as pool:
        if options.device.type == "cuda":
            begin_first_launch(options.device.index or 0, options.cache_dir, launchers)
        if tried and not wanted:
            with suppress(ImportError):
                _import_launching(options)
        yield pool
        if tried:
            keep_first_launch(options.cache_dir)


def _import_launching(options: LoadOptions) -> None:
    for module in _LAUNCHING:
        import_module(module)
    from onewave.gpu.hashes import hash_in_order
    from onewave.wave.kernel import kernel

    # Half a second of Python, where no process has remembered it, in which C compilers are at work.
    with options.times.phase("kernels' hashes"):
        await_hashes()
        hash_in_order(kernel.wave_kernel)  # pyright: ignore[reportUnknownMemberType]


def may_run(path: str, config: ModelConfig, options: LoadOptions) -> bool:
    """Whether a load on that path may take the wave."""
    from onewave.models.llama_plan import unsupported_because

    if path not in ("auto", "wave") or options.device.type != "cuda" or options.scaled is not None:
        return False
    return unsupported_because(config, options.max_num_seqs) is None and (path == "wave" or options.launches_pay)


def _is_first(config: ModelConfig, options: LoadOptions) -> bool:
    """Whether the cache has no program for the load."""
    return options.plan is not None or not plan_cache.planned_before(options.step(config), cache_dir=options.cache_dir)


def _is_prebuilt(config: ModelConfig, options: LoadOptions) -> bool:
    """Whether program and kernels of a load ship with the package."""
    step = options.step(config)
    if options.plan is not None or options.dtype is not torch.bfloat16:
        return False
    from onewave.gpu.prebuilt import has_prebuilt

    return plan_cache.is_shipped(step) and has_prebuilt("wave")


def plan_and_compile(config: ModelConfig, options: LoadOptions, workers: int) -> WaveProgram:
    """Return the program of a model's step for so many workers, shipped or planned, and meanwhile make ready the
    kernels that its load and the sampler launch. What fails to compile is compiled when it is needed. Without
    options.compilers nothing is made ready: all of it is Python, which would only wait for its lock.
    Raises UnsupportedError."""
    step, pool = options.step(config), options.compilers
    path = plan_cache.shipped_path(step, workers=workers)
    shipped = plan_cache.load_program(path) if options.plan is None else None
    job = _planning(config, options, workers)
    if pool is None:
        return job() if shipped is None else shipped
    try:
        with compile_in(pool) as give_up, ThreadPoolExecutor(1, thread_name_prefix="compile") as thread:
            compiling = thread.submit(_compile, config, options, shipped)
            try:
                program = done_by(pool, job) if shipped is None else shipped
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
    return partial(plan_program, options.step(config), workers=workers)


def _compile(config: ModelConfig, options: LoadOptions, program: WaveProgram | None) -> None:
    from onewave.gpu.launch import compile_ahead, distinct

    device = options.device
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            found = distinct(launches_of_load(config, options, program))
            side_by_side({f"{at}": partial(compile_ahead, one) for at, one in enumerate(found)}, device, _THREADS)
    except Exception as error:
        # Whatever it was: it comes again, and is reported, where the load itself launches this.
        _log.debug("not everything is compiled ahead: %s: %s", type(error).__name__, error)


def launches_of_load(config: ModelConfig, options: LoadOptions, program: WaveProgram | None) -> list[Launch]:
    """Return what a load is going to launch, on a model of zeros and nowhere. The wave's kernel is the first, as it
    takes longest to compile. program: the step's, or None, which has one layer planned."""
    from onewave.engine.load import sketches
    from onewave.gpu.launch import launches_nowhere

    sequences, device = options.max_num_seqs, options.device
    with launches_nowhere() as found:
        stream = sketches.blank_stream(config, options, program)
        sketches.compile_step(config, stream, batch=sequences, kv_dtype=options.kv_dtype)
        sketches.compile_packing(stream)
        model = sketches.PlainSketch(config, stream, max_model_len=min(options.positions(config), CHECKED_CAPACITY))
        sketches.keep_in(model, options.kv_dtype)
        _run_plainly(model, stream, sequences, options.positions(config))
        compile_kernels(config.vocab_size, device)
    return found


@torch.inference_mode()
def _run_plainly(model: Llama, stream: WeightStream, sequences: int, reach: int) -> None:
    """Run what the self-check and a first prompt do, once of each kind; the prompt with matrices that are kept
    unpacked, where they may be, and without. reach: tokens of the longest sequence: rows of the served table have room
    for its blocks."""
    lengths = [length + 1 for length in checked_lengths(model.max_model_len, sequences)]
    kv = model.new_row_cache(num_slots=sequences + 1, capacity=CHECKED_CAPACITY)
    if not model.packs_prompts or model.kv_format.dtype is not model.dtype:  # whose scales are measured so
        for length in dict.fromkeys(lengths):
            model.forward(Batch.prefill([(0, [0] * length, 0)], model.device), kv)
    if not model.packs_prompts:
        return
    prompt_logits(model, kv, [[0] * length for length in lengths])
    assert kv.block_table is not None
    blocks = kv.block_table.shape[1]
    table = kv.block_table.new_zeros(sequences + 1, max(blocks, -(-reach // kv.block_size)))
    served = replace(kv, block_table=table).narrowed(blocks)
    passes = PromptPasses(model, served, spare_slot=sequences, use_graphs=False)
    for keeping in (True, False) if stream.may_keep else (False,):
        stream.keeping = keeping
        for length in dict.fromkeys((1, min(16, max(lengths)), max(lengths))):
            passes.run([PromptChunk(0, [0] * length)])
