"""Loading a model, in two functions: `warm_up` begins what needs no weights, `load` does the rest.

A load on the wave's path: processes fork (warm_up); the step's program is planned, or read from the cache, while
kernels compile; the checkpoint's parts are packed into the program's stream; one step is checked against the plain
operators. Other paths build plain matrices. A CPU imports nothing of the wave.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from onewave.base.errors import CapacityError, ModelError, OnewaveError, UnsupportedError
from onewave.base.weight_formats import Rounding
from onewave.engine.load.checkpoint import load_model
from onewave.engine.load.kv_format import set_kv_format
from onewave.engine.load.options import LoadOptions
from onewave.models.config.model_config import ModelConfig
from onewave.models.config.read import load_scheme
from onewave.models.llama import Llama
from onewave.weights.fetch.sources import ModelLocation

if TYPE_CHECKING:
    from onewave.engine.wave_decode import WaveDecoder

_log = logging.getLogger("onewave")
_WAVE_PATHS = ("auto", "wave")


@contextmanager
def warm_up(decode: str, location: ModelLocation, config: ModelConfig, options: LoadOptions) -> Generator[LoadOptions]:
    """Begin what a load for that decode path does beside the weights; yield the options to load with.

    Before the process uses the GPU or a second thread: it may fork, and its children plan and compile, for the bits in
    which a quantised checkpoint is kept. Raises what open_parts raises.
    """
    if options.device.type != "cuda":
        yield options
        return
    with ExitStack() as stack:
        with options.times.phase("imports"):
            from onewave.engine.load.first_load import compilers, may_run

            if may_run(decode, config, options):
                from onewave.engine.load.kept import find_kept

                options = replace(options, kept=find_kept(location, config, options))
            pool = stack.enter_context(compilers(decode, config, options))
        yield replace(options, compilers=pool)


def load(
    decode: str, location: ModelLocation, config: ModelConfig, options: LoadOptions
) -> tuple[Llama, WaveDecoder | None]:
    """Load a model for a decode path: with wave or auto for the wave, and with auto otherwise where that fails.

    Then one line is logged that says why. A GPU gets back what only loading took. Raises what load_model raises, and
    for wave what load_wave does.
    """
    made = _load(decode, location, config, options)
    if options.device.type == "cuda":
        torch.cuda.empty_cache()
    return made


def _load(
    decode: str, location: ModelLocation, config: ModelConfig, options: LoadOptions
) -> tuple[Llama, WaveDecoder | None]:
    reason: str | None = None
    if decode == "auto" and options.insists:
        decode = "wave"  # nothing else keeps such weights
    if decode in _WAVE_PATHS:
        from onewave.engine.load.wave import load_wave
        from onewave.engine.wave_decode import unsuited

        if options.scaled is not None:
            reason = f"activations in 8 bits ({options.scaled.name})"
            if decode == "wave":
                raise UnsupportedError("decode wave", got=reason, allowed="16 bits", next='Use decode="graph".')
        elif decode == "auto" and asks_for_scaled(location, options):
            reason = "the checkpoint asks for activations in 8 bits, which decode='wave' keeps in 16"
        if decode == "auto" and reason is None:
            reason = unsuited(config, options)
            if reason is None and not options.launches_pay:
                reason = f"a step would take {options.launches} launches; graphs take all rows at once"
        if reason is None:
            try:
                return load_wave(location, config, options)
            except Exception as error:
                # Whatever it was: after a compiler's error too the GPU decodes well with graphs. Not after a broken
                # file.
                if decode == "wave" or isinstance(error, ModelError):
                    raise
                reason = in_short(error)
            gc.collect()  # what the failed load held goes before the weights come again
        _log.warning("decoding with CUDA graphs, not as one wave: %s", reason)
    return _load_plain(location, config, options), None


def asks_for_scaled(location: ModelLocation, options: LoadOptions) -> bool:
    """Whether a checkpoint's products are to round activations to 8 bits: then they do in prompts and in steps alike,
    on a CPU and with CUDA graphs. Only the wave keeps 16 bits, and so do its prompts (decode="wave")."""
    if options.load_format == "dummy" or options.rounding is not None or options.scaled is not None:
        return False
    scheme = load_scheme(location)
    return scheme is not None and scheme.activations is not None


def in_short(error: Exception) -> str:
    """One line about an error."""
    if isinstance(error, OnewaveError):
        return error.what if error.got is None else f"{error.what}: {error.got}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _load_plain(location: ModelLocation, config: ModelConfig, options: LoadOptions) -> Llama:
    rounding = options.rounding or options.scaled
    tiled = options.device.type == "cpu" and options.dtype is torch.float32
    with options.times.phase("weights"):
        scaled = asks_for_scaled(location, options)
        found = load_model(location, config, options, packed=tiled and rounding is None, scaled=scaled)
    if rounding is not None:
        from onewave.engine.load.rounded import pack_rounded, round_weights, scale_weights
        from onewave.engine.load.rounding_cost import sample_logits, say_cost

        sample: Sequence[int] = () if options.sample is None else options.sample()
        before = sample_logits(found, sample) if sample else None
        if not tiled and isinstance(rounding, Rounding):
            name = str(options.dtype).removeprefix("torch.")
            packed = "only the wave, and a CPU in float32, hold them packed"
            _log.warning("%s weights are kept in %s: %s", rounding.name, name, packed)
        try:
            if isinstance(rounding, Rounding):
                found.weights = (pack_rounded if tiled else round_weights)(found.weights, rounding)
            else:
                found.weights = scale_weights(found.weights, rounding, tiled=tiled)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"weights of {location.name}",
                got=f"rounding them does not fit on {options.device}",
                next="Use a smaller model or dtype.",
            ) from error
        if before is not None:
            say_cost(rounding.name, before, found, sample)
    set_kv_format(found, location, options)
    return found
