"""Operators after attention, for many rows, as a task table: see ffn/chain/plan.py, whose orders and records it uses.

Stages, each a tile or, of the norms, NORM_ROWS rows: "o", the projection; "norm", of the residual stream with it; "up",
gate, up and SwiGLU; "down"; "next norm", of the residual stream with that. A block has a queue of tiles, and one of
rows for its norms. Both are dealt in one order, and the proof knows them as two workers.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from onewave.base.errors import InvalidArgumentError
from onewave.ops.ffn.chain.plan import ChainPlan, ChainTile, band_rows, chain_order, deal, lanes_of, proved, records_of
from onewave.ops.ffn.sizes import FFNSizes
from onewave.tiles.graph.builders import Builder, check_sizes, cuts
from onewave.tiles.graph.graph import Tile, TileGraph
from onewave.tiles.order.chain import coordinates, linear_extension

Ints = npt.NDArray[np.int64]

NORM_ROWS = 8
"""Rows of a task of the norms: with more, fewer tasks share the last norm; with fewer, each waits once for fewer."""
_STEP = 64
# Record kinds of the stages, in their order.
_KINDS, _NORMS = np.array([2, 3, 0, 1, 4]), (1, 4)
# Bands of the order "skewed", stage by stage, and how far each stage is behind the projection, in the projection's
# bands. Gate and up have bands of twice as many rows, so that their weights come from memory half as often.
_BANDS, _LATE = np.array([1, 1, 2, 1, 1]), np.array([0, 0, 1, 3, 3])
# Columns of a norm's row that take as long as a step of the widest tile: 5.5 us a row of 4096, 0.75 us a step
# (observed). It deals tasks.
_NORM_COLUMNS_A_STEP = 600
_WIDEST, _TALL, _SMALL = ChainTile(2, 256, 4, 1), ChainTile(2, 128, 6, 2), ChainTile(1, 128, 8, 2)


@dataclass(frozen=True)
class LayerSizes(FFNSizes):
    """attended: columns of what attention gives; hidden and out are one."""

    attended: int = 0


def default_tile(rows: int) -> ChainTile:
    """The widest where every block has several of them."""
    return _SMALL if rows <= 64 else _TALL if rows <= 256 else _WIDEST


def layer_graph(sizes: LayerSizes, tile: ChainTile) -> TileGraph:
    """The stages as tiles; a task reads whole panels along K. Task.index: (row block, column or rows of the norm)."""
    half = tile.columns // 2
    rows, inner, outs = cuts(sizes.rows, tile.rows), cuts(sizes.intermediate, half), cuts(sizes.hidden, tile.columns)
    parts = tile.rows // NORM_ROWS
    check_sizes({}, tasks=rows * (inner + 2 * outs + 2 * parts))
    build = Builder("bf16")
    row_bytes = NORM_ROWS * sizes.hidden
    for name, shape, cut in (
        ("A", (sizes.rows, sizes.attended), (tile.rows, sizes.attended)),
        ("W_o", (sizes.attended, sizes.hidden), (sizes.attended, tile.columns)),
        ("O", (sizes.rows, sizes.hidden), (tile.rows, tile.columns)),
        ("W_gate", (sizes.hidden, sizes.intermediate), (sizes.hidden, half)),
        ("W_up", (sizes.hidden, sizes.intermediate), (sizes.hidden, half)),
        ("H", (sizes.rows, sizes.intermediate), (tile.rows, half)),
        ("W_down", (sizes.intermediate, sizes.hidden), (sizes.intermediate, tile.columns)),
        ("Y", (sizes.rows, sizes.hidden), (tile.rows, tile.columns)),
    ):
        build.tensor(name, shape, cut)
    # Rows of a norm side by side, so that the policies find a row block's in one row: before and after, normed, next.
    for name, itemsize in (("R", 4), ("T", 4), ("X", 2), ("N", 2)):
        build.tensor(name, (rows, parts), (1, 1), itemsize * row_bytes)
    for row in range(rows):
        height = min(tile.rows, sizes.rows - row * tile.rows)
        projected: tuple[Tile, ...] = tuple(("O", (row, column)) for column in range(outs))
        normed: tuple[Tile, ...] = tuple(("X", (row, part)) for part in range(parts))
        hidden: tuple[Tile, ...] = tuple(("H", (row, column)) for column in range(inner))
        result: tuple[Tile, ...] = tuple(("Y", (row, column)) for column in range(outs))
        for column in range(outs):
            flops = 2 * height * min(tile.columns, sizes.hidden - column * tile.columns) * sizes.attended
            build.task("o", (("A", (row, 0)), ("W_o", (0, column))), (projected[column],), flops, index=(row, column))
        for part in range(parts):
            writes: tuple[Tile, ...] = (normed[part], ("T", (row, part)))
            build.task("norm", (*projected, ("R", (row, part))), writes, 5 * row_bytes, index=(row, part))
        for column in range(inner):
            flops = 4 * height * min(half, sizes.intermediate - column * half) * sizes.hidden
            reads = (*normed, ("W_gate", (0, column)), ("W_up", (0, column)))
            build.task("up", reads, (hidden[column],), flops, index=(row, column))
        for column in range(outs):
            flops = 2 * height * min(tile.columns, sizes.hidden - column * tile.columns) * sizes.intermediate
            build.task("down", (*hidden, ("W_down", (0, column))), (result[column],), flops, index=(row, column))
        for part in range(parts):
            stream: Tile = ("T", (row, part))
            writes = (("N", (row, part)), stream)
            build.task("next norm", (*result, stream), writes, 5 * row_bytes, index=(row, part))
    return build.graph()


def layer_order(graph: TileGraph, order: str, workers: int) -> Ints:
    """The graph's tasks in an order of ffn/chain/plan.py. Raises InvalidArgumentError.

    "skewed:R" has bands of its own: R row blocks through the projection and its norm, 2R through gate and up a band
    later, R through the product down three bands later. So a block seldom waits.
    """
    name, rows = order.partition(":")[0], band_rows(order)
    if name != "skewed" or rows is None:
        return chain_order(graph, order, workers)
    at = coordinates(graph)
    band = rows * _BANDS[at.stage]
    return linear_extension(graph, ((at.row // band + 1) * band + rows * _LATE[at.stage], at.stage, at.column, at.row))


@lru_cache(maxsize=16)
def plan_layer(
    sizes: LayerSizes, *, workers: int, order: str = "auto", policy: str = "auto", tile: ChainTile | None = None
) -> ChainPlan:
    """Plan, prove and lower. Raises InvalidArgumentError, UnsupportedError.

    order: "auto" for "skewed", or as in layer_order. policy: of tiles.policies, "auto" for "row".
    workers: blocks of the launch.
    """
    if workers < 1:
        raise InvalidArgumentError("post_attention: workers", got=str(workers), allowed="1 or more")
    tile = default_tile(sizes.rows) if tile is None else tile
    if tile.splits > 1:
        raise InvalidArgumentError("post_attention: slices of K", got=str(tile.splits), allowed="1: sums are whole")
    order, policy = ("skewed" if order == "auto" else order), ("row" if policy == "auto" else policy)
    graph = layer_graph(sizes, tile)
    ids = layer_order(graph, order, workers)
    at = coordinates(graph)
    depth = np.array([sizes.attended, 0, sizes.hidden, sizes.intermediate, 0])[at.stage] // _STEP
    is_norm = np.isin(at.stage, _NORMS)
    cost = np.where(is_norm, NORM_ROWS * sizes.hidden // _NORM_COLUMNS_A_STEP, depth)
    queues, predicted = deal(ids, at.row, at.stage, cost, (workers, workers), (0, 1, 0, 0, 1))
    table = proved(graph, ids, policy, queues)
    steps = np.stack((np.zeros_like(depth), depth), axis=1)
    records, waits = records_of(graph, table, _KINDS[at.stage], steps, np.zeros_like(depth))
    return ChainPlan(
        sizes, tile, order, policy, graph, table, records, (lanes_of(queues),), waits, table.totals.astype(np.int32),
        predicted, queues_a_block=2,
    )  # fmt: skip
