"""Making ready what a decode step's measurement launches, before it: one kernel after another takes a minute.

A load compiles what the engine launches, on a cache of blocks. A measurement also has the wave on a plain cache and
with times of every task, and plain operators on matrices that are unpacked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from onewave.bench.engine.wave import WaveCase, cache_of, in_pages, unpacked
from onewave.engine.load import sketches
from onewave.engine.load.options import LoadOptions
from onewave.engine.load.wave import program_of
from onewave.gpu.compile_pool import compile_in
from onewave.gpu.launch import compile_ahead, distinct, launches_nowhere
from onewave.models.batch import Batch
from onewave.models.config.model_config import ModelConfig
from onewave.models.decode_wave import DecodeWave
from onewave.ops.warm import side_by_side
from onewave.wave.plan.program import WaveProgram
from onewave.wave.weights.pack import WeightStream

if TYPE_CHECKING:
    from onewave.gpu.prebuilt import Launch

PROCESSES = 8
"""Compilers: the wave twice or three times, and half a dozen others that take seconds."""
_log = logging.getLogger("onewave")


def make_ready(
    config: ModelConfig, options: LoadOptions, cases: Sequence[WaveCase], pool: ProcessPoolExecutor | None
) -> None:
    """Plan a step's program into the cache and compile what loading and measuring it launch, in the pool's processes.

    Without a pool nothing is done; what fails to compile is compiled, and reported, when it is launched. Raises
    UnsupportedError for a step that can't be planned.
    """
    if pool is None:
        return
    options = replace(options, compilers=pool)
    with compile_in(pool) as give_up, ThreadPoolExecutor(1, thread_name_prefix="plan") as thread:
        planning = thread.submit(program_of, config, options)
        try:
            found = distinct(launches_of_cases(config, options, cases))
            calls = {f"{at}": partial(compile_ahead, one) for at, one in enumerate(found)}
            side_by_side(calls, options.device, len(calls))
            planning.result()
        except KeyboardInterrupt:
            give_up()
            raise
        except Exception as error:
            _log.debug("not everything is compiled ahead: %s: %s", type(error).__name__, error)
            planning.result()


def launches_of_cases(
    config: ModelConfig, options: LoadOptions, cases: Sequence[WaveCase], program: WaveProgram | None = None
) -> list[Launch]:
    """Return what measuring the cases launches beside a load, on a model of zeros and nowhere. program: the step's;
    None: the engine's own."""
    with launches_nowhere() as found:
        stream = sketches.blank_stream(config, options, program)
        for case in cases:
            _launch(config, options, case, stream)
    return found


@torch.inference_mode()
def _launch(config: ModelConfig, options: LoadOptions, case: WaveCase, stream: WeightStream) -> None:
    model = sketches.sketch(sketches.one_layer(config), stream)
    plain = sketches.PlainSketch(config, stream, max_model_len=max(case.context + 1, 64))
    tokens = torch.arange(case.batch, device=stream.device)
    inputs = tokens, torch.full_like(tokens, case.context), tokens
    for each in (model, plain):
        sketches.keep_in(each, options.kv_dtype)
    wave, kv = DecodeWave(model, batch=case.batch, stream=stream), cache_of(model, case)
    wave.bind_cache(kv)
    logits = wave(*inputs)
    if case.traced:
        with suppress(ValueError):  # no times were written
            wave.wave.trace_decode(*inputs, logits)
    if case.page is not None:
        wave.bind_cache(in_pages(kv, case.page))
        wave(*inputs)
    unpacked(plain).forward(Batch.decode(*inputs), cache_of(plain, case))
