"""A decode step as one wave beside the same step as a CUDA graph of plain operators, on one model and one cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onewave.base.errors import UnsupportedError
from onewave.bench.ceilings import Ceiling
from onewave.bench.clock import Summary, time_calls
from onewave.bench.engine import decode_weight_bytes
from onewave.bench.ledger import Measurement
from onewave.engine.wave_decode import self_check
from onewave.models.batch import Batch
from onewave.models.llama import Llama
from onewave.models.llama_plan import DecodeWave, unsupported_because
from onewave.tiles.trace import Trace

__all__ = ["WaveResult", "measure_wave"]


@dataclass(frozen=True)
class WaveResult:
    """Seconds a step. step_bytes: weights and cache that a step reads. difference: of the self-check, for the wave."""

    path: str
    batch: int
    context: int
    seconds: Summary
    step_bytes: int
    difference: float | None = None

    @property
    def gigabytes_per_second(self) -> float:
        """10^9 bytes a second at the median."""
        return self.step_bytes * 1e-9 / self.seconds.p50

    def measurement(self, model: str, dtype: str, ceiling: Ceiling) -> Measurement:
        """The ledger's line."""
        extra = {
            "path": self.path,
            "batch_size": self.batch,
            "context": self.context,
            "dtype": dtype,
            "bytes_per_step": self.step_bytes,
            "ceiling_share": self.gigabytes_per_second / ceiling.value,
            "self_check": self.difference,
        }
        return Measurement(model, "decode_step", "ms", self.seconds.scaled(1e3), ceiling, extra)


@torch.inference_mode()
def measure_wave(
    model: Llama, *, batch: int, context: int, reps: int, trace: bool = False
) -> tuple[list[WaveResult], Trace | None]:
    """Time one step of `batch` sequences that hold `context` tokens each; both paths as replays of CUDA graphs.

    trace: also run the wave once with times of every task. Raises UnsupportedError where the wave does not run.
    """
    reason = unsupported_because(model.config, batch)
    if reason is not None:
        raise UnsupportedError("bench wave", got=reason)
    if context >= model.max_model_len:
        raise UnsupportedError("context", got=str(context), allowed=f"below {model.max_model_len}")
    wave = DecodeWave(model, batch=batch)
    difference = self_check(model, wave, batch)
    wave.wave.check()
    config, device = model.config, model.device
    kv = model.new_cache(num_slots=batch, capacity=context + 1)
    kv.k.normal_()
    kv.v.normal_()
    wave.bind_cache(kv)
    tokens = torch.arange(batch, device=device)
    positions, slots = torch.full_like(tokens, context), torch.arange(batch, device=device)
    logits = torch.empty(batch, config.vocab_size, device=device)
    per_key = 2 * config.num_layers * config.num_kv_heads * config.head_dim * model.dtype.itemsize
    step_bytes = decode_weight_bytes(model.weights) + batch * context * per_key
    steps = {
        "wave": lambda: wave.wave.decode(tokens, positions, slots, logits),
        "graph": lambda: model.forward(Batch.decode(tokens, positions, slots), kv),
    }
    results = [
        WaveResult(name, batch, context, time_calls([step], device, reps=reps), step_bytes)
        for name, step in steps.items()
    ]
    traced = wave.wave.trace_decode(tokens, positions, slots, logits) if trace else None
    torch.cuda.synchronize(device)
    wave.wave.check()
    first = results[0]
    results[0] = WaveResult(first.path, batch, context, first.seconds, step_bytes, difference)
    return results, traced
