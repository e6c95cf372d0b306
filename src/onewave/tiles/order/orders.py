"""The table of orders, and the one text that names an order with its parameter: "snake", "grouped:8", "random:7"."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from onewave.base.errors import InvalidArgumentError
from onewave.base.json_files import parse_json, read_bounded
from onewave.tiles.graph.graph import MAX_TASKS, TileGraph
from onewave.tiles.order import chain, grid
from onewave.tiles.sim.pictures import Picture, order_picture

Ints = npt.NDArray[np.int64]
_MAX_BYTES = 64 << 20  # of a file of an explicit order


@dataclass(frozen=True)
class OrderRow:
    """One order. kind: "grid" orders the tiles of one grid, "graph" a whole graph's tasks.

    make: for a grid (rows, cols) -> int64 [n, 2]; for a graph (graph) -> int64 [n] task ids; with the parameter behind,
    if there is one. parameter: what the number after the colon means; default: its value when left out, or "workers" to
    take the machine's number of workers.
    """

    kind: str
    make: Callable[..., Ints]
    summary: str
    parameter: str | None = None
    default: int | str = 0
    least: int = 1


GRID_ORDERS: dict[str, OrderRow] = {
    "row": OrderRow("grid", grid.row, "row by row"),
    "column": OrderRow("grid", grid.column, "column by column"),
    "snake": OrderRow("grid", grid.snake, "row by row, back and forth"),
    "grouped": OrderRow("grid", grid.grouped, "bands of g rows, column by column (Triton)", "rows a band", 8),
    "swizzle": OrderRow("grid", grid.swizzle, "strips of columns (CUTLASS)", "N of CUTLASS's swizzle", 8),
    "hilbert": OrderRow("grid", grid.hilbert, "Hilbert curve on any rectangle"),
    "morton": OrderRow("grid", grid.morton, "Z order by interleaved bits"),
    "near-square": OrderRow("grid", grid.near_square, "waves that are nearly square", "workers", "workers"),
    "stream-k": OrderRow("grid", grid.stream_k, "each worker a contiguous run (Stream-K)", "workers", "workers"),
    "random": OrderRow("grid", grid.random, "shuffled", "seed", 0, 0),
}
"""Orders of one grid of tiles. A graph with several stages uses one stage by stage."""

INTERLEAVINGS: dict[str, OrderRow] = {
    "sequential": OrderRow("graph", chain.sequential, "stage after stage"),
    "row-by-row": OrderRow("graph", chain.rows, "one row block through all stages"),
    "half-row": OrderRow("graph", chain.half_row, "half a row of the first GEMM, then what reads it"),
    "rows": OrderRow("graph", chain.rows, "r row blocks through all stages", "row blocks", 2),
    "accumulate-first-column": OrderRow(
        "graph", chain.accumulate_first_column, "finished tiles at once into the second GEMM's column 0"
    ),
    "bpt": OrderRow("graph", chain.bpt, "a row block's FFN as soon as its attention ends"),
    "critical-path": OrderRow("graph", chain.critical_path, "longest way to the end first"),
}
"""How the stages of a chain take turns."""

ORDERS: dict[str, OrderRow] = {
    **GRID_ORDERS,
    "explicit": OrderRow("grid", grid.explicit, "your own: explicit:FILE.json or explicit:[[row,column],...]"),
    **INTERLEAVINGS,
}
"""Every order by name."""


@dataclass(frozen=True, eq=False)
class Order:
    """The tiles of a grid in the order of computing them. tiles: int64 [rows * cols, 2], each tile exactly once."""

    name: str
    rows: int
    cols: int
    tiles: Ints

    def __post_init__(self) -> None:
        grid.explicit(self.rows, self.cols, self.tiles)

    def to_list(self) -> list[tuple[int, int]]:
        """The tiles as pairs of plain ints."""
        return [(int(r), int(c)) for r, c in self.tiles]

    def to_json(self) -> str:
        """The order as one JSON object; "order" is what `explicit:FILE` reads."""
        return json.dumps({"name": self.name, "rows": self.rows, "cols": self.cols, "order": self.to_list()})

    def show(self) -> Picture:
        """A picture of the path through the grid; a notebook draws it."""
        return order_picture(self.rows, self.cols, self.to_list(), self.name)


def grid_order(text: str, rows: int, cols: int, *, workers: int = 132) -> Order:
    """The order that a text names, on a grid of rows x cols.

    text: a grid order's name, with ":" and its parameter where it has one. workers: the default of those whose
    parameter is a number of workers. Raises InvalidArgumentError.
    """
    _check_grid(rows, cols)
    name, row, given = _parse(text, "grid")
    if name == "explicit":
        return Order(text if len(text) < 40 else name, rows, cols, _explicit_tiles(given))
    return Order(text, rows, cols, row.make(rows, cols, *_parameter(name, row, given, workers)))


def task_order(graph: TileGraph, text: str, *, workers: int = 132) -> Ints:
    """Order all tasks of a graph: int64 [n] ids, every task once and after all that it depends on.

    text: any name in ORDERS; a grid order is applied stage by stage. Raises InvalidArgumentError.
    """
    if not graph.tasks:
        return np.zeros(0, dtype=np.int64)
    name, row, given = _parse(text, None)
    if row.kind == "graph":
        return row.make(graph, *_parameter(name, row, given, workers))
    return chain.by_grid(graph, lambda rows, cols: grid_order(text, rows, cols, workers=workers).tiles)


def _parse(text: str, kind: str | None) -> tuple[str, OrderRow, str | None]:
    name, colon, given = text.partition(":")
    row = ORDERS.get(name)
    if row is None or (kind is not None and row.kind != kind):
        names = ", ".join(n for n, r in ORDERS.items() if kind in (None, r.kind))
        raise InvalidArgumentError("order", got=repr(text[:80]), allowed=names)
    return name, row, given if colon else None


def _parameter(name: str, row: OrderRow, given: str | None, workers: int) -> tuple[int, ...]:
    """The order's parameter, if it has one."""
    if row.parameter is None:
        if given is not None:
            raise InvalidArgumentError(f"order {name!r}: parameter", got=repr(given[:40]), allowed="none")
        return ()
    if given is None:
        return (workers if row.default == "workers" else int(row.default),)
    # Digits only: int() would take "1_0", " 8" and digits of other scripts.
    value = int(given) if re.fullmatch(r"[0-9]{1,10}", given) else row.least - 1
    if not row.least <= value < 2**31:
        allowed = f"a whole number from {row.least} to 2^31 - 1"
        raise InvalidArgumentError(f"order {name!r}: {row.parameter}", got=repr(given[:40]), allowed=allowed)
    return (value,)


def _check_grid(rows: int, cols: int) -> None:
    if rows < 1 or cols < 1 or rows * cols > MAX_TASKS:
        raise InvalidArgumentError("grid", got=f"{rows} x {cols} tiles", allowed=f"1 to {MAX_TASKS:,} tiles in all")


def _explicit_tiles(given: str | None) -> Ints:
    what = "explicit order"
    allowed = "explicit:FILE.json or explicit:[[row,column],...]"
    if not given:
        raise InvalidArgumentError(what, got="nothing", allowed=allowed)
    text = given if given.lstrip().startswith("[") else read_bounded(given, what, _MAX_BYTES)
    document: Any = parse_json(text, what if text is given else f"{what}: {given}", allowed=allowed)
    if isinstance(document, dict):
        document = cast("dict[str, Any]", document).get("order")
    pairs: list[tuple[int, int]] = []
    for pair in cast("Sequence[Any]", document) if isinstance(document, list) else ():
        items = cast("list[Any]", pair) if isinstance(pair, list) else []
        if len(items) != 2 or not all(type(i) is int and abs(i) < 2**31 for i in items):
            raise InvalidArgumentError(
                what, got=str(cast("object", pair))[:40], allowed="pairs [row, column] of whole numbers"
            )
        pairs.append((items[0], items[1]))
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)
