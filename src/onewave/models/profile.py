"""Bounds of each part of a model's prompts and decode steps: FLOPs, bytes, predicted time, verdict. Needs no torch.

A row is one part of all layers together: the products qkv, o, gate_up (with SwiGLU) and down, the head of the tokens
whose logits are wanted, attention, and the small operators between them (norms, rotation and append of keys and
values). FLOPs count what the part computes, bytes what it has to read and write at least once, in 16 bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from onewave.base.gpus import GPU
from onewave.base.weight_formats import WeightFormat
from onewave.models.config.model_config import ModelConfig
from onewave.models.llama_plan import DecodeStep, unsupported_because
from onewave.models.wave_prediction import kept_costs, predict_step
from onewave.tiles.sim.energy import energy_mj
from onewave.tiles.sim.fit import stage_spans

PREFILL, DECODE = "prefill", "decode"
STEP = "step"
"""The row of all parts together."""
# Fitted to 256 to 8,192 tokens of an 8B on an H200 (docs/log/operators.md): attention's share of the sheet's FLOPs, and
# what a launch of it takes beside them.
_ATTENTION_SHARE, _ATTENTION_US = 0.8, 8.5
_ATTENTION_ROWS = 128
# Small operators between products, over the time of their bytes, where those don't fit the L2 cache; and a launch's.
_SMALL_OVER_BYTES, _SMALL_US = 1.16, 0.4
# A prompt that takes so long brings the board to its power limit, which lowers its clocks: times of products and
# attention over those at full clocks. Fitted to 8,192 tokens of the same.
_SUSTAINED_SECONDS, _SUSTAINED = 0.1, 1.1
# A decode step under a CUDA graph: share of the sheet's FLOPs, and what a product of one sequence, one of several, and
# attention of a layer (with the norms and the append) take beside their bytes. Fitted to 1 and 8 sequences of a 1B and
# an 8B (ledger/h200.jsonl:2882, 2884, 2886 and 2888): all four within 8 %.
_FLOPS_SHARE = 0.76
_ONE_US, _SEVERAL_US, _STEP_ATTENTION_US = 1.5, 6.5, 11.0
# A part is bound by a ceiling that its time is this near to; else by latency.
_NEAR = 0.6


@dataclass(frozen=True)
class Part:
    """One part of a pass of `rows` tokens (prefill) or sequences (decode).

    context: tokens before them. products: (rows of the weights, columns), each `count` times. flops, memory_bytes: of
    all layers, at least. l2_bytes: what thread blocks ask the L2 cache for, in products with tiles of 128 x 256.
    """

    phase: str
    name: str
    rows: int
    context: int
    count: int
    flops: float
    memory_bytes: float
    l2_bytes: float
    product: tuple[int, int] | None = None

    @property
    def energy_mj(self) -> float:
        """Millijoules by the bytes that move on each level and the FLOPs, at tiles/sim/energy.py's costs."""
        moved = {"memory": round(self.memory_bytes), "L2": round(self.l2_bytes)}
        return sum(energy_mj(moved, round(self.flops)).values())

    @property
    def intensity(self) -> float:
        """FLOPs a byte of device memory."""
        return self.flops / self.memory_bytes if self.memory_bytes else 0.0


@dataclass(frozen=True)
class Verdict:
    """Shares of the GPU's ceilings in a time, what bounds the part, and why."""

    compute: float
    memory: float
    bound: str
    reason: str


def verdict(part: Part, seconds: float, gpu: GPU) -> Verdict:
    """Judge a part by the time that it takes."""
    compute, memory = part.flops / (gpu.tflops * 1e12 * seconds), part.memory_bytes / (gpu.bandwidth * 1e9 * seconds)
    ridge = gpu.tflops * 1e3 / gpu.bandwidth
    side = f"{part.intensity:,.1f} FLOPs a byte, {gpu.name}'s ridge is {ridge:,.0f}"
    if max(compute, memory) < _NEAR:
        why = f"{compute:.0%} of its FLOPs and {memory:.0%} of its bandwidth: waits and tails; {side}"
        return Verdict(compute, memory, "latency", why)
    bound = "compute" if compute > memory else "memory"
    return Verdict(compute, memory, bound, f"{max(compute, memory):.0%} of that ceiling; {side}")


def parts(config: ModelConfig, phase: str, rows: int, context: int, *, weight_bytes: float = 2) -> list[Part]:
    """List the parts of a pass, and the whole as STEP.

    rows: tokens of one prompt, or sequences of a decode step. context: tokens before them, of each sequence.
    weight_bytes: of a weight, as the pass reads it.
    """
    found = list(_parts(config, phase, rows, context, weight_bytes))
    flops, memory, l2 = (sum(getattr(part, name) for part in found) for name in ("flops", "memory_bytes", "l2_bytes"))
    return [*found, Part(phase, STEP, rows, context, 1, flops, memory, l2)]


def _parts(config: ModelConfig, phase: str, rows: int, context: int, weight_bytes: float) -> Iterator[Part]:
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_layers
    width, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def product(name: str, height: int, cols: int, count: int, tokens: int, *, out: int | None = None) -> Part:
        flops = 2.0 * tokens * height * cols
        moved = weight_bytes * height * cols + 2.0 * tokens * (cols + (height if out is None else out))
        asked = -(-tokens // 128) * height * cols * weight_bytes + -(-height // 256) * tokens * cols * 2.0
        return Part(
            phase, name, rows, context, count, count * flops, count * moved, count * max(asked, moved), (height, cols)
        )

    yield product("qkv", width + 2 * kv, hidden, layers, rows)
    yield _attention(config, phase, rows, context)
    yield product("o", hidden, width, layers, rows)
    yield product("gate_up", 2 * inner, hidden, layers, rows, out=inner)
    yield product("down", hidden, inner, layers, rows)
    if phase == PREFILL:
        # Two norms that read the stream and what is added, and write both; q, k and v turned, and k, v stored.
        small = layers * rows * 2.0 * (2 * 4 * hidden + 2 * (width + 2 * kv))
        yield Part(phase, "between", rows, context, layers, 0.0, small, small)
    wanted = 1 if phase == PREFILL else rows
    yield product("head", config.vocab_size, hidden, 1, wanted)


def _attention(config: ModelConfig, phase: str, rows: int, context: int) -> Part:
    flops = moved = asked = 0.0
    width, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sequences, queries = (1, rows) if phase == PREFILL else (rows, 1)
    for window in config.layer_windows:
        first = context + 1
        last = context + queries
        seen = [min(keys, window or keys) for keys in (first, last)]
        pairs = queries * (seen[0] + seen[1]) / 2
        keys = min(last, (window or last) + queries)
        flops += 4.0 * sequences * pairs * width
        moved += 2.0 * sequences * (2 * queries * width + 2 * keys * kv)
        asked += 2.0 * sequences * (2 * queries * width + -(-queries // _ATTENTION_ROWS) * keys * width * 2)
    return Part(phase, "attention", rows, context, config.num_layers, flops, moved, max(asked, moved))


@dataclass(frozen=True)
class Predictor:
    """Predict parts of one model on one GPU. weight_format: of the wave's stream.

    A decode step that does not run as one wave is predicted as a CUDA graph of operators, which reads 16 bits a weight.
    """

    config: ModelConfig
    gpu: GPU
    weight_format: WeightFormat | None = None

    def runs_as_wave(self, phase: str, rows: int) -> bool:
        """Whether a pass is one wave's step."""
        return phase == DECODE and self.gpu.wave and unsupported_because(self.config, rows) is None

    def _step(self, rows: int) -> DecodeStep:
        return DecodeStep(self.config, rows, self.weight_format)

    def parts(self, phase: str, rows: int, context: int) -> list[Part]:
        """List the parts of a pass, as parts does, with weights of the bytes that are read."""
        width = self._step(rows).weight_bytes if self.runs_as_wave(phase, rows) else 2
        return parts(self.config, phase, rows, context, weight_bytes=width)

    def seconds(self, phase: str, rows: int, context: int) -> dict[str, float]:
        """Predict the time of each part, by name, and of the STEP."""
        if self.runs_as_wave(phase, rows):
            return self._wave(rows, context)
        listed = self.parts(phase, rows, context)[:-1]
        found = {part.name: self._in_graph(part) if phase == DECODE else self._alone(part) for part in listed}
        if phase == PREFILL and sum(found.values()) > _SUSTAINED_SECONDS:
            found |= {part.name: found[part.name] * _SUSTAINED for part in listed if part.flops and part.name != "head"}
        return found | {STEP: sum(found.values())}

    def _alone(self, part: Part) -> float:
        if part.name == "attention":
            us = part.flops / (self.gpu.tflops * _ATTENTION_SHARE) * 1e-6
            return (us + part.count * _ATTENTION_US) * 1e-6
        if part.product is None:
            cold = part.memory_bytes > part.count * self.gpu.l2_bytes
            us = part.memory_bytes / self.gpu.read_bandwidth * 1e-3 * (_SMALL_OVER_BYTES if cold else 1)
            return (us + part.count * 3 * _SMALL_US) * 1e-6
        tokens = 1 if part.name == "head" else part.rows
        return part.count * self.gpu.product_us(tokens, *part.product) * 1e-6

    def _in_graph(self, part: Part) -> float:
        us = max(
            part.flops / (self.gpu.tflops * _FLOPS_SHARE) * 1e-6, part.memory_bytes / self.gpu.read_bandwidth * 1e-3
        )
        launch = _STEP_ATTENTION_US if part.product is None else _ONE_US if part.rows == 1 else _SEVERAL_US
        return (us + part.count * launch) * 1e-6

    def _wave(self, rows: int, context: int) -> dict[str, float]:
        gpu = self.gpu
        costs = kept_costs()
        costs = replace(costs, memory_bandwidth=costs.memory_bandwidth * gpu.bandwidth / 4800)
        made = predict_step(self._step(rows), costs, workers=gpu.sms, context=context)
        return stage_seconds(stage_spans(made), self.config, made.makespan * 1e-9)


def stage_seconds(spans: dict[str, float], config: ModelConfig, whole: float) -> dict[str, float]:
    """Turn a step's stages, in ns a layer, into seconds of each part, which add up to the whole."""
    named = {"attend": "attention", "combine": "attention"}
    found: dict[str, float] = {}
    for stage, span in spans.items():
        name = named.get(stage, stage)
        found[name] = found.get(name, 0.0) + span * 1e-9 * (1 if stage == "head" else config.num_layers)
    scale = whole / sum(found.values())
    return {name: seconds * scale for name, seconds in found.items()} | {STEP: whole}
