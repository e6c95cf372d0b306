"""Graphs of matrix multiplications: one GEMM, Stream-K's split of it, chains, FFN, convolution as implicit GEMM.

Sizes are elements, not tiles. `tile` is (rows of C, columns of C, step along K). A task computes one tile of its output
and walks its inputs step by step along K; Task.index is (row block, column, K split).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain as flatten

from onewave.base.errors import InvalidArgumentError, shown
from onewave.tiles.graph.graph import MAX_ACCESSES, MAX_TASKS, Task, Tensor, Tile, TileGraph

DTYPES: dict[str, float] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "int4": 0.5}
"""Bytes an element."""


class Builder:
    """Collects tensors and tasks, numbering the tasks as they come. dtype: of tensors that name no other."""

    def __init__(self, dtype: str = "bf16"):
        if dtype not in DTYPES:
            raise InvalidArgumentError("dtype", got=shown(dtype), allowed=", ".join(DTYPES))
        self.itemsize = DTYPES[dtype]
        self.tensors: dict[str, Tensor] = {}
        self.tasks: list[Task] = []

    def tensor(self, name: str, shape: tuple[int, ...], tile: tuple[int, ...], itemsize: float | None = None) -> Tensor:
        """Add a tensor; its tiles are cut down to its shape."""
        cut = tuple(min(t, s) for t, s in zip(tile, shape, strict=True))
        made = Tensor(name, shape, cut, self.itemsize if itemsize is None else itemsize)
        self.tensors[name] = made
        return made

    def task(
        self,
        name: str,
        reads: tuple[Tile, ...],
        writes: tuple[Tile, ...],
        flops: int,
        *,
        phase: str = "",
        index: tuple[int, ...] = (),
    ) -> Task:
        """Add a task after all others."""
        made = Task(len(self.tasks), name, reads, writes, flops, phase or name, index)
        self.tasks.append(made)
        return made

    def graph(self) -> TileGraph:
        """The graph so far."""
        return TileGraph(self.tensors, tuple(self.tasks))


def check_sizes(sizes: dict[str, int], *, tasks: int = 0, accesses: int = 0) -> None:
    """Refuse sizes below 1 and graphs beyond what fits. Raises InvalidArgumentError naming the size."""
    for name, size in sizes.items():
        if not 1 <= size < 2**40:
            raise InvalidArgumentError(name, got=str(size), allowed="1 to 2^40 - 1")
    if tasks > MAX_TASKS:
        raise InvalidArgumentError("tasks", got=f"{tasks:,}", allowed=f"up to {MAX_TASKS:,}", next="Use larger tiles.")
    if accesses > MAX_ACCESSES:
        raise InvalidArgumentError(
            "tile accesses", got=f"{accesses:,}", allowed=f"up to {MAX_ACCESSES:,}", next="Use larger tiles."
        )


def row_of(tensor: Tensor, row: int) -> tuple[Tile, ...]:
    """All tiles of one row of a matrix's grid."""
    return tuple((tensor.name, (row, col)) for col in range(tensor.grid[1]))


def column_of(tensor: Tensor, col: int) -> tuple[Tile, ...]:
    """All tiles of one column of a matrix's grid."""
    return tuple((tensor.name, (row, col)) for row in range(tensor.grid[0]))


def turns(*walks: tuple[Tile, ...]) -> tuple[Tile, ...]:
    """One tile of each walk in turn, as a loop along K reads them."""
    return tuple(flatten.from_iterable(zip(*walks, strict=True)))


def cuts(size: int, tile: int) -> int:
    return -(-size // tile)


def gemm(m: int, n: int, k: int, tile: tuple[int, int, int] = (128, 128, 64), dtype: str = "bf16") -> TileGraph:
    """C[m, n] = A[m, k] B[k, n]: one task a tile of C. Raises InvalidArgumentError."""
    bm, bn, bk = check_tile(tile)
    check_sizes({"M": m, "N": n, "K": k})
    tasks = cuts(m, bm) * cuts(n, bn)
    check_sizes({}, tasks=tasks, accesses=tasks * (2 * cuts(k, bk) + 1))
    build = Builder(dtype)
    a, b = build.tensor("A", (m, k), (bm, bk)), build.tensor("B", (k, n), (bk, bn))
    c = build.tensor("C", (m, n), (bm, bn))
    columns = [column_of(b, col) for col in range(b.grid[1])]
    for row in range(c.grid[0]):
        left = row_of(a, row)
        for col in range(c.grid[1]):
            rows, cols = c.tile_shape((row, col))
            build.task("gemm", turns(left, columns[col]), (("C", (row, col)),), 2 * rows * cols * k, index=(row, col))
    return build.graph()


def gemm_stream_k(
    m: int, n: int, k: int, tile: tuple[int, int, int] = (128, 128, 64), *, workers: int, dtype: str = "bf16"
) -> tuple[TileGraph, tuple[tuple[int, ...], ...]]:
    """The same product with its K steps cut into one equal run a worker (to within a step), wherever tiles end.

    A tile that several workers share: the one with its first step adds up the others' float32 partial tiles, in order
    of K. Returns the graph and each worker's task ids in order. Raises InvalidArgumentError.
    Source: Osama et al. 2023, arXiv:2301.03598.
    """
    bm, bn, bk = check_tile(tile)
    check_sizes({"M": m, "N": n, "K": k, "workers": workers})
    steps = cuts(k, bk)
    total = cuts(m, bm) * cuts(n, bn) * steps
    check_sizes({}, tasks=total // steps + workers, accesses=2 * total)
    build = Builder(dtype)
    a, b = build.tensor("A", (m, k), (bm, bk)), build.tensor("B", (k, n), (bk, bn))
    c = build.tensor("C", (m, n), (bm, bn))
    build.tensor("partial", (workers, bm, bn), (1, bm, bn), 4)
    pieces: list[tuple[int, int, int, int]] = []  # (tile, first step, end step, worker)
    for worker in range(workers):
        at, end = worker * total // workers, (worker + 1) * total // workers
        while at < end:
            stop = min(end, (at // steps + 1) * steps)
            pieces.append((at // steps, at % steps, at % steps + stop - at, worker))
            at = stop
    helpers: dict[int, list[Tile]] = {}
    queues: list[list[int]] = [[] for _ in range(workers)]
    # Helpers first: what an owner adds up must precede it in program order. Each worker's own order stays as it is,
    # for only the first piece of its run can be a helper.
    for place, first, end, worker in sorted(pieces, key=lambda piece: piece[1] == 0):
        row, col = divmod(place, c.grid[1])
        walk = turns(row_of(a, row)[first:end], column_of(b, col)[first:end])
        rows, cols = c.tile_shape((row, col))
        flops = 2 * rows * cols * (min(k, end * bk) - first * bk)
        if first:
            partial: Tile = ("partial", (worker, 0, 0))
            helpers.setdefault(place, []).append(partial)
            made = build.task("stream-k helper", walk, (partial,), flops, phase="gemm", index=(row, col, first))
        else:
            extra = tuple(helpers.get(place, ()))
            flops += len(extra) * rows * cols
            made = build.task("stream-k", walk + extra, (("C", (row, col)),), flops, phase="gemm", index=(row, col))
        queues[worker].append(made.id)
    return build.graph(), tuple(map(tuple, queues))


def gemm_chain(
    m: int,
    k: int,
    n0: int,
    n1: int,
    tile: tuple[int, int, int] = (128, 128, 64),
    *,
    splits: int = 1,
    dtype: str = "bf16",
) -> TileGraph:
    """H[m, n0] = X[m, k] W0[k, n0], then Y[m, n1] = H W1[n0, n1], the second cut along n0 into `splits` tasks a tile.

    Splits of one tile add to it in turn. Raises InvalidArgumentError.
    """
    bm, bn, bk = check_tile(tile)
    check_sizes({"M": m, "K": k, "N0": n0, "N1": n1, "splits": splits})
    rows, first, second = cuts(m, bm), cuts(n0, bn), cuts(n1, bn)
    splits = min(splits, first)
    accesses = rows * (first * (2 * cuts(k, bk) + 1) + second * (2 * first + 2 * splits))
    check_sizes({}, tasks=rows * (first + second * splits), accesses=accesses)
    build = Builder(dtype)
    x, w0 = build.tensor("X", (m, k), (bm, bk)), build.tensor("W0", (k, n0), (bk, bn))
    h, w1 = build.tensor("H", (m, n0), (bm, bn)), build.tensor("W1", (n0, n1), (bn, bn))
    y = build.tensor("Y", (m, n1), (bm, bn))
    multiply(build, "gemm0", x, w0, h, 1)
    multiply(build, "gemm1", h, w1, y, splits)
    return build.graph()


def multiply(build: Builder, name: str, left: Tensor, right: Tensor, out: Tensor, splits: int = 1) -> None:
    """Add the tasks of out = left @ right, each output tile cut along K into `splits` that add up in turn."""
    columns = [column_of(right, col) for col in range(right.grid[1])]
    steps = left.grid[1]
    for row in range(out.grid[0]):
        walk = row_of(left, row)
        for col in range(out.grid[1]):
            rows, cols = out.tile_shape((row, col))
            target: tuple[Tile, ...] = ((out.name, (row, col)),)
            for split in range(splits):
                first, end = split * steps // splits, (split + 1) * steps // splits
                depth = min(left.shape[1], end * left.tile[1]) - first * left.tile[1]
                reads = turns(walk[first:end], columns[col][first:end]) + (target if split else ())
                build.task(name, reads, target, 2 * rows * cols * depth, index=(row, col, split))


def ffn(
    m: int,
    hidden: int,
    intermediate: int,
    tile: tuple[int, int, int] = (128, 128, 64),
    *,
    fused: bool = False,
    splits: int = 1,
    dtype: str = "bf16",
) -> TileGraph:
    """LLaMA's FFN: gate and up projections, SiLU(gate) * up, down projection.

    fused: one task computes a tile of gate, up and their SiLU product; else each is a task of its own. splits: of the
    down projection along its K. Raises InvalidArgumentError.
    """
    bm, bn, bk = check_tile(tile)
    check_sizes({"M": m, "hidden": hidden, "intermediate": intermediate, "splits": splits})
    rows, wide, narrow = cuts(m, bm), cuts(intermediate, bn), cuts(hidden, bn)
    splits = min(splits, wide)
    accesses = rows * (4 * wide * cuts(hidden, bk) + 4 * wide + narrow * 2 * (wide + splits))
    check_sizes({}, tasks=rows * (3 * wide + narrow * splits), accesses=accesses)
    build = Builder(dtype)
    x = build.tensor("X", (m, hidden), (bm, bk))
    gate = build.tensor("W_gate", (hidden, intermediate), (bk, bn))
    up = build.tensor("W_up", (hidden, intermediate), (bk, bn))
    act = build.tensor("act", (m, intermediate), (bm, bn))
    down, y = build.tensor("W_down", (intermediate, hidden), (bn, bn)), build.tensor("Y", (m, hidden), (bm, bn))
    add_gate_up_silu(build, x, gate, up, act, fused=fused)
    multiply(build, "down", act, down, y, splits)
    return build.graph()


def add_gate_up_silu(build: Builder, x: Tensor, gate: Tensor, up: Tensor, act: Tensor, *, fused: bool) -> None:
    """Add act = SiLU(x gate) * (x up), fused into one task a tile or as three kinds of tasks."""
    if not fused:
        halves = [build.tensor(name, act.shape, act.tile) for name in ("gate_out", "up_out")]
        multiply(build, "gate", x, gate, halves[0])
        multiply(build, "up", x, up, halves[1])
    for row in range(act.grid[0]):
        for col in range(act.grid[1]):
            rows, cols = act.tile_shape((row, col))
            if fused:
                reads = turns(row_of(x, row), column_of(gate, col), column_of(up, col))
                flops = 4 * rows * cols * x.shape[1] + 5 * rows * cols
            else:
                reads = (("gate_out", (row, col)), ("up_out", (row, col)))
                flops = 5 * rows * cols
            build.task("gate_up_silu" if fused else "silu", reads, ((act.name, (row, col)),), flops, index=(row, col))


def conv2d(
    image: tuple[int, int, int, int],
    out_channels: int,
    kernel: tuple[int, int] = (3, 3),
    *,
    stride: int = 1,
    padding: int | None = None,
    tile: tuple[int, int, int] = (128, 128, 64),
    dtype: str = "bf16",
) -> TileGraph:
    """A 2-D convolution as implicit GEMM: M = images x output pixels, N = output channels, K = kernel x channels.

    image: (images, height, width, channels), channels last; one image row is one tile, so the rows that neighbouring
    tasks share show up as reuse. padding: the same on all sides; by default what keeps the size at stride 1, axis by
    axis, with an even kernel's odd row or column at the end. Raises InvalidArgumentError.
    """
    bm, bn, _ = check_tile(tile)
    check_count("image", image, ("images", "height", "width", "channels"))
    check_count("kernel", kernel, ("height", "width"))
    images, height, width, channels = image
    sizes = {"images": images, "height": height, "width": width, "channels": channels, "out_channels": out_channels}
    check_sizes(sizes | {"kernel height": kernel[0], "kernel width": kernel[1], "stride": stride})
    added = [size - 1 if padding is None else 2 * padding for size in kernel]
    pad = added[0] // 2  # above
    out_h, out_w = (height + added[0] - kernel[0]) // stride + 1, (width + added[1] - kernel[1]) // stride + 1
    if pad < 0 or out_h < 1 or out_w < 1:
        raise InvalidArgumentError("convolution", got=f"output {out_h} x {out_w}", allowed="1 x 1 or more")
    m, depth = images * out_h * out_w, kernel[0] * kernel[1] * channels
    tasks = cuts(m, bm) * cuts(out_channels, bn)
    check_sizes({}, tasks=tasks, accesses=tasks * (2 + kernel[0] + min(m, bm) * stride // out_w))
    build = Builder(dtype)
    build.tensor("image", image, (1, 1, width, channels))
    build.tensor("weight", (out_channels, depth), (bn, depth))
    out = build.tensor("out", (m, out_channels), (bm, bn))
    for row in range(out.grid[0]):
        # Output rows that the tile's pixels lie on, counted through all images.
        top = range(row * bm // out_w, (min(m, (row + 1) * bm) - 1) // out_w + 1)
        needed = {
            (line // out_h, y)
            for line in top
            for y in range(line % out_h * stride - pad, line % out_h * stride - pad + kernel[0])
            if 0 <= y < height
        }
        lines: tuple[Tile, ...] = tuple(("image", (i, y, 0, 0)) for i, y in sorted(needed))
        for col in range(out.grid[1]):
            rows, cols = out.tile_shape((row, col))
            flops = 2 * rows * cols * depth
            build.task("conv2d", (*lines, ("weight", (col, 0))), (("out", (row, col)),), flops, index=(row, col))
    return build.graph()


def check_count(what: str, sizes: Sequence[int], names: tuple[str, ...]) -> None:
    """Refuse more or fewer sizes than are named. Raises InvalidArgumentError."""
    if len(sizes) != len(names):
        raise InvalidArgumentError(what, got=f"{len(sizes)} sizes", allowed=", ".join(names))


def check_tile(tile: tuple[int, int, int]) -> tuple[int, int, int]:
    if len(tile) != 3 or any(not 1 <= size < 2**31 for size in tile):
        raise InvalidArgumentError(
            "tile", got="x".join(map(str, tile)), allowed="three sizes of 1 or more, as 128x128x64"
        )
    return tile
