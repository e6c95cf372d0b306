"""Measure the parts that models/profile.py predicts: a prompt's operators one by one, a decode step from its trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from onewave.bench.clock import recorded, time_calls
from onewave.bench.energy import BoardEnergy, measure_energy
from onewave.engine.load.streamed import StreamedModel
from onewave.models.config.model_config import ModelConfig
from onewave.models.decode_wave import DecodeWave
from onewave.models.profile import PREFILL, STEP, Part, parts, stage_seconds
from onewave.ops.append_kv import append_kv
from onewave.ops.attention import attention
from onewave.ops.linear import linear, linear_swiglu
from onewave.ops.rms_norm import add_rms_norm
from onewave.tiles.sim.fit import stage_spans

# More than the L2 cache holds, so that no call finds its weights there.
_BYTES_IN_ROTATION = 512 << 20
_MAX_COPIES = 64


@dataclass(frozen=True)
class PromptOperands:
    """Random operands of one layer's operators for a prompt."""

    config: ModelConfig
    tokens: int
    device: torch.device
    dtype: torch.dtype = torch.bfloat16

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def calls(self, part: Part) -> list[Callable[[], object]]:
        """Return one layer's calls of a part, on as many copies of its weights as the L2 cache can't hold."""
        if part.name == "attention":
            return [self._attention()]
        if part.product is None:
            return [self._between()]
        rows, cols = part.product
        tokens = 1 if part.name == "head" else self.tokens
        copies = min(_MAX_COPIES, max(2, -(-_BYTES_IN_ROTATION // (2 * rows * cols))))
        product = linear_swiglu if part.name == "gate_up" else linear
        x = self._random(tokens, cols)
        return [partial(product, x, self._random(rows, cols)) for _ in range(copies)]

    def _attention(self) -> Callable[[], object]:
        config = self.config
        q, k, v = (
            self._random(1, self.tokens, heads, config.head_dim).transpose(1, 2)
            for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        )
        window = next((each for each in config.layer_windows if each is not None), None)
        return lambda: attention(q, k, v, causal=True, window=window)

    def _between(self) -> Callable[[], object]:
        config, tokens = self.config, self.tokens
        qkv = self._random(tokens, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        k, v = (self._random(1, config.num_kv_heads, tokens, config.head_dim) for _ in range(2))
        angles = torch.randn(tokens, config.head_dim // 2, device=self.device)
        rotary = torch.cat((angles.cos(), angles.sin()), 1)
        positions = torch.arange(tokens, device=self.device)
        slots = torch.zeros_like(positions)
        added, stream = self._random(tokens, config.hidden_size), self._random(tokens, config.hidden_size)
        gain = self._random(config.hidden_size)

        def call() -> None:
            add_rms_norm(added, stream, gain, config.rms_norm_eps)
            append_kv(qkv, rotary, k, v, slots, positions, num_heads=config.num_heads)
            add_rms_norm(added, stream, gain, config.rms_norm_eps)

        return call


@torch.inference_mode()
def measure_prompt(config: ModelConfig, tokens: int, device: torch.device, *, reps: int) -> dict[str, float]:
    """Time a prompt's parts, all layers, in seconds; STEP is their sum. Each part is timed by itself."""
    operands = PromptOperands(config, tokens, device)
    found: dict[str, float] = {}
    for part in parts(config, PREFILL, tokens, 0)[:-1]:
        found[part.name] = part.count * time_calls(operands.calls(part), device, reps=reps).p50
    return found | {STEP: sum(found.values())}


@dataclass(frozen=True)
class MeasuredStep:
    """A decode step: seconds of its parts, which add up to STEP, and of the board's energy, if that was asked for."""

    seconds: dict[str, float]
    energy: BoardEnergy | None


@torch.inference_mode()
def measure_decode(made: StreamedModel, batch: int, context: int, *, reps: int, energy: bool = False) -> MeasuredStep:
    """Time a decode step of the wave by replays of a CUDA graph, as `bench wave` does; a trace shares its parts out."""
    model, device = made.model, made.model.device
    wave = DecodeWave(model, batch=batch, stream=made.stream)
    kv = model.new_cache(num_slots=batch, capacity=context + 1)
    kv.k.normal_()
    kv.v.normal_()
    wave.bind_cache(kv)
    rows = torch.arange(batch, device=device)
    inputs = rows, torch.full_like(rows, context), rows.clone()
    logits = torch.empty(batch, model.config.vocab_size, device=device)

    def step() -> Tensor:
        return wave.wave.decode(*inputs, logits)

    seconds = time_calls([step], device, reps=reps).p50
    spans = stage_spans(wave.wave.trace_decode(*inputs, logits))
    spent = measure_energy(recorded([step], device), device) if energy else None
    wave.wave.check()
    return MeasuredStep(stage_seconds(spans, model.config, seconds), spent)
