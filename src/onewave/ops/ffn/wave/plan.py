"""The feed-forward block as a task graph for the wave: which worker streams which rows when, in five orders.

Everything that decides about rounding (tile shape, slices of K) depends on the sizes alone, never on the number of
workers, so any number of workers gives the same bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from onewave.base.errors import InvalidArgumentError, UnsupportedError
from onewave.ops.ffn.sizes import FFNSizes
from onewave.tiles.graph.graph import TileGraph
from onewave.tiles.order.policies import plan
from onewave.tiles.proof.table import TaskTable, lower
from onewave.tiles.proof.verify import verify
from onewave.wave.plan.deal import Deal, fewest_workers
from onewave.wave.plan.layout import COMPACT_BYTES, TileShape, tile_shape
from onewave.wave.plan.operations import INPUT, OUTPUT, Operation
from onewave.wave.plan.program import WaveProgram, build_program
from onewave.wave.plan.slices import fitting_slices, slice_bounds, slices_of, unevenness

DATA = "data"
"""The policy by which every word of a hidden activation is its own flag."""
ORDERS = ("row", "half_row", "sm_local", "sequential")
"""row: all of the hidden row, then the down projection. half_row: half the hidden row, the down projection of that
half, then the other half. sm_local: a worker that made a slice of the hidden row multiplies it with its slice of
W_down. sequential: two launches."""

# Rows up to which compact weights are read sooner than 16-bit ones: of more, a stream waits for activations as long as
# either takes (docs/log/weight-formats.md).
_MAX_COMPACT = 32
# With tall tiles the busiest worker of the second product may have that many times the mean.
_EVEN = 1.1
# Partial sums of SM-local slices are exchanged whole: what that may cost in words.
_MAX_PARTIAL_WORDS = 1 << 26


@dataclass(frozen=True)
class FFNPlan:
    """One launch (two for `sequential`): its graph, its proved table, and what the kernel reads."""

    graphs: tuple[TileGraph, ...]
    tables: tuple[TaskTable, ...]
    programs: tuple[WaveProgram, ...]

    splits: tuple[int, int]
    """Slices of K of the two products."""


@lru_cache(maxsize=64)
def plan_ffn(
    sizes: FFNSizes, *, workers: int, order: str = "row", policy: str = DATA, compact: bool = False
) -> FFNPlan:
    """Plan, prove and lower, for sizes and choices that call.py has checked. compact: for weights in thirteen bits.

    Raises InvalidArgumentError, UnsupportedError.
    """
    if workers < 1:
        raise InvalidArgumentError("ffn: workers", got=str(workers), allowed="1 or more")
    shape = _shape(sizes, order, compact)
    names = (("up",), ("down",)) if order == "sequential" else (("up", "down"),)
    operations = [_operations(sizes, shape, order, stages) for stages in names]
    made = [
        _one_launch(each, shape, workers, order, policy, stages, sizes.rows)
        for each, stages in zip(operations, names, strict=True)
    ]
    graphs, tables, programs = zip(*made, strict=True)
    slices = {name: operation.slices for each in operations for name, operation in each.items()}
    return FFNPlan(graphs, tables, programs, (slices["up"], slices["down"]))


@lru_cache(maxsize=256)
def has_plan(sizes: FFNSizes, *, workers: int, order: str, policy: str, compact: bool) -> bool:
    """Whether plan_ffn makes one, which it then keeps, of an order and a policy that it knows."""
    try:
        plan_ffn(sizes, workers=workers, order=order, policy=policy, compact=compact)
    except UnsupportedError:
        return False
    return True


def _shape(sizes: FFNSizes, order: str, compact: bool) -> TileShape:
    if order == "sm_local":  # whose workers keep slices of 128 columns to themselves: tiles as narrow as that
        return tile_shape(sizes.rows, rows=64)
    if not compact:
        return tile_shape(sizes.rows)
    if sizes.rows == 16:  # activations pass half as often with tall tiles; only where these leave workers even
        tall = _compact_shape(sizes, 64)
        slices = slices_of(sizes.out, sizes.intermediate, tall, reading=True)
        if unevenness(sizes.out, sizes.intermediate, slices, tall) <= _EVEN:
            return tall
    return _compact_shape(sizes, None)


def _compact_shape(sizes: FFNSizes, rows: int | None) -> TileShape:
    large = tile_shape(sizes.rows, rows=rows, weight_bytes=COMPACT_BYTES, images=2)
    fill = all(cols % large.cols == 0 for cols in (sizes.hidden, sizes.intermediate))
    return large if fill else tile_shape(sizes.rows, rows=rows, weight_bytes=COMPACT_BYTES)


def _one_launch(
    operations: dict[str, Operation],
    shape: TileShape,
    workers: int,
    order: str,
    policy: str,
    stages: tuple[str, ...],
    batch: int,
) -> tuple[TileGraph, TaskTable, WaveProgram]:
    deal = Deal(operations, shape, workers, batch)
    _DEALS.get(order, _deal_rows)(deal, stages)
    graph = deal.build.graph()
    schedule = plan(
        graph,
        np.arange(len(graph.tasks)),
        "tile" if policy == DATA else policy,
        workers=workers,
        co_resident=workers,
        queues=deal.queues,
    )
    table = lower(verify(schedule))
    return graph, table, build_program(graph, table, operations, shape)


def _deal_rows(deal: Deal, stages: tuple[str, ...]) -> None:
    for stage in stages:
        deal.add(stage)
        if f"{stage}_sum" in deal.operations:
            deal.add(f"{stage}_sum")


def _deal_half_rows(deal: Deal, stages: tuple[str, ...]) -> None:
    up, down = deal.operations["up"], deal.operations["down"]
    assert isinstance(up, Operation)
    assert isinstance(down, Operation)
    # Half the hidden row is whole slices of the second product's K, so that none of them waits for the other half.
    bounds = slice_bounds(down.cols, down.slices, deal.shape)
    middle = down.slices // 2
    rows = [bound * (up.rows // down.cols) for bound in (0, bounds[middle], bounds[-1])]
    for half, (low, high) in enumerate(((0, middle), (middle, down.slices))):
        for name in ("up", "up_sum"):
            if name in deal.operations:
                deal.add(name, first=rows[half], last=rows[half + 1])
        deal.add("down", low=low, high=high)
    deal.add("down_sum")


def _deal_slices(deal: Deal, stages: tuple[str, ...]) -> None:
    """Slices of the hidden row, each with its rows of the first product and its slice of the second."""
    up, down = deal.operations["up"], deal.operations["down"]
    assert isinstance(up, Operation)
    assert isinstance(down, Operation)
    bounds = slice_bounds(down.cols, down.slices, deal.shape)
    rows_a_value = 2 if up.gated else 1
    for number in range(down.slices):
        worker = number * deal.workers // down.slices
        first, last = (bound * rows_a_value // deal.shape.rows for bound in bounds[number : number + 2])
        deal.task(worker, "up", first, last - first, 0)
        deal.task(worker, "down", 0, down.rows // deal.shape.rows, number)
    if "down_sum" in deal.operations:  # a single slice is the whole sum
        deal.add("down_sum")


_DEALS: dict[str, Callable[[Deal, tuple[str, ...]], None]] = {"half_row": _deal_half_rows, "sm_local": _deal_slices}


def _operations(sizes: FFNSizes, shape: TileShape, order: str, stages: tuple[str, ...]) -> dict[str, Operation]:
    up_rows = sizes.intermediate * (2 if sizes.gated else 1)
    up_slices = fitting_slices(sizes.hidden, shape)
    if order == "half_row":  # whose halves are whole slices
        if sizes.intermediate <= shape.cols:
            got, allowed = f"intermediate size {sizes.intermediate}", f"more than {shape.cols} columns"
            raise UnsupportedError(f"ffn: order {order}", got=got, allowed=allowed, next="Use row.")
        down_slices = fitting_slices(sizes.intermediate, shape)
        down_slices += down_slices % 2
    elif order == "sm_local":
        if up_slices > 1:
            raise UnsupportedError("ffn: order sm_local", got=f"{sizes.rows} rows of {sizes.hidden}", next="Use row.")
        down_slices = -(-sizes.intermediate // shape.cols)
        if down_slices * sizes.out * shape.batch > _MAX_PARTIAL_WORDS:
            raise UnsupportedError("ffn: order sm_local", got=f"batch {sizes.rows}", allowed="smaller batches")
    else:
        tall = shape.weight_bytes == COMPACT_BYTES and shape.quarters == 1
        # Nothing is added up in between, which every block would wait for.
        up_slices = 1 if tall else slices_of(up_rows, sizes.hidden, shape)
        down_slices = slices_of(sizes.out, sizes.intermediate, shape, reading=tall)
    found: dict[str, Operation] = {}
    if "up" in stages:
        target = OUTPUT if "down" not in stages else "h"
        _stage(found, "up", (up_rows, sizes.hidden, up_slices), INPUT, target, activation=True, gated=sizes.gated)
    if "down" in stages:
        source = INPUT if "up" not in stages else "h"
        _stage(found, "down", (sizes.out, sizes.intermediate, down_slices), source, OUTPUT)
    return found


def keeps_compact(dtype: object, batch: int, order: str, policy: str) -> bool:
    """Whether a packed block keeps its weights in thirteen bits each, if these hold them. dtype: or its name."""
    is_bfloat16 = str(dtype).removeprefix("torch.") == "bfloat16"
    return is_bfloat16 and batch <= _MAX_COMPACT and (order, policy) == ("row", DATA)


def workers_for(sizes: FFNSizes, *, order: str, available: int, compact: bool = False) -> int:
    """Blocks of a launch, of `available` that the device runs side by side: for more than two rows the fewest that
    leave no worker with more."""
    if sizes.rows <= 2 or order != "row":
        return available
    shape = _shape(sizes, order, compact)
    operations = _operations(sizes, shape, order, ("up", "down"))
    units = [each.rows // shape.rows * each.slices for each in operations.values() if each.weight is not None]
    return fewest_workers(units, available)


def _stage(
    found: dict[str, Operation],
    name: str,
    size: tuple[int, int, int],
    source: str,
    target: str,
    *,
    activation: bool = False,
    gated: bool = False,
) -> None:
    """Add a product, and where K is cut the addition of its partial sums. size: rows, columns, slices of K."""
    rows, cols, slices = size
    if slices == 1:
        found[name] = Operation(name, rows, cols, 1, source, target, False, activation, gated)
        return
    sums = f"{name}_parts"
    found[name] = Operation(name, rows, cols, slices, source, sums, partial=True)
    found[f"{name}_sum"] = Operation(None, rows, cols, slices, sums, target, False, activation, gated)
