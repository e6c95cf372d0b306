"""Plan a LLaMA-family decode step as one launch: a task graph, dealt out, proved and lowered. Needs no torch.

The engine launches this plan. `onewave tiles`, `bench predict` and the lab build the same one.

Operations of a layer: qkv (norm inside), attention by splits, combination of splits, o-proj + residual, gate/up (norm
inside) with SiLU, down + residual. The head follows the last layer. Norm gains are multiplied into the matrices. The
residual stream stays in float32 with the worker that owns its rows, and travels rounded to 16 bits. Rounding depends on
the model and the padded batch alone, so results are batch-invariant, and the same on any number of workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

from onewave.base.errors import InvalidArgumentError, UnsupportedError, VerificationError
from onewave.base.weight_formats import MixedFormat, WeightFormat, times_as_wide
from onewave.models.config.model_config import ModelConfig
from onewave.tiles.graph.builders import cuts
from onewave.tiles.graph.graph import TileGraph
from onewave.tiles.order.policies import plan
from onewave.tiles.order.schedule import Ints
from onewave.tiles.proof.table import TaskTable, lower
from onewave.tiles.proof.verify import verify
from onewave.wave.plan.deal import Deal, fewest_workers
from onewave.wave.plan.layout import (
    DIGITS_BATCH,
    DIGITS_BATCH_OF_BYTES,
    MAX_SPLITS,
    TileShape,
    held_tiles,
    splits_of,
    tile_shape,
)
from onewave.wave.plan.operations import INPUT, OUTPUT, AnyOperation, Attention, Combination, HeadGroups, Operation
from onewave.wave.plan.pace import Pace, pace_of
from onewave.wave.plan.program import WaveProgram, build_program
from onewave.wave.plan.slices import NUM_SMS, passes, passes_once, slices_of

# Attention tasks of a layer: about one an SM of today's GPUs, and a power of two a sequence and head. More tasks cost
# merging, fewer leave SMs without keys to read.
_ATTENTION_TASKS = NUM_SMS
MAX_BATCH = 16
"""Sequences of one step."""
# Tasks of a step. Planning and proving more takes half a minute and gigabytes (docs/log/wave.md, "Planning of sixteen
# sequences").
_MAX_TASKS = 1 << 17
# How many times its bytes a layer's stream may take because rows are filled up to larger tiles. Larger: more shapes use
# the tile of two images, which streams faster, and more zeros.
_MAX_FILLING = 1.03
# The same of 4-bit weights, of which a larger tile saves more (docs/log/weight-formats.md).
_MAX_FILLING_OF_NIBBLES = 1.06
MAX_WORKERS = 4096
"""Thread blocks of a step, more than any GPUs run at once that may share one."""
# Fewer tiles than a hand-off of activations and the tiles that wait for it may hold.
_SHORTEST_RING = 4
MAX_CONTEXT = 1 << 30
"""Tokens of a cache, beyond those of any model today."""
SYNC_POLICY = "none"
"""The policy by which the launched program's proof shares counters: one a stage, fewest words."""


@dataclass(frozen=True)
class DecodeStep:
    """A decode step to plan: its model, the number of sequences, and the format of its weights.

    batch: rounded up to a power of two. weight_format: None for bfloat16 and float16.
    """

    config: ModelConfig
    batch: int = 1
    weight_format: WeightFormat | None = None

    @property
    def padded(self) -> int:
        """The batch that is planned for."""
        return 1 << (self.batch - 1).bit_length()

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight in the stream."""
        return 2 if self.weight_format is None else self.weight_format.weight_bytes

    @property
    def digits(self) -> bool:
        """Whether its products take activations in digits."""
        form = self.weight_format
        most = DIGITS_BATCH if self.weight_bytes < 1 else DIGITS_BATCH_OF_BYTES
        return form is not None and form.digits and self.padded <= most

    @property
    def widths(self) -> tuple[tuple[str, int], ...]:
        """Matrices by name with their Operation.width, where formats are mixed; of others it is 1."""
        return self.weight_format.widths if isinstance(self.weight_format, MixedFormat) else ()


@dataclass(frozen=True)
class DealtStep:
    """A decode step before its proof: its graph, and each worker's task ids in order.

    operations: by opcode name. shape: how products are tiled.
    """

    step: DecodeStep
    graph: TileGraph
    queues: tuple[tuple[int, ...], ...]
    operations: Mapping[str, AnyOperation]
    shape: TileShape
    groups: HeadGroups
    pace: Pace

    @property
    def ahead_bytes(self) -> int:
        """Weight bytes that a worker's ring holds while the worker waits."""
        return self.shape.ring * self.shape.tile_bytes

    @property
    def more_in_flight(self) -> int:
        """Tiles in flight beyond the wave's own number."""
        return self.pace.flight - pace_of(self.shape, self.operations).flight

    def program(self, table: TaskTable) -> WaveProgram:
        """Lay the proved table out for the kernel. Raises UnsupportedError for a table of another order,
        VerificationError for a hand-off that the kernel does not have."""
        return build_program(self.graph, table, self.operations, self.shape, self.pace)

    def proved(self, policy: str = SYNC_POLICY) -> DecodePlan:
        """Prove the step and lay it out. policy: how tasks share counters in the proof; the kernel itself waits for the
        data. Raises VerificationError, UnsupportedError."""
        workers, order = len(self.queues), np.arange(len(self.graph.tasks))
        schedule = plan(self.graph, order, policy, workers=workers, co_resident=workers, queues=self.queues)
        verified = verify(schedule)
        table = lower(verified)
        in_turn = all(first < second for queue in self.queues for first, second in pairwise(queue))
        order = order if in_turn else verified.order
        return DecodePlan(self.step, self.graph, order, table, self.program(table), self.groups, self.more_in_flight)


@dataclass(frozen=True)
class DecodePlan:
    """A step's graph, its proved table, what the kernel reads, and how heads are grouped. order: of all tasks, allowed
    by the proof. more_in_flight: as DealtStep's."""

    step: DecodeStep
    graph: TileGraph
    order: Ints
    table: TaskTable
    program: WaveProgram
    groups: HeadGroups
    more_in_flight: int = 0


def unsupported_because(config: ModelConfig, batch: int) -> str | None:
    """Say why the wave can't run this model at this batch; None if it can."""
    step = DecodeStep(config, batch)
    padded = step.padded
    if not 1 <= batch <= MAX_BATCH:
        return f"batch {batch}; up to {MAX_BATCH} sequences run as one wave"
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
        return "heads of a width that is no multiple of 64"
    shape = _shape(step)
    widest = shape.max_tiles * shape.cols
    if padded <= 2 and max(config.hidden_size, config.num_heads * config.head_dim) > widest:
        return f"batch {batch} of hidden size {config.hidden_size}; up to {widest} columns fit an SM"
    tasks = _tasks(step, shape)
    if tasks > _MAX_TASKS:
        return f"batch {batch} of a step of {tasks:,} tasks; up to {_MAX_TASKS:,} are planned"
    return None


def planned_facts(config: ModelConfig) -> dict[str, object]:
    """Return all of a model that its program follows from, by name."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
        "qkv_bias", "o_bias", "mlp_bias", "layer_windows",
    )  # fmt: skip
    return {"rotary_dim": config.rope.rotary_dim, **{name: getattr(config, name) for name in names}}


def _check_supported(step: DecodeStep) -> None:
    reason = unsupported_because(step.config, step.batch)
    if reason is not None:
        raise UnsupportedError("one wave", got=reason)


def _tasks(step: DecodeStep, shape: TileShape) -> int:
    """Estimate the tasks of a step's products on NUM_SMS SMs."""
    found = 0
    for product in _products(step, shape):
        share = cuts(product.rows * product.slices, shape.rows * NUM_SMS)
        passing = passes(product.cols, product.slices, shape)
        found += NUM_SMS * (cuts(share, shape.group) if passing else 1)
    return found


def _products(step: DecodeStep, shape: TileShape) -> list[Operation]:
    operations = _operations(step, shape, head_groups(step)).values()
    return [each for each in operations if isinstance(each, Operation) and each.weight is not None]


def head_groups(step: DecodeStep, splits: int | None = None) -> HeadGroups:
    """Group query heads for a step's attention, and choose merging tasks and, where they are not given, splits."""
    config, padded = step.config, step.padded
    one = HeadGroups(config.num_heads, config.num_kv_heads, config.head_dim, 1)
    splits = splits or min(MAX_SPLITS, max(1, _ATTENTION_TASKS // (one.count * padded)))
    merged = 1
    while merged < one.size and padded * one.count * one.size // merged > _ATTENTION_TASKS:
        merged *= 2
    splits = 1 << (splits.bit_length() - 1)
    few = padded == 1 and splits > 1
    return replace(one, splits=splits, merged=one.size if few else merged, reader_merges=few)


def _shape(step: DecodeStep, slices: int | None = None) -> TileShape:
    config, padded, weight_bytes = step.config, step.padded, step.weight_bytes
    row_columns = max(config.hidden_size, config.num_heads * config.head_dim)

    def made(images: int) -> TileShape:
        tiling = partial(
            tile_shape, padded, head_dim=config.head_dim, weight_bytes=weight_bytes, images=images,
            digits=row_columns if step.digits else 0,
        )  # fmt: skip
        shape = tiling(columns=max(row_columns, config.intermediate_size))
        if passes_once(config.hidden_size, shape):
            return tiling(columns=row_columns)
        if shape.held and (slices or slices_of(config.hidden_size, config.intermediate_size, shape)) > 1:
            return replace(shape, held=held_tiles(padded, config.head_dim, crowded=True))
        return shape

    if weight_bytes == 2:
        return made(1)
    # A larger tile streams faster, unless much of it only fills up rows.
    # Four images of 16 sequences would spill.
    sizes = (1, 2, 4) if weight_bytes < 1 and padded <= 8 else (1, 2)
    # A tile of the widest weights is one image at least.
    widest = max((times_as_wide(width) for _, width in step.widths), default=1)
    sizes = tuple(images for images in sizes if images >= widest)
    if not sizes:
        raise UnsupportedError("one wave", got=f"weights of 16 bits among 4-bit ones for {padded} sequences")
    smallest, *larger = map(made, sizes)
    most = _MAX_FILLING if weight_bytes >= 1 else _MAX_FILLING_OF_NIBBLES
    filled = most * _padded_values(config, smallest)
    return next((shape for shape in reversed(larger) if _padded_values(config, shape) <= filled), smallest)


def _padded_values(config: ModelConfig, shape: TileShape) -> int:
    """Count a layer's weights, with its rows filled up to whole tiles."""
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    qkv = width + 2 * config.num_kv_heads * config.head_dim
    sizes = ((qkv, hidden), (hidden, width), (2 * inner, hidden), (hidden, inner))
    return sum(rows * -(-cols // shape.cols) * shape.cols for rows, cols in sizes)


def workers_for(step: DecodeStep, *, available: int) -> int:
    """Choose the thread blocks of a launch, so that each has a row block of the head.

    available: blocks that the device runs at once. One or two sequences take all of them: more rings ride out a
    hand-off better. Larger batches take the fewest blocks that add no row block of any matrix to the busiest one.
    Raises UnsupportedError, InvalidArgumentError.
    """
    _check_supported(step)
    check_workers(available)
    shape = _shape(step)
    available = min(available, -(-step.config.vocab_size // shape.rows))
    if step.padded <= 2:
        return available
    blocks = {each.rows // shape.rows * each.slices for each in _products(step, shape) if not each.logits}
    return fewest_workers(blocks, available)


def plan_decode(step: DecodeStep, *, workers: int, policy: str = SYNC_POLICY, context: int = 0) -> DecodePlan:
    """Plan a step, prove it and lower it.

    policy: as of DealtStep.proved. The other arguments and errors are those of deal_decode.
    """
    return deal_decode(step, workers=workers, context=context).proved(policy)


@dataclass(frozen=True)
class StepChanges:
    """Differences of a dealt step from the one that the engine launches by itself.

    moves: (stage, worker, worker), each takes a row block of that stage's products from the first worker and gives it
    to the second, in every layer where the first has one; "stream" moves rows of the residual stream, which o and down
    share. turn: workers by which attention's tasks are moved on. splits, slices: of step_parts. held, ring: of the
    TileShape.
    """

    moves: tuple[tuple[str, int, int], ...] = ()
    turn: int = 0
    splits: int | None = None
    slices: int | None = None
    held: int | None = None
    ring: int | None = None

    def of_shape(self, shape: TileShape) -> TileShape:
        """The tiling with its changes. Raises VerificationError (memory) for what an SM lacks room for."""
        held, ring = (shape.held if self.held is None else self.held), (shape.ring if self.ring is None else self.ring)
        if held not in (0, 2, 4) or held > shape.held:
            allowed = ", ".join(str(tiles) for tiles in (0, 2, 4) if tiles <= shape.held)
            message = f"{held} weight tiles do not fit a thread's registers; {allowed} do"
            raise VerificationError("memory", message, {"held": held})
        if not _SHORTEST_RING <= ring <= shape.ring:
            taken, free = ring * shape.slot_bytes, shape.ring * shape.slot_bytes
            raise VerificationError(
                "memory",
                f"a ring of {ring} tiles takes {taken:,} bytes of shared memory; {_SHORTEST_RING} to {shape.ring} "
                f"tiles may be, {free:,} bytes are free",
                {"ring": ring, "bytes": taken, "free": free},
            )
        return replace(shape, held=held, ring=ring)

    def moved(self, shares: list[int], stage: str) -> list[int]:
        """A stage's shares after all moves."""
        for name, source, target in self.moves:
            if name == stage and shares[source] > 0:
                shares[source] -= 1
                shares[target] += 1
        return shares


STREAM = "stream"
"""The stage of o and down in StepChanges.moves."""


def deal_decode(step: DecodeStep, *, workers: int, context: int = 0, changes: StepChanges | None = None) -> DealtStep:
    """Deal a step out to workers.

    workers: thread blocks, of which workers_for says how many a device takes. context: tokens in each cache. It changes
    what attention reads, and no word of the program. changes: None for none.
    Raises UnsupportedError, InvalidArgumentError, VerificationError (memory).
    """
    _check_supported(step)
    check_workers(workers)
    check_context(context)
    changes = changes or StepChanges()
    operations, shape, groups = step_parts(step, splits=changes.splits, slices=changes.slices)
    shape = changes.of_shape(shape)
    deal = Deal(operations, shape, workers, shape.batch, by_writer=True, context=context)
    # The first workers have more rows of the residual stream. So the last ones have the larger shares of gate_up, and
    # `down` reads their results last.
    stream_shares = changes.moved(deal.shares(step.config.hidden_size // shape.rows, first=True), STREAM)
    for name, operation in operations.items():
        if not isinstance(operation, Operation):
            deal.add_units(name, turn=changes.turn)
        elif operation.residual:
            # A worker always has the same rows: the residual stream never leaves it.
            pieces = shape.rows // deal.height(operation)
            deal.add(name, shares=[share * pieces for share in stream_shares])
        else:
            deal.add(name, shares=changes.moved(deal.shares(deal.blocks_of(name)), name.rstrip("0123456789")))
    queues = tuple(map(tuple, deal.queues))
    return DealtStep(step, deal.build.graph(), queues, operations, shape, groups, pace_of(shape, operations))


def step_parts(
    step: DecodeStep, *, splits: int | None = None, slices: int | None = None
) -> tuple[dict[str, AnyOperation], TileShape, HeadGroups]:
    """Return a step's operations, by opcode name, the tiling of its products, and its groups of heads.

    splits: of a sequence's keys. slices: of K of `down`. None chooses both; other values round otherwise. Raises
    UnsupportedError.
    """
    _check_supported(step)
    groups, shape = head_groups(step, splits), _shape(step, slices)
    return _operations(step, shape, groups, slices), shape, groups


def plan_program(step: DecodeStep, *, workers: int) -> WaveProgram:
    """Return plan_decode's program alone: another process hands it back without the graph and its proof."""
    return plan_decode(step, workers=workers).program


def check_workers(workers: int) -> None:
    """Refuse a number of thread blocks that no launch has. Raises InvalidArgumentError."""
    if not 1 <= workers <= MAX_WORKERS:
        raise InvalidArgumentError("workers", got=f"{workers:,}", allowed=f"1 to {MAX_WORKERS:,}")


def check_context(context: int) -> None:
    """Refuse a number of cached tokens that no cache has. Raises InvalidArgumentError."""
    if not 0 <= context <= MAX_CONTEXT:
        raise InvalidArgumentError("context", got=f"{context:,}", allowed=f"0 to {MAX_CONTEXT:,}")


def hand_offs(step: DecodeStep, *, context: int) -> int:
    """Count the hand-offs that a step waits for, one after the other.

    There is one before attention, the output projection, gate_up, down and the next layer, and one where splits are
    combined or slices of K are reduced. context: tokens in each cache.
    """
    config = step.config
    groups = head_groups(step)
    sliced = slices_of(config.hidden_size, config.intermediate_size, _shape(step)) > 1
    found = 0
    for window in config.layer_windows:
        keys = context + 1 if window is None else min(context + 1, window)
        combines = not groups.reader_merges and splits_of(keys, groups.splits, reader_merges=False) > 1
        found += 5 + combines + sliced
    return found


def _operations(
    step: DecodeStep, shape: TileShape, groups: HeadGroups, slices: int | None = None
) -> dict[str, AnyOperation]:
    config, widths, asked = step.config, dict(step.widths), slices
    hidden, inner = config.hidden_size, config.intermediate_size
    width = config.num_heads * config.head_dim
    qkv = width + 2 * config.num_kv_heads * config.head_dim
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
        if not groups.reader_merges:
            found[f"combine{layer}"] = Combination(groups, parts, attended, window)
        # Every worker that merges splits reads all of them: faster than a hand-off for one sequence, slower for two.
        merges = attention if groups.reader_merges else None
        found[f"o{layer}"] = Operation(
            f"o{layer}", hidden, width, 1, attended, f"h{layer}", residual=True, embedded=first, merges=merges
        )
        found[f"gate_up{layer}"] = Operation(
            f"gate_up{layer}", 2 * inner, hidden, 1, f"h{layer}", f"act{layer}", gated=True, norm=True
        )
        x = f"x{layer + 1}"
        wide = widths.get(f"down{layer}", 1)
        slices = asked or slices_of(hidden, inner, shape.of_width(wide))
        if slices == 1:
            found[f"down{layer}"] = Operation(f"down{layer}", hidden, inner, 1, f"act{layer}", x, residual=True)
        else:
            sums = f"down_parts{layer}"
            found[f"down{layer}"] = Operation(f"down{layer}", hidden, inner, slices, f"act{layer}", sums, partial=True)
            found[f"down{layer}_sum"] = Operation(None, hidden, inner, slices, sums, x, residual=True)
    rows = -(-config.vocab_size // shape.rows) * shape.rows
    found["head"] = Operation("head", rows, hidden, 1, x, OUTPUT, norm=True, logits=True)
    if shape.weight_bytes >= 1:
        return found
    norms = [name for name, made in found.items() if isinstance(made, Operation) and made.norm]
    numbers = {name: number for number, name in enumerate(norms)}
    return {
        name: replace(made, width=widths.get(name, 1), gain=numbers.get(name)) if isinstance(made, Operation) else made
        for name, made in found.items()
    }
