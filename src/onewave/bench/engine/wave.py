"""A decode step as one wave beside the same step as a CUDA graph of plain operators, and as what torch.compile makes of
it, on one model and one cache."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from onewave.base.errors import ModelError, UnsupportedError
from onewave.base.weight_formats import COMPACT, ROUNDINGS
from onewave.bench.ceilings import Ceiling
from onewave.bench.clock import Summary, time_calls
from onewave.bench.engine.compiled_step import compiled_step
from onewave.bench.engine.latency import decode_weight_bytes, kv_bytes_read
from onewave.bench.engine.random_codes import Q4_K_M
from onewave.bench.ledger import Measurement
from onewave.engine.load.options import NAMES_8_BITS
from onewave.engine.load.self_check import self_check
from onewave.memory.kv_cache import KVCache
from onewave.models.batch import Batch
from onewave.models.decode_wave import DecodeWave
from onewave.models.llama import MATRICES, Llama, MatrixWeight
from onewave.models.llama_plan import DecodeStep, hand_offs, unsupported_because
from onewave.ops.linear import LinearWeight
from onewave.tiles.sim.trace import Trace
from onewave.wave.weights.pack import WeightStream

# Launches of which a trace has the medians: fewer leave more of a launch's chance in it.
_TRACED_LAUNCHES = 15
SPREAD = 16
"""Standard deviation of the stored numbers of a cache in 8 bits; the numbers themselves are around 1."""


@dataclass(frozen=True)
class WaveResult:
    """Seconds a step. step_bytes: weights and cache that a step reads. difference: of the self-check, for the wave; for
    torch.compile's step, from the plain operators' logits, over the largest. page: keys of a page, where the cache is
    paged. weights: what the wave keeps them as, if not as they are. hops: hand-offs that a step of the wave waits for.
    kv_dtype: of a cache in 8 bits, by name. plan: a name, of another plan than the wave's own. predicted: seconds, by
    simulation. same_bits: whether the logits are bitwise those of the wave's own plan.
    """

    path: str
    batch: int
    context: int
    seconds: Summary
    step_bytes: int
    difference: float | None = None
    page: int | None = None
    weights: str | None = None
    kv_dtype: str | None = None
    hops: int | None = None
    plan: str | None = None
    predicted: float | None = None
    same_bits: bool | None = None

    @property
    def gigabytes_per_second(self) -> float:
        """10^9 bytes a second at the median."""
        return self.step_bytes * 1e-9 / self.seconds.p50

    def microseconds_per_hop(self, ceiling: Ceiling) -> float | None:
        """Return a step's time beyond its bytes at the ceiling (in GB/s), over its hand-offs."""
        if self.hops is None:
            return None
        return (self.seconds.p50 - self.step_bytes / (ceiling.value * 1e9)) * 1e6 / self.hops

    def measurement(self, model: str, dtype: str, ceiling: Ceiling) -> Measurement:
        extra = {
            "path": self.path,
            "batch_size": self.batch,
            "context": self.context,
            "dtype": dtype,
            "quantization": self.weights if self.weights in (*ROUNDINGS, Q4_K_M) else None,
            "kv_cache_dtype": self.kv_dtype or dtype,
            "compact": self.weights == COMPACT.name and self.path.startswith("wave"),
            "bytes_per_step": self.step_bytes,
            "ceiling_share": self.gigabytes_per_second / ceiling.value,
            "self_check": self.difference,
        }
        if self.hops is not None:
            extra |= {"hops": self.hops, "us_per_hop": self.microseconds_per_hop(ceiling)}
        if self.page is not None:
            extra |= {"page_size": self.page}
        if self.plan is not None:
            extra |= {"plan": self.plan, "same_bits": self.same_bits}
        if self.predicted is not None:
            extra |= {"predicted_ms": self.predicted * 1e3}
        return Measurement(model, "decode_step", "ms", self.seconds.scaled(1e3), ceiling, extra)


@dataclass(frozen=True)
class WaveCase:
    """A decode step of `batch` sequences that hold `context` tokens each, and what is timed of it.

    page: also time the wave with the same cache in pages of so many keys, in any order. compiled: also time the step
    that torch.compile makes (compiled_step.py), compiled again for each case. traced: also run the wave with times of
    every task.
    """

    batch: int
    context: int
    page: int | None = None
    compiled: bool = False
    traced: bool = False


@torch.inference_mode()
def unpacked(model: Llama) -> Llama:
    """The model with copies of all matrices that lie in a stream."""

    def plain(matrix: MatrixWeight) -> LinearWeight:
        return matrix if isinstance(matrix, LinearWeight) else matrix.dense().clone()

    weights = model.weights
    layers = [replace(layer, **{name: plain(getattr(layer, name)) for name in MATRICES}) for layer in weights.layers]
    whole = replace(weights, layers=tuple(layers), head=plain(weights.head))
    found = Llama(model.config, whole, max_model_len=model.max_model_len)
    found.kv_format = model.kv_format
    return found


def cache_of(model: Llama, case: WaveCase) -> KVCache:
    """Make the cache that a case is measured on: without a block table, except of 8 bits."""
    page = case.page or 1
    new_cache = model.new_cache if model.kv_format.dtype is model.dtype else model.new_row_cache
    return new_cache(num_slots=case.batch, capacity=(case.context // page + 1) * page)


@torch.inference_mode()
def measure_wave(
    model: Llama,
    case: WaveCase,
    *,
    reps: int,
    stream: WeightStream | None = None,
    show: Callable[[str], None] = lambda text: None,
    report: Callable[[str], None] = lambda text: None,
    measured: Callable[[WaveResult], None] = lambda result: None,
) -> tuple[list[WaveResult], Trace | None]:
    """Time one decode step on every path, as replays of CUDA graphs.

    stream: where the model's matrices lie, for this batch; plain operators then get copies of them as 16-bit values.
    show: told what runs; measured: each result as it is there; report: the reason where torch.compile makes no step.
    Raises UnsupportedError where the wave does not run, ShapeError for another page size.
    """
    batch, context, page = case.batch, case.context, case.page
    reason = unsupported_because(model.config, batch)
    if reason is not None:
        raise UnsupportedError("bench wave", got=reason)
    in_bytes = model.kv_format.dtype is not model.dtype
    if in_bytes and (page is not None or case.compiled):
        raise UnsupportedError("bench wave", got="a cache in 8 bits", allowed="without a page size and torch.compile")
    if context >= model.max_model_len:
        raise UnsupportedError("context", got=str(context), allowed=f"below {model.max_model_len}")
    stage = f"batch {batch}, context {context}"
    show(f"{stage}: self-check")
    wave = DecodeWave(model, batch=batch, stream=stream)
    difference = self_check(model, wave, batch)
    wave.wave.check()
    config, device = model.config, model.device
    kv = cache_of(model, case)
    for cache in (*kv.k, *kv.v):
        # Numbers of about 1 times the scale that the model was given.
        cache.copy_(torch.randn(cache.shape, device=device, dtype=model.dtype) * (SPREAD if in_bytes else 1))
    tokens = torch.arange(batch, device=device)
    positions, slots = torch.full_like(tokens, context), torch.arange(batch, device=device)
    logits = torch.empty(batch, config.vocab_size, device=device)
    kv_bytes = batch * kv_bytes_read(config, model.kv_format.dtype, context)
    kv_name = NAMES_8_BITS.get(model.kv_format.dtype)
    weight_format = None if stream is None else stream.weight_format
    hops = hand_offs(DecodeStep(config, batch, weight_format), context=context)

    def step() -> Tensor:
        return wave.wave.decode(tokens, positions, slots, logits)

    results: list[WaveResult] = []

    def timed(name: str, call: Callable[[], Tensor], **more: Any) -> None:
        show(f"{stage}: {name}")
        step_bytes = decode_weight_bytes(model.weights, unpacked=not name.startswith("wave"), stream=stream) + kv_bytes
        seconds = time_calls([call], device, reps=reps)
        named = None if weight_format is None else weight_format.name
        results.append(WaveResult(name, batch, context, seconds, step_bytes, weights=named, kv_dtype=kv_name, **more))
        measured(results[-1])

    wave.bind_cache(kv)
    plain = Batch.decode(tokens, positions, slots)
    timed("wave", step, difference=difference, hops=hops)
    # Only now: what the other paths need is unpacked, and their kernels are compiled, behind the wave's figure.
    show(f"{stage}: unpacking the matrices")
    other = unpacked(model)
    timed("graph", lambda: other.forward(plain, kv))
    if case.compiled:
        try:
            show(f"{stage}: torch.compile compiles")
            their_step = compiled_step(other, kv, context)
            expected = other.forward(plain, kv)
            difference = float((their_step(tokens, positions) - expected).abs().max() / expected.abs().max())
            timed("torch.compile", lambda: their_step(tokens, positions), difference=difference)
        except Exception as error:  # whatever a compiler may raise; the other paths' figures stay
            report(f"torch.compile: no step, {type(error).__name__}: {str(error)[:200]}".splitlines()[0])
    traced = traced_step(wave, tokens, positions, slots, logits) if case.traced else None
    if page is not None:
        expected = step().clone()
        wave.bind_cache(in_pages(kv, page))
        if not torch.equal(step(), expected):
            raise ModelError("bench wave", got="other bits from a paged cache than from a plain one")
        timed("wave, pages", step, page=page, hops=hops)
    torch.cuda.synchronize(device)
    wave.wave.check()
    return results, traced


def random_step(model: Llama, batch: int, context: int) -> tuple[KVCache, tuple[Tensor, Tensor, Tensor]]:
    """A cache of `context` random keys a sequence; tokens, positions and slots of the next step."""
    kv = model.new_cache(num_slots=batch, capacity=context + 1)
    kv.k.normal_()
    kv.v.normal_()
    rows = torch.arange(batch, device=model.device)
    return kv, (rows, torch.full_like(rows, context), rows.clone())


def traced_step(wave: DecodeWave, *inputs: Tensor) -> Trace:
    """Trace some launches of a decode step; each time is their median. inputs: of Wave.decode."""
    return Trace.median([wave.wave.trace_decode(*inputs) for _ in range(_TRACED_LAUNCHES)])


def in_pages(kv: KVCache, page: int) -> KVCache:
    """A copy of a cache, whose capacity is whole pages, in pages in any order."""
    layers, slots, heads, capacity, dim = kv.k.shape
    order = torch.randperm(slots * (capacity // page), device=kv.k.device)
    pools: list[Tensor] = []
    for cache in (kv.k, kv.v):
        pool = cache.new_empty(layers, len(order), heads, page, dim)
        pool[:, order] = cache.reshape(layers, slots, heads, -1, page, dim).transpose(2, 3).flatten(1, 2)
        pools.append(pool)
    return KVCache(*pools, block_table=order.view(slots, -1).int())
