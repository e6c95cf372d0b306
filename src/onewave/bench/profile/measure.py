"""Measure the parts that models/profile.py predicts: a prompt's operators one by one, a decode step from its trace."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from onewave.base.device import num_sms
from onewave.base.settings import Settings
from onewave.base.weight_formats import find_format
from onewave.bench.clock import recorded, time_calls
from onewave.bench.energy import BoardEnergy, measure_energy
from onewave.bench.engine.ahead import make_ready
from onewave.bench.engine.wave import WaveCase, random_step, traced_step
from onewave.engine.load.options import LoadOptions
from onewave.engine.load.sketches import sketch
from onewave.engine.load.streamed import StreamedModel
from onewave.engine.load.wave import load_streamed, program_of
from onewave.engine.wave_decode import unsuited
from onewave.models.config.model_config import ModelConfig
from onewave.models.decode_wave import DecodeWave
from onewave.models.profile import PREFILL, STEP, Part, parts, stage_seconds
from onewave.ops.append_kv import append_kv
from onewave.ops.attention import attention
from onewave.ops.linear import linear, linear_swiglu
from onewave.ops.linear.choose import LinearCall, product_of_tile
from onewave.ops.linear.hopper.launch import run
from onewave.ops.rms_norm import add_rms_norm
from onewave.tiles.sim.fit import stage_spans
from onewave.wave.weights.pack import WeightStream
from onewave.weights.fetch.sources import builtin_names, resolve

# More than the L2 cache holds, so that no call finds its weights there.
_BYTES_IN_ROTATION = 512 << 20
_MAX_COPIES = 64
# Calls of what has no weights in a recording: one alone would be charged for the recording's launch.
_CALLS = 8


def _rotated(rows: int, cols: int, device: torch.device) -> list[Tensor]:
    """Return random weights, as many copies as the L2 cache can't hold."""
    copies = min(_MAX_COPIES, max(2, -(-_BYTES_IN_ROTATION // (2 * rows * cols))))
    return [torch.randn(rows, cols, device=device, dtype=torch.bfloat16) for _ in range(copies)]


@dataclass(frozen=True)
class PromptOperands:
    """Random operands of one layer's operators for a prompt."""

    config: ModelConfig
    tokens: int
    device: torch.device

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def calls(self, part: Part) -> list[Callable[[], object]]:
        """Return one layer's calls of a part, on as many copies of its weights as the L2 cache can't hold."""
        if part.product is None:
            call = self._attention() if part.name == "attention" else self._between()
            return [call] * _CALLS  # its operands were just written, and lie in L2 where they fit
        rows, cols = part.product
        tokens = 1 if part.name == "head" else self.tokens
        product = linear_swiglu if part.name == "gate_up" else linear
        x = self._random(tokens, cols)
        return [partial(product, x, weight) for weight in _rotated(rows, cols, self.device)]

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


@torch.inference_mode()
def measure_tile(
    tile: tuple[int, int], tokens: int, rows: int, cols: int, device: torch.device, *, reps: int
) -> float | None:
    """Time a product [tokens, cols] x [rows, cols]^T by one tile of TILES, in seconds; None but on Hopper."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return None
    x = torch.randn(tokens, cols, device=device, dtype=torch.bfloat16)
    choice = product_of_tile(tile, tokens, rows, None, num_sms(device))
    calls = [partial(run, LinearCall(x, weight), choice) for weight in _rotated(rows, cols, device)]
    return time_calls(calls, device, reps=reps).p50


@dataclass(frozen=True)
class DecodeSteps:
    """Decode steps of a model with random weights. weights: a name of WEIGHT_BYTES. context: tokens in each cache."""

    model: str
    config: ModelConfig
    context: int
    weights: str
    device: torch.device

    def are_measured(self, batch: int) -> bool:
        """Whether those of `batch` sequences are: of a built-in model that runs as one wave here."""
        return self.model in builtin_names() and unsuited(self.config, self._options(batch)) is None

    def make_ready(self, batches: Sequence[int], pool: ProcessPoolExecutor | None) -> None:
        """Plan and compile what measuring launches, in the pool's processes."""
        for batch in batches:
            make_ready(self.config, self._options(batch), [WaveCase(batch, self.context, traced=True)], pool)

    def load(self, batch: int) -> StreamedModel | None:
        """Load the model for `batch` sequences; None where they are not measured."""
        if not self.are_measured(batch):
            return None
        location = resolve(self.model, Settings.from_env(), load_format="dummy")
        return load_streamed(location, self.config, self._options(batch))

    def blank(self, batch: int) -> StreamedModel | None:
        """Return load's model with all-zero weights, in no time: for measurements that do not depend on them."""
        if not self.are_measured(batch):
            return None
        config, how = self.config, self._options(batch)
        stream = WeightStream(program_of(config, how), how.dtype, self.device, how.weight_format)
        return StreamedModel(sketch(config, stream, max_model_len=how.positions(config)), stream)

    def _options(self, batch: int) -> LoadOptions:
        return LoadOptions(
            dtype=torch.bfloat16, device=self.device, max_num_seqs=batch, max_model_len=max(self.context + 1, 64),
            load_format="dummy", weight_format=find_format(self.weights),
        )  # fmt: skip


@dataclass(frozen=True)
class MeasuredStep:
    """A decode step: seconds of its parts, which add up to STEP, and of the board's energy, if that was asked for."""

    seconds: dict[str, float]
    energy: BoardEnergy | None


@torch.inference_mode()
def measure_decode(made: StreamedModel, batch: int, context: int, *, reps: int, energy: bool = False) -> MeasuredStep:
    """Time a decode step of the wave by replays of a CUDA graph, as `bench wave` does; a trace shares its parts out."""
    device = made.model.device
    wave, step = step_of(made, batch, context)
    seconds = time_calls([step], device, reps=reps).p50
    spans = stage_spans(traced_step(wave, *step.args))
    spent = measure_energy(recorded([step], device), device) if energy else None
    wave.wave.check()
    return MeasuredStep(stage_seconds(spans, made.model.config, seconds), spent)


@torch.inference_mode()
def step_of(made: StreamedModel, batch: int, context: int) -> tuple[DecodeWave, partial[Tensor]]:
    """Return a wave and a decode step of it after `context` random keys a sequence, with the arguments of `decode`."""
    model, wave = made.model, DecodeWave(made.model, batch=batch, stream=made.stream)
    kv, inputs = random_step(model, batch, context)
    wave.bind_cache(kv)
    logits = torch.empty(batch, model.config.vocab_size, device=model.device)
    return wave, partial(wave.wave.decode, *inputs, logits)
