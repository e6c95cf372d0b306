"""From a task and what its opcode computes to its typed step."""

from __future__ import annotations

from collections.abc import Mapping

from onewave.base.errors import UnsupportedError
from onewave.tiles.graph.graph import Task
from onewave.wave.plan.layout import TileShape, mergeable_head_words
from onewave.wave.plan.operations import INPUT, AnyOperation, Attention, Combination, Operation
from onewave.wave.plan.regions import Region
from onewave.wave.plan.slices import slice_bounds
from onewave.wave.plan.steps import AttendStep, CombineStep, Kind, ProductStep, ReduceStep, Step


def step_of(
    operation: AnyOperation,
    task: Task,
    place: Mapping[str, Region],
    shape: TileShape,
    sync: Mapping[str, int],
    *,
    scales: int = 0,
) -> Step:
    """Make the step of a task. Its index says which part of the operation it covers.

    place: of exchanged tensors, by name. sync: first_wait, waits and post. scales: the first of the matrix's scales.
    Raises UnsupportedError for a slice of K that shared memory does not hold.
    """
    if isinstance(operation, Combination):
        return _combine(operation, task, place, sync)
    if isinstance(operation, Attention):
        return _attend(operation, task, place, sync)
    if operation.weight is None:
        return _reduce(operation, task, place, sync)
    return _product(operation, task, place, shape, {**sync, "scales": scales})


def _rows(operation: Operation, task: Task, place: Mapping[str, Region]) -> dict[str, int]:
    """The fields that products and reductions share."""
    target, bias = place.get(operation.target), operation.bias
    return {
        "first_block": task.index[0],
        "blocks": task.index[1],
        "flags": operation.flags,
        "bias": 0 if bias is None else bias + 1,
        "target": 0 if target is None else target.first,
        "target_stride": 0 if target is None else target.stride,
    }


def _reduce(operation: Operation, task: Task, place: Mapping[str, Region], sync: Mapping[str, int]) -> ReduceStep:
    return ReduceStep(
        kind=Kind.REDUCE_HIDDEN if operation.target in place else Kind.REDUCE_OUT,
        source=place[operation.source].first,
        slice=operation.slices,
        **_rows(operation, task, place),
        **sync,
    )


def _product(
    operation: Operation, task: Task, place: Mapping[str, Region], shape: TileShape, more: Mapping[str, int]
) -> ProductStep:
    blocks, part = task.index[1:]
    shape = shape.of_width(operation.width)
    bounds = slice_bounds(operation.cols, operation.slices, shape)
    begin, end = bounds[part], bounds[part + 1]
    tiles = -(-(end - begin) // shape.cols)
    chunks = -(-tiles // shape.chunk)
    if chunks > shape.slots and blocks > shape.group:
        most = shape.max_tiles * shape.cols
        raise UnsupportedError("wave: columns of a slice", got=str(end - begin), allowed=f"up to {most} at this batch")
    merging: dict[str, int] = {}
    if operation.merges is not None:
        assert operation.slices == 1, "a product that merges splits loads whole rows"
        merging = {"splits": operation.merges.groups.splits, "window": operation.merges.window or 0}
        merging["mergeable"] = place[operation.merges.target].first
    source = None if operation.source == INPUT else place[operation.source]
    whole = Kind.HIDDEN if operation.target in place else Kind.OUT
    return ProductStep(
        kind=Kind.PARTIAL if operation.partial else whole,
        source=-1 if source is None else source.first,
        source_stride=0 if source is None else source.stride,
        slice=part,
        tiles=tiles,
        chunks=chunks,
        first_column=begin // 2,
        columns=(end - begin) // 2,
        width=operation.width if operation.width > 1 else 0,
        gain=0 if operation.gain is None else operation.gain * operation.cols // 2,
        **_rows(operation, task, place),
        **merging,
        **more,
    )


def _combine(operation: Combination, task: Task, place: Mapping[str, Region], sync: Mapping[str, int]) -> CombineStep:
    groups, unit, part = operation.groups, task.index[0], task.index[2]
    sequence, group = divmod(unit, groups.count)
    source, target, head = place[operation.source], place[operation.target], part * groups.merged
    row = target.first + sequence * target.stride
    return CombineStep(
        source=source.first + unit * groups.splits * groups.part_words + head * (groups.head_dim + 4),
        source_stride=groups.part_words,
        target=row + (groups.first_head(group) + head) * (groups.head_dim // 2),
        sequence=sequence,
        splits=groups.splits,
        window=operation.window or 0,
        heads=groups.parts_of(group)[part],
        **sync,
    )


def _attend(operation: Attention, task: Task, place: Mapping[str, Region], sync: Mapping[str, int]) -> AttendStep:
    groups, unit, split = operation.groups, task.index[0], task.index[2]
    sequence, group = divmod(unit, groups.count)
    source, target, whole = (place[name] for name in (operation.source, operation.target, operation.combined))
    first_head, half, kv_head = groups.first_head(group), groups.head_dim // 2, group // groups.of_kv_head
    if groups.reader_merges:
        row = target.first + sequence * target.stride
        result = {"mergeable": row + first_head * mergeable_head_words(groups.head_dim)}
    else:
        result = {"target": target.first + (unit * groups.splits + split) * groups.part_words}
    return AttendStep(
        source=source.first,
        source_stride=source.stride,
        slice=split,
        sequence=sequence,
        splits=groups.splits,
        layer=operation.layer,
        kv_head=kv_head,
        window=operation.window or 0,
        appends=int(group % groups.of_kv_head == 0),
        heads=groups.heads_of(group),
        q=first_head * half,
        k=(groups.heads + kv_head) * half,
        v=(groups.heads + groups.kv_heads + kv_head) * half,
        whole=whole.first + sequence * whole.stride + first_head * half,
        **result,
        **sync,
    )
