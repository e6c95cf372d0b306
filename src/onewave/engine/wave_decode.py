"""Decoding through the one-launch wave: built when the model loads, checked against the plain operators, then used."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onewave.base.errors import CapacityError, ModelError, OnewaveError, OutOfReachError, UnsupportedError
from onewave.engine.load.ahead import plan_and_compile
from onewave.engine.load.loading import load_model, open_parts
from onewave.engine.load.self_check import self_check
from onewave.memory.kv_cache import StaticKVCache
from onewave.models.config.model_config import ModelConfig
from onewave.models.llama import Llama
from onewave.wave.plan.program import WaveProgram
from onewave.wave.weights.formats import Rounding, WeightFormat
from onewave.wave.weights.pack import WeightStream
from onewave.weights.fetch.progress import byte_progress
from onewave.weights.fetch.sources import ModelLocation

if TYPE_CHECKING:
    from onewave.engine.load.streamed import StreamedModel

_log = logging.getLogger("onewave")
# Two 16-bit ways to the same logits differ by about a hundredth; a wrong one by about their size.
_MOST_DIFFERENCE = 0.05
# Of rounded weights, which plain operators have rounded to 16 bits once more: as far apart as two roundings of weights.
_MOST_ROUNDED_DIFFERENCE = 0.1


@dataclass(frozen=True)
class WaveLoad:
    """How a model is loaded.

    keep_unpacked: keep the matrices that prefill has unpacked; None: where they take at most half of the free memory,
    and never of rounded ones, which are there to save memory. cache_dir: where finished programs are kept.
    weight_format: of the matrices; None: as they are. insists: on it; otherwise weights that it can't hold stay as they
    are. progress: draw a bar on stderr. compilers: what wave_ahead.compilers yields.
    """

    dtype: torch.dtype
    device: torch.device
    max_num_seqs: int
    max_model_len: int
    cache_dir: Path
    load_format: str = "auto"
    seed: int = 0
    keep_unpacked: bool | None = None
    weight_format: WeightFormat | None = None
    insists: bool = False
    progress: bool = False
    compilers: ProcessPoolExecutor | None = None

    @property
    def weight_bytes(self) -> float:
        """Of a weight in the stream."""
        return self.dtype.itemsize if self.weight_format is None else self.weight_format.weight_bytes


class WaveDecoder:
    """A model's decode steps, one launch each, for up to max_num_seqs sequences.

    stream: where the model's matrices are packed for it; None packs them here, beside the plain ones. However many
    sequences a step has, it runs through the program for max_num_seqs: its bits do not depend on their number.
    Raises UnsupportedError when the card or the model does not suit the wave, or when the self-check fails.
    """

    def __init__(self, model: Llama, max_num_seqs: int, *, stream: WeightStream | None = None):
        from onewave.models.decode_wave import DecodeWave

        _check_suited(model.config, model.dtype, model.device, max_num_seqs)
        self._wave, self._stream = DecodeWave(model, batch=max_num_seqs, stream=stream), stream
        self.difference = self_check(model, self._wave, max_num_seqs)
        self._wave.wave.check()
        rounded = stream is not None and isinstance(stream.weight_format, Rounding)
        if not self.difference <= (_MOST_ROUNDED_DIFFERENCE if rounded else _MOST_DIFFERENCE):
            got = f"logits {self.difference:.1%} from the plain operators'"
            if not math.isfinite(self.difference):
                got = "results that are no numbers, or not the same from launch to launch"
            raise UnsupportedError("self-check of the wave", got=got, next='Use decode="graph".')

    @property
    def stream(self) -> WeightStream | None:
        """Where the model's matrices lie, if not as plain ones."""
        return self._stream

    def bind_cache(self, kv: StaticKVCache) -> None:
        """Use this cache from now on."""
        self._wave.bind_cache(kv)

    def check(self) -> None:
        """Raise WaveStalled if a launch has stalled, as far as the host knows; the next one works."""
        self._wave.wave.check()

    def release(self) -> bool:
        """Give back memory that only makes prefill faster; whether there was any."""
        return self._stream is not None and self._stream.release()

    def step(self, token_ids: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """Feed one token a row, int64 [rows] each. Returns float32 logits [rows, vocab]. Raises WaveStalled."""
        return self._wave(token_ids, positions, slots)


def unsuited(config: ModelConfig, dtype: torch.dtype, device: torch.device, max_num_seqs: int) -> str | None:
    """Why a model can't decode as one wave here, before anything is loaded; None if it can."""
    from onewave.models.llama_plan import unsupported_because
    from onewave.wave.launch.launch import runs_here

    reason = unsupported_because(config, max_num_seqs)
    if reason is not None:
        return reason
    if not runs_here(device):
        return f"{device} has not compute capability 9.0"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype}; bfloat16 or float16 run as one wave"
    with suppress(ModuleNotFoundError):
        if find_spec("triton.experimental.gluon") is not None:
            return None
    return "this Triton has no Gluon"


def _check_suited(config: ModelConfig, dtype: torch.dtype, device: torch.device, max_num_seqs: int) -> None:
    reason = unsuited(config, dtype, device, max_num_seqs)
    if reason is not None:
        raise UnsupportedError("decode wave", got=reason, next='Use decode="graph".')


def load_for(
    path: str, location: ModelLocation, config: ModelConfig, how: WaveLoad
) -> tuple[Llama, WaveDecoder | None]:
    """Load a model for a decode path: with wave or auto for the wave, and with auto otherwise where that fails.

    Then one line is logged that says why. Raises what load_model raises, and for wave what load_wave does.
    """
    reason: str | None = None
    if path == "auto" and how.insists:
        path = "wave"  # nothing else keeps such weights
    if path == "auto":
        reason = unsuited(config, how.dtype, how.device, how.max_num_seqs)
    if path in ("auto", "wave") and reason is None:
        try:
            return load_wave(location, config, how)
        except Exception as error:
            # Whatever it was: after a compiler's error too the card decodes well with graphs. Not after a broken file.
            if path == "wave" or isinstance(error, ModelError):
                raise
            reason = _in_short(error)
        gc.collect()  # what the failed load held goes before the weights come again
    if reason is not None:
        _log.warning("decoding with CUDA graphs, not as one wave: %s", reason)
    return _load_plain(location, config, how), None


def _in_short(error: Exception) -> str:
    if isinstance(error, OnewaveError):
        return error.what if error.got is None else f"{error.what}: {error.got}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def load_wave(location: ModelLocation, config: ModelConfig, how: WaveLoad) -> tuple[Llama, WaveDecoder]:
    """Load a model's weights straight into the stream of its decode step, and check a step.

    Raises what load_model and WaveDecoder raise.
    """
    _check_suited(config, how.dtype, how.device, how.max_num_seqs)
    # Kernels are launched on the current device, which need not be the model's.
    with torch.cuda.device(how.device) if how.device.type == "cuda" else nullcontext():
        try:
            return _load_wave(location, config, how)
        except OutOfReachError as error:
            if how.insists:
                raise
            _log.warning("weights are not compact: %s", _in_short(error))
        gc.collect()
        return _load_wave(location, config, replace(how, weight_format=None))


def load_streamed(
    location: ModelLocation, config: ModelConfig, how: WaveLoad, report: Callable[[int], None] = lambda done: None
) -> StreamedModel:
    """Load a model's weights into the stream of its decode step, on the current device. report: told the bytes packed.

    Raises what load_model raises.
    """
    program = _program(config, how)
    from onewave.engine.load.streamed import stream_model

    with open_parts(
        location, config, dtype=how.dtype, device=how.device, load_format=how.load_format, seed=how.seed
    ) as parts:
        return stream_model(
            parts,
            config,
            program,
            dtype=how.dtype,
            device=how.device,
            max_model_len=how.max_model_len,
            weight_format=how.weight_format,
            report=report,
        )


def _load_wave(location: ModelLocation, config: ModelConfig, how: WaveLoad) -> tuple[Llama, WaveDecoder]:
    total = _matrix_bytes(config, how.weight_bytes)
    with byte_progress("Packing for one wave", total, enabled=how.progress) as report:
        made = load_streamed(location, config, how, report)
        wave = WaveDecoder(made.model, how.max_num_seqs, stream=made.stream)
    rounded = isinstance(how.weight_format, Rounding)
    if how.keep_unpacked or (how.keep_unpacked is None and not rounded and _has_room(made.stream)):
        made.stream.keep()
    return made.model, wave


def _has_room(stream: WeightStream) -> bool:
    """Whether all matrices, unpacked, would take at most half of the memory that is free now."""
    if stream.device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(stream.device)
    free += torch.cuda.memory_reserved(stream.device) - torch.cuda.memory_allocated(stream.device)
    return 2 * stream.unpacked_bytes <= free


def _load_plain(location: ModelLocation, config: ModelConfig, how: WaveLoad) -> Llama:
    found = load_model(
        location,
        config,
        dtype=how.dtype,
        device=how.device,
        load_format=how.load_format,
        seed=how.seed,
        progress=how.progress,
        packed=how.device.type == "cpu" and how.dtype is torch.float32 and not isinstance(how.weight_format, Rounding),
        max_model_len=how.max_model_len,
    )
    if isinstance(how.weight_format, Rounding):
        from onewave.engine.load.rounded import round_weights, tile_weights

        name = str(how.dtype).removeprefix("torch.")
        _log.warning("%s weights are kept in %s: only the wave holds them in one byte", how.weight_format.name, name)
        try:
            found.weights = round_weights(found.weights, how.weight_format)
            if how.device.type == "cpu" and how.dtype is torch.float32:
                found.weights = tile_weights(found.weights)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"weights of {location.name}",
                got=f"rounding them does not fit on {how.device}",
                next="Use a smaller model or dtype.",
            ) from error
    return found


def _program(config: ModelConfig, how: WaveLoad) -> WaveProgram:
    """The step's program, from the cache; where it is not there, kernels compile while it is planned."""
    from onewave.engine.load.plan_cache import load_program, program_path, save_program
    from onewave.models.llama_plan import workers_for
    from onewave.wave.launch.launch import co_resident

    batch, width = how.max_num_seqs, how.weight_bytes
    workers = workers_for(config, batch=batch, available=co_resident(how.device), weight_bytes=width)
    path = program_path(config, batch=batch, workers=workers, cache_dir=how.cache_dir, weight_bytes=width)
    found = load_program(path)
    if found is None:
        found = plan_and_compile(config, how, workers)
        save_program(found, path)
    return found


def _matrix_bytes(config: ModelConfig, weight_bytes: float) -> int:
    from onewave.engine.load.streamed import layer_matrices

    layer = sum(height * cols * count for height, cols, count in layer_matrices(config).values())
    return int((config.num_layers * layer + config.vocab_size * config.hidden_size) * weight_bytes)
