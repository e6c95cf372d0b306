"""Loading a model for the wave: plan or read its program, pack its weights into the program's stream, check a step."""

import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from onewave.base.errors import CapacityError, OutOfReachError, UnsupportedError
from onewave.base.weight_formats import MixedFormat
from onewave.engine.load.checkpoint import load_model, open_parts
from onewave.engine.load.first_load import plan_and_compile
from onewave.engine.load.kept import find_kept, stream_kept
from onewave.engine.load.kv_format import set_kv_format
from onewave.engine.load.load import in_short
from onewave.engine.load.options import LoadOptions
from onewave.engine.load.plan_cache import load_program, program_path, save_program
from onewave.engine.load.rounding_cost import sample_logits, say_cost
from onewave.engine.load.streamed import StreamedModel, num_weights, stream_model
from onewave.engine.wave_decode import WaveDecoder, unsuited
from onewave.models.config.model_config import ModelConfig
from onewave.models.llama import Llama
from onewave.models.llama_plan import workers_for
from onewave.wave.launch import launch
from onewave.wave.plan.program import WaveProgram
from onewave.wave.weights.pack import WeightStream
from onewave.weights.fetch.progress import byte_progress
from onewave.weights.fetch.sources import ModelLocation

_log = logging.getLogger("onewave")


def load_wave(location: ModelLocation, config: ModelConfig, options: LoadOptions) -> tuple[Llama, WaveDecoder]:
    """Load a model's weights straight into the stream of its decode step, and check a step.

    Raises what load_model and WaveDecoder raise.
    """
    reason = unsuited(config, options)
    if reason is not None:
        raise UnsupportedError("decode wave", got=reason, next='Use decode="graph".')
    # Kernels are launched on the current device, which need not be the model's.
    with torch.cuda.device(options.device) if options.device.type == "cuda" else nullcontext():
        kept = find_kept(location, config, options) if options.kept is None else options.kept
        if kept.lost:
            kind = str(options.dtype).removeprefix("torch.")
            _log.warning("%s matrices become %s: the wave has no format for them", ", ".join(sorted(kept.lost)), kind)
        if kept.form is not None:
            try:
                return _load_wave(location, config, options.in_bits(kept))
            except OutOfReachError as error:
                _log.warning("quantised weights are dequantised: %s", in_short(error))
            gc.collect()
        before = _logits_before_rounding(location, config, options)
        try:
            made = _load_wave(location, config, options)
            if before is not None and options.rounding is not None:
                say_cost(options.rounding.name, before[1], made[0], before[0])
            return made
        except OutOfReachError as error:
            if options.insists:
                raise
            _log.warning("weights are not compact: %s", in_short(error))
        gc.collect()
        return _load_wave(location, config, replace(options, weight_format=None))


def load_streamed(
    location: ModelLocation,
    config: ModelConfig,
    options: LoadOptions,
    report: Callable[[int], None] = lambda done: None,
) -> StreamedModel:
    """Load a model's weights into the stream of its decode step, on the current device. report: told the bytes packed.

    Raises what load_model raises.
    """
    with options.times.phase("program and kernels"):
        program = program_of(config, options)
    with options.times.phase("weights"), open_parts(location, config, options) as parts:
        if not isinstance(options.weight_format, MixedFormat):
            return stream_model(parts, config, program, options, report=report)
        stream = WeightStream(program, options.dtype, options.device, options.weight_format)
        return StreamedModel(stream_kept(parts, config, stream, options.positions(config), report), stream)


def _logits_before_rounding(
    location: ModelLocation, config: ModelConfig, options: LoadOptions
) -> tuple[Sequence[int], Tensor] | None:
    """The sample and its logits by the model as stored, which lies on the device meanwhile; None without a sample, or
    where there is no room for it."""
    ids = () if options.rounding is None or options.sample is None else options.sample()
    if not ids:
        return None
    try:
        with options.times.phase("rounding's cost"):
            return ids, sample_logits(load_model(location, config, replace(options, weight_format=None)), ids)
    except CapacityError:
        _log.warning("what rounding costs is not measured: the model as stored does not fit on %s", options.device)
        return None
    finally:
        gc.collect()
        if options.device.type == "cuda":
            torch.cuda.empty_cache()


def _load_wave(location: ModelLocation, config: ModelConfig, options: LoadOptions) -> tuple[Llama, WaveDecoder]:
    with options.times.phase("GPU"):
        torch.empty(1, device=options.device)  # the first use of one in a process takes a while
    total = int(num_weights(config) * options.weight_bytes)
    with byte_progress("Packing for one wave", total, enabled=options.progress) as report:
        made = load_streamed(location, config, options, report)
        if options.device.type == "cuda":
            torch.cuda.empty_cache()  # what stays from here on is to have blocks of its own
        set_kv_format(made.model, location, options)
        with options.times.phase("self-check"):
            wave = WaveDecoder(made.model, options.max_num_seqs, stream=made.stream)
    if made.stream.may_keep and _has_room(made.stream):
        made.stream.keep()
    return made.model, wave


def _has_room(stream: WeightStream) -> bool:
    """Whether all matrices, unpacked, would take at most half of the memory that is free now."""
    if stream.device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(stream.device)
    free += torch.cuda.memory_reserved(stream.device) - torch.cuda.memory_allocated(stream.device)
    return 2 * stream.unpacked_bytes <= free


def program_of(config: ModelConfig, options: LoadOptions) -> WaveProgram:
    """The step's program, from the cache; where it is not there, kernels compile while it is planned."""
    step = options.step(config)
    available = launch.co_resident(options.device)
    if options.plan is not None:
        workers = options.plan.workers
        if workers > available:
            raise UnsupportedError("plan: workers", got=str(workers), allowed=f"up to {available}, the GPU's SMs")
        # A changed plan is proved at each load.
        return plan_and_compile(config, options, workers)
    workers = workers_for(step, available=available)
    path = program_path(step, workers=workers, cache_dir=options.cache_dir)
    found = load_program(path)
    if found is None:
        found = plan_and_compile(config, options, workers)
        save_program(found, path)
    return found
