"""A decode step of a LLaMA-family model as a task graph, proved, lowered and packed: one launch a token.

A layer: qkv (norm inside), attention by splits, its combination, o-proj + residual, gate/up (norm inside) with SiLU,
down + residual; after the last, the head. Norm gains are multiplied into the matrices; the residual stream stays in
float32 with the worker that owns its rows, and travels rounded to 16 bits. What decides about rounding depends on the
model and on the padded batch alone, so neither the number of workers nor a sequence's company changes its bits.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, UnsupportedError
from onewave.memory.kv_cache import PagedKVCache, StaticKVCache
from onewave.models.config.model_config import ModelConfig
from onewave.models.llama import Llama
from onewave.tiles.graph.builders import cuts
from onewave.tiles.graph.graph import TileGraph
from onewave.tiles.order.policies import plan
from onewave.tiles.proof.table import TaskTable, lower
from onewave.tiles.proof.verify import verify
from onewave.wave.launch.launch import AttentionSetup, Wave, co_resident, runs_here
from onewave.wave.plan.deal import Deal, fewest_workers
from onewave.wave.plan.layout import MOST_SPLITS, TILE_BYTES, TileShape, held_tiles, splits_of, tile_shape
from onewave.wave.plan.operations import INPUT, OUTPUT, AnyOperation, Attention, Combination, HeadGroups, Operation
from onewave.wave.plan.program import WaveProgram, build_program
from onewave.wave.plan.slices import MULTIPROCESSORS, passes, slices_of
from onewave.wave.weights.pack import StreamMatrix, Weight, WeightStream, pack_stream

__all__ = [
    "DecodePlan",
    "DecodeWave",
    "hand_offs",
    "packed_bytes",
    "plan_decode",
    "plan_program",
    "unsupported_because",
    "wave_weights",
    "workers_for",
]

# Attention tasks of a layer: about one a multiprocessor of today's cards, and a power of two a sequence and head.
_ATTENTION_TASKS = MULTIPROCESSORS
_MOST_BATCH = 16
# Tasks of a step. Planning and proving more takes half a minute and gigabytes (docs/log/wave.md, "Planning of sixteen
# sequences").
_MOST_TASKS = 1 << 17
# Of the bytes of a layer, by which filling rows up to larger tiles may lengthen the stream.
_MOST_FILLING = 1.03


@dataclass(frozen=True)
class DecodePlan:
    """A step's graph, its proved table, what the kernel reads, and how heads are grouped."""

    graph: TileGraph
    table: TaskTable
    program: WaveProgram
    groups: HeadGroups


def unsupported_because(config: ModelConfig, batch: int) -> str | None:
    """Why the wave can't run this model at this batch; None if it can."""
    padded = 1 << (batch - 1).bit_length()
    if not 1 <= batch <= _MOST_BATCH:
        return f"batch {batch}; up to {_MOST_BATCH} sequences run as one wave"
    if config.head_dim not in (32, 64, 128):
        return f"head_dim {config.head_dim}; 32, 64 or 128 run as one wave"
    if config.rope.rotary_dim != config.head_dim:
        return "rotation of part of a head"
    if config.o_bias or config.mlp_bias:
        return "biases of the output or feed-forward projections"
    for name, size in (("hidden", config.hidden_size), ("intermediate", config.intermediate_size)):
        if size % 64:
            return f"{name} size {size}, no multiple of 64"
    if config.num_heads * config.head_dim % 64 or config.num_kv_heads * config.head_dim % 32:
        return "heads whose width is no multiple of 64"
    shape = _shape(config, padded)
    widest = shape.most_tiles * shape.cols
    if padded <= 2 and max(config.hidden_size, config.num_heads * config.head_dim) > widest:
        return f"batch {batch} of hidden size {config.hidden_size}; up to {widest} columns fit a multiprocessor"
    tasks = _tasks(config, shape, padded)
    if tasks > _MOST_TASKS:
        return f"batch {batch} of a step of {tasks:,} tasks; up to {_MOST_TASKS:,} are planned"
    return None


def _tasks(config: ModelConfig, shape: TileShape, padded: int) -> int:
    """Tasks of a step's products, about, on a card of today's size."""
    found = 0
    for operation in _operations(config, shape, _groups(config, padded)).values():
        if isinstance(operation, Operation) and operation.weight is not None:
            share = cuts(operation.rows * operation.slices, shape.rows * MULTIPROCESSORS)
            passing = passes(operation.cols, operation.slices, shape)
            found += MULTIPROCESSORS * (cuts(share, shape.group) if passing else 1)
    return found


def _groups(config: ModelConfig, padded: int) -> HeadGroups:
    one = HeadGroups(config.num_heads, config.num_kv_heads, config.head_dim, 1)
    splits = min(MOST_SPLITS, max(1, _ATTENTION_TASKS // (one.count * padded)))
    merged = 1
    while merged < one.size and padded * one.count * one.size // merged > _ATTENTION_TASKS:
        merged *= 2
    splits = 1 << (splits.bit_length() - 1)
    few = padded == 1 and splits > 1
    return replace(one, splits=splits, merged=one.size if few else merged, few=few)


def _shape(config: ModelConfig, padded: int, weight_bytes: float = 2) -> TileShape:
    columns = max(config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)

    def made(images: int) -> TileShape:
        shape = tile_shape(padded, head_dim=config.head_dim, columns=columns, weight_bytes=weight_bytes, images=images)
        if shape.held and slices_of(config.hidden_size, config.intermediate_size, shape) > 1:
            return replace(shape, held=held_tiles(padded, config.head_dim, crowded=True))
        return shape

    if weight_bytes == 2:
        return made(1)
    # The larger tile passes faster, unless much of it were only filling up rows.
    small, large = made(1), made(2)
    return large if _padded_values(config, large) <= _MOST_FILLING * _padded_values(config, small) else small


def _padded_values(config: ModelConfig, shape: TileShape) -> int:
    """Weights of a layer with their rows filled up to whole tiles."""
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    qkv = width + 2 * config.num_kv_heads * config.head_dim
    sizes = ((qkv, hidden), (hidden, width), (2 * inner, hidden), (hidden, inner))
    return sum(rows * -(-cols // shape.cols) * shape.cols for rows, cols in sizes)


def workers_for(config: ModelConfig, *, batch: int, available: int, weight_bytes: float = 2) -> int:
    """Blocks of a launch, of `available` that the device runs side by side; none without a row block of the head.

    One or two sequences take all: their rings are what rides out a hand-off. More take the fewest that leave nobody
    with more row blocks of any matrix of a layer.
    """
    padded = 1 << (batch - 1).bit_length()
    shape = _shape(config, padded, weight_bytes)
    available = min(available, -(-config.vocab_size // shape.rows))
    if padded <= 2:
        return available
    products = [o for o in _operations(config, shape, _groups(config, padded)).values() if isinstance(o, Operation)]
    blocks = {o.rows // shape.rows * o.slices for o in products if o.weight is not None and not o.logits}
    return fewest_workers(blocks, available)


def plan_decode(
    config: ModelConfig, *, batch: int, workers: int, policy: str = "none", weight_bytes: float = 2
) -> DecodePlan:
    """Plan one step of up to `batch` sequences (rounded up to a power of two), prove it and lower it.

    policy: how tasks share counters in the proof; the kernel itself waits for the data. weight_bytes: 2, or 1 of
    rounded weights. Raises UnsupportedError, InvalidArgumentError.
    """
    reason = unsupported_because(config, batch)
    if reason is not None:
        raise UnsupportedError("one wave", got=reason)
    if workers < 1:
        raise InvalidArgumentError("one wave: workers", got=str(workers), allowed="1 or more")
    padded = 1 << (batch - 1).bit_length()
    groups, shape = _groups(config, padded), _shape(config, padded, weight_bytes)
    operations = _operations(config, shape, groups)
    deal = Deal(operations, shape, workers, padded, by_writer=True)
    # The first workers have more rows of the stream, so that the larger shares of gate_up are the last ones', whose
    # results `down` takes last.
    stream_shares = deal.shares(config.hidden_size // shape.rows, first=True)
    for name, operation in operations.items():
        if not isinstance(operation, Operation):
            deal.add_units(name)
        elif operation.residual:
            # Always the same rows a worker: the residual stream never leaves it.
            pieces = shape.rows // deal.height(operation)
            deal.add(name, shares=[share * pieces for share in stream_shares])
        else:
            deal.add(name)
    graph = deal.build.graph()
    order = np.arange(len(graph.tasks))
    schedule = plan(graph, order, policy, workers=workers, co_resident=workers, queues=deal.queues)
    table = lower(verify(schedule))
    return DecodePlan(graph, table, build_program(graph, table, operations, shape), groups)


def plan_program(config: ModelConfig, *, batch: int, workers: int, weight_bytes: float = 2) -> WaveProgram:
    """The program of plan_decode alone: what another process hands back, without the graph and its proof."""
    return plan_decode(config, batch=batch, workers=workers, weight_bytes=weight_bytes).program


def hand_offs(config: ModelConfig, *, batch: int, context: int, weight_bytes: float = 2) -> int:
    """Times that a step of `batch` sequences of `context` tokens waits for what other workers make: before attention,
    the output projection, gate_up, down and the next layer, and where splits are combined or slices of K added up."""
    padded = 1 << (batch - 1).bit_length()
    groups = _groups(config, padded)
    sliced = slices_of(config.hidden_size, config.intermediate_size, _shape(config, padded, weight_bytes)) > 1
    found = 0
    for window in config.layer_windows:
        keys = context + 1 if window is None else min(context + 1, window)
        combines = not groups.few and splits_of(keys, groups.splits, few=False) > 1
        found += 5 + combines + sliced
    return found


def _operations(config: ModelConfig, shape: TileShape, groups: HeadGroups) -> dict[str, AnyOperation]:
    hidden, inner = config.hidden_size, config.intermediate_size
    width = config.num_heads * config.head_dim
    qkv = width + 2 * config.num_kv_heads * config.head_dim
    slices = slices_of(hidden, inner, shape)
    found: dict[str, AnyOperation] = {}
    x = INPUT
    for layer in range(config.num_layers):
        first = layer == 0
        bias = layer * qkv if config.qkv_bias else None
        found[f"qkv{layer}"] = Operation(
            f"qkv{layer}", qkv, hidden, 1, x, f"qkv_of{layer}", norm=True, embedded=first, bias=bias
        )
        source, parts, attended = f"qkv_of{layer}", f"parts{layer}", f"attended{layer}"
        window = config.layer_windows[layer]
        attention = Attention(groups, layer, source, parts, attended, window)
        found[f"attend{layer}"] = attention
        if not groups.few:
            found[f"combine{layer}"] = Combination(groups, parts, attended, window)
        # Every worker that merges splits reads all of them: sooner done than a hand-off for one sequence, not for two.
        merges = attention if groups.few else None
        found[f"o{layer}"] = Operation(
            f"o{layer}", hidden, width, 1, attended, f"h{layer}", residual=True, embedded=first, merges=merges
        )
        found[f"gate_up{layer}"] = Operation(
            f"gate_up{layer}", 2 * inner, hidden, 1, f"h{layer}", f"act{layer}", gated=True, norm=True
        )
        x = f"x{layer + 1}"
        if slices == 1:
            found[f"down{layer}"] = Operation(f"down{layer}", hidden, inner, 1, f"act{layer}", x, residual=True)
        else:
            sums = f"down_parts{layer}"
            found[f"down{layer}"] = Operation(f"down{layer}", hidden, inner, slices, f"act{layer}", sums, partial=True)
            found[f"down{layer}_sum"] = Operation(None, hidden, inner, slices, sums, x, residual=True)
    rows = -(-config.vocab_size // shape.rows) * shape.rows
    found["head"] = Operation("head", rows, hidden, 1, x, OUTPUT, norm=True, logits=True)
    return found


def wave_weights(model: Llama) -> dict[str, Weight]:
    """The model's matrices by operation, norm gains with them. Raises UnsupportedError for packed (quantised) ones, and
    for those that lie in a stream already."""
    found: dict[str, Weight] = {}

    def dense(weight: object) -> Tensor:
        if not isinstance(weight, Tensor):
            got = "weights in a stream" if isinstance(weight, StreamMatrix) else "quantised weights"
            raise UnsupportedError("one wave", got=got, allowed="bfloat16 or float16 ones")
        return weight

    for index, layer in enumerate(model.weights.layers):
        gate_up = dense(layer.gate_up)
        gate, up = gate_up.chunk(2)
        found[f"qkv{index}"] = Weight((dense(layer.qkv),), layer.input_norm)
        found[f"o{index}"] = Weight((dense(layer.o),))
        found[f"gate_up{index}"] = Weight((gate, up), layer.post_norm)
        found[f"down{index}"] = Weight((dense(layer.down),))
    found["head"] = Weight((dense(model.weights.head),), model.weights.norm)
    return found


def packed_bytes(model: Llama) -> int:
    """About what packing a model writes: its matrices, in 16 bits."""
    return sum(matrix.nbytes for weight in wave_weights(model).values() for matrix in weight.matrices)


class DecodeWave:
    """A model's decode step as one launch, for up to `batch` sequences.

    workers: blocks of the launch, by default as `workers_for` says. delays: a test build that sleeps before tasks.
    stream: where the model's matrices lie already, with the program for `batch` that they were packed for; else they
    are packed here, and lie on the device twice. progress: told the bytes packed so far, packed_bytes(model) in the
    end. Raises UnsupportedError.
    """

    def __init__(
        self,
        model: Llama,
        *,
        batch: int,
        workers: int | None = None,
        delays: bool = False,
        stream: WeightStream | None = None,
        progress: Callable[[int], None] | None = None,
    ):
        if not runs_here(model.device) or model.dtype not in (torch.bfloat16, torch.float16):
            allowed = "bfloat16 or float16 on a card of compute capability 9.0"
            raise UnsupportedError("one wave", got=f"{model.dtype} on {model.device}", allowed=allowed)
        config = model.config
        self.batch, self.vocab_size, self.device = batch, config.vocab_size, model.device

        def told(done: int) -> None:
            if progress is not None:
                progress(done * TILE_BYTES)

        scales = lists = None
        if stream is None:
            count = workers or workers_for(config, batch=batch, available=co_resident(model.device))
            program = plan_program(config, batch=batch, workers=count)
            tiles = pack_stream(program, wave_weights(model), model.device, progress=told)
        else:
            program, tiles, scales, lists = stream.program, stream.tensor, stream.scales, stream.lists
        groups = _groups(config, 1 << (batch - 1).bit_length())
        weight_format = None if stream is None else stream.weight_format
        self._made_of = (program, tiles, _setup(model, groups), delays, weight_format, scales, lists)
        self.wave = self._bound(tokens=1)

    def _bound(self, *, tokens: int) -> Wave:
        program, tiles, setup, delays, weight_format, scales, lists = self._made_of
        return Wave(
            program,
            tiles,
            activation="silu",
            delays=delays,
            attention=setup,
            tokens=tokens,
            weight_format=weight_format,
            scales=scales,
            lists=lists,
        )

    def several(self, tokens: int) -> DecodeWave:
        """The same steps, so many in one launch, each sequence's next token its likeliest (`produce`); the weights lie
        there once. Raises UnsupportedError."""
        made = copy(self)
        made.wave = self._bound(tokens=tokens)
        return made

    def bind_cache(self, kv: StaticKVCache | PagedKVCache) -> None:
        """Use this cache from now on; `slots` are rows of a paged one's block table. Pages of each size are compiled
        for. Raises ShapeError."""
        self.wave.bind_cache(kv.k, kv.v, kv.block_table if isinstance(kv, PagedKVCache) else None)

    def produce(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        limits: Tensor | None = None,
        draws: Tensor | None = None,
    ) -> Tensor:
        """Feed one token a sequence, int64 [rows] each, and what comes of it as often as `several` says, or until its
        limits stop it: int64 [rows, LIMIT_WORDS], layout.limit_words of each (None: nothing does). draws: as
        Wave.decode_several (None: the likeliest token comes). Returns the tokens, int64 [tokens, rows], -1 behind a
        sequence's last one. The cache holds as many positions more."""
        logits = torch.empty(len(tokens), self.vocab_size, device=self.device)
        return self.wave.decode_several(tokens, positions, slots, logits, limits=limits, draws=draws)

    def interrupt(self) -> None:
        """Have launches of `produce` that are on their way end with the token that they are making."""
        self.wave.interrupt()

    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """Feed one token a sequence: int64 [rows] each. Returns float32 logits [rows, vocab]."""
        logits = torch.empty(len(tokens), self.vocab_size, device=self.device)
        return self.wave.decode(tokens, positions, slots, logits)


def _setup(model: Llama, groups: HeadGroups) -> AttentionSetup:
    config, layers = model.config, model.weights.layers

    def stacked(tensors: list[Tensor | None]) -> Tensor | None:
        there = [tensor.float() for tensor in tensors if tensor is not None]
        return torch.cat(there).contiguous() if there else None

    biases = stacked([layer.qkv_bias for layer in layers])
    embedding = model.weights.embedding
    assert isinstance(embedding, Tensor)
    return AttentionSetup(
        layers=len(layers),
        groups=groups,
        embedding=embedding,
        rotary=model.rotary.decode,
        biases=model.weights.norm.float() if biases is None else biases,
        q_norm=stacked([layer.q_norm for layer in layers]),
        k_norm=stacked([layer.k_norm for layer in layers]),
        hidden=config.hidden_size,
        eps=config.rms_norm_eps,
        scale=config.head_dim**-0.5,
    )
