"""What a model's first load does at once: planning the program of its decode step, and compiling all kernels that the
load then launches.

What it will launch is found out by a model of zeros, whose launches are kept and not made (sketches.py). Threads then
make each kernel ready, side by side. Programs and kernels of the built-in models' shapes ship with the package: what
is left to a thread is a C compiler, which makes what launches a kernel. Where they do not, planning and compiling are
Python, seconds of it each, so processes do that work for the threads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from onewave.engine.load.options import LoadOptions
from onewave.engine.load.plan_cache import is_shipped, load_program, planned_before, shipped_path
from onewave.engine.load.self_check import CHECKED_CAPACITY, checked_lengths
from onewave.engine.prompt.passes import PromptChunk, PromptPasses
from onewave.engine.sampler import compile_kernels
from onewave.gpu.compile_pool import begin_first_launch, compile_in, done_by, processes
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
    from onewave.gpu.prebuilt import has_prebuilt
    from onewave.models.llama_plan import unsupported_because

    batch = options.max_num_seqs
    if path not in ("auto", "wave") or options.device.type != "cuda" or options.scaled is not None:
        return False
    if unsupported_because(config, batch) is not None or (path == "auto" and not options.launches_pay):
        return False
    if options.plan is not None:
        return True
    width, widths = options.weight_bytes, options.widths
    if planned_before(config, batch=batch, cache_dir=options.cache_dir, weight_bytes=width, widths=widths):
        return False
    shipped = not widths and options.dtype is torch.bfloat16 and is_shipped(config, batch=batch, weight_bytes=width)
    return not (shipped and has_prebuilt("wave"))


def plan_and_compile(config: ModelConfig, options: LoadOptions, workers: int) -> WaveProgram:
    """Return the program of a model's step for so many workers, shipped or planned, and meanwhile make ready the
    kernels that its load and the sampler launch. What fails to compile is compiled when it is needed. Without
    options.compilers nothing is made ready beside planning, which would only wait for Python's lock.
    Raises UnsupportedError."""
    batch, width, pool = options.max_num_seqs, options.weight_bytes, options.compilers
    path = shipped_path(config, batch=batch, workers=workers, weight_bytes=width)
    shipped = load_program(path) if options.plan is None else None
    job = _planning(config, options, workers)
    if pool is None and shipped is None:
        return job()
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
    batch, width = options.max_num_seqs, options.weight_bytes
    return partial(plan_program, config, batch=batch, workers=workers, weight_bytes=width, widths=options.widths)


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
    lengths, device = checked_lengths(model.max_model_len, sequences), model.device
    kv = model.new_row_cache(num_slots=sequences + 1, capacity=CHECKED_CAPACITY)
    for length in dict.fromkeys(lengths):
        model.forward(Batch.prefill([(0, [0] * length, 0)], device), kv)
    tokens, positions = torch.zeros(sequences, dtype=torch.int64, device=device), torch.tensor(lengths, device=device)
    model.forward(Batch.decode(tokens, positions, torch.arange(sequences, device=device)), kv)
    assert kv.block_table is not None
    blocks = kv.block_table.shape[1]
    table = kv.block_table.new_zeros(sequences + 1, max(blocks, -(-reach // kv.block_size)))
    served = replace(kv, block_table=table).narrowed(blocks)
    passes = PromptPasses(model, served, spare_slot=sequences, use_graphs=False)
    keeping = (True, False) if stream.may_keep else (False,)
    for length in dict.fromkeys((1, min(16, max(lengths)), max(lengths))) if model.packs_prompts else ():
        for stream.keeping in keeping:
            passes.run([PromptChunk(0, [0] * length)])
