"""Decoding through the one-launch wave: built when the model loads, checked against the plain operators, then used."""

import logging
import math
from contextlib import suppress
from importlib.util import find_spec

import torch
from torch import Tensor

from onewave.base.errors import UnsupportedError
from onewave.base.weight_formats import Rounding
from onewave.engine.load.options import LoadOptions
from onewave.engine.load.self_check import follows_growth, self_check
from onewave.memory.kv_cache import KVCache
from onewave.models.batch import StepRows
from onewave.models.config.model_config import ModelConfig
from onewave.models.llama import Llama
from onewave.wave.weights.pack import WeightStream

_log = logging.getLogger("onewave")

# Largest difference of a correct wave's logits. Two 16-bit ways to the same logits differ by about a hundredth, a wrong
# one by about their size.
_MAX_DIFFERENCE = 0.05
# The same for rounded weights, which plain operators round to 16 bits once more: as far apart as two roundings. And for
# a cache in 8 bits, in which a new number of the two ways may be one step of the format apart.
_MAX_ROUNDED_DIFFERENCE = 0.1


class WaveDecoder:
    """A model's decode steps, one launch for up to max_num_seqs sequences; more take several, one after another.

    stream: where the model's matrices are packed for it; None packs them here, beside the plain ones. However many
    sequences a step has, it runs through the program for max_num_seqs: its bits do not depend on their number.
    Raises UnsupportedError when the GPU or the model does not suit the wave, or when the self-check fails.
    """

    def __init__(self, model: Llama, max_num_seqs: int, *, stream: WeightStream | None = None):
        from onewave.models.decode_wave import DecodeWave

        self._wave, self._stream, self._rows = (
            DecodeWave(model, batch=max_num_seqs, stream=stream),
            stream,
            max_num_seqs,
        )
        self.difference = self_check(model, self._wave, max_num_seqs)
        self._wave.wave.check()
        rounded = stream is not None and isinstance(stream.weight_format, Rounding)
        rounded |= model.kv_format.dtype is not model.dtype
        limit = _MAX_ROUNDED_DIFFERENCE if rounded else _MAX_DIFFERENCE
        if self.difference <= limit:
            return
        got = f"logits {self.difference:.1%} from the plain operators'"
        if not math.isfinite(self.difference):
            got = "results that are no numbers, or not the same from launch to launch"
        elif follows_growth(model, self._wave, max_num_seqs, limit):
            self._wave.wave.check()
            _log.info("self-check of the wave: %s, as far as rounding moves those too", got)
            return
        raise UnsupportedError("self-check of the wave", got=got, next='Use decode="graph".')

    @property
    def stream(self) -> WeightStream | None:
        """Where the model's matrices lie, if not as plain ones."""
        return self._stream

    def bind_cache(self, kv: KVCache) -> None:
        self._wave.bind_cache(kv)

    def check(self) -> None:
        """Raise WaveStalled if a launch has stalled, as far as the host knows; the next one works."""
        self._wave.wave.check()

    def release(self) -> bool:
        """Give back memory that only makes prefill faster; whether there was any."""
        return self._stream is not None and self._stream.release()

    def step(self, rows: StepRows) -> Tensor:
        """Feed one token a row. Returns float32 logits [rows, vocab]. Raises WaveStalled."""
        if rows.num_rows <= self._rows:
            return self._wave(*rows)
        return torch.cat([self._wave(*part) for part in rows.split(self._rows)])


def unsuited(config: ModelConfig, options: LoadOptions) -> str | None:
    """Why a model can't decode as one wave here, before anything is loaded; None if it can."""
    from onewave.models.llama_plan import unsupported_because
    from onewave.wave.launch.checks import BYTE_HEADS
    from onewave.wave.launch.launch import runs_here

    reason = unsupported_because(config, options.max_num_seqs)
    if reason is not None:
        return reason
    if not runs_here(options.device):
        return f"{options.device} has not compute capability 9.0"
    if options.dtype not in (torch.bfloat16, torch.float16):
        return f"{options.dtype}; bfloat16 or float16 run as one wave"
    if options.kv_dtype not in (None, options.dtype) and config.head_dim not in BYTE_HEADS:
        return f"head_dim {config.head_dim} with a KV cache in 8 bits; {BYTE_HEADS} run as one wave"
    with suppress(ModuleNotFoundError):
        if find_spec("triton.experimental.gluon") is not None:
            return None
    return "this Triton has no Gluon"
