"""Graphs of attention: QK^T, softmax and PV; attention, projection and FFN in a row."""

from onewave.base.errors import InvalidArgumentError
from onewave.tiles.graph.builders import Builder, add_gate_up_silu, check_count, check_sizes, check_tile, cuts, multiply
from onewave.tiles.graph.graph import Task, Tensor, Tile, TileGraph


def attention(
    seq_q: int,
    seq_k: int,
    heads: int = 1,
    head_dim: int = 128,
    tile: tuple[int, int] = (128, 128),
    *,
    kv_heads: int | None = None,
    causal: bool = False,
    fused: bool = False,
    dtype: str = "bf16",
) -> TileGraph:
    """Softmax(Q K^T) V over (query rows, key rows) tiles; query head h reads KV head h // (heads / kv_heads).

    fused: one task a row block and head walks the keys (flash attention) and S and P never exist; else qk, softmax and
    pv are tasks of their own, and S and P are tensors. causal: the last query sees the last key; key tiles that a row
    block may not see are not read. Task.index is (row block, head, key tile). Raises InvalidArgumentError.
    """
    check_count("tile", tile, ("rows", "keys"))
    kv_heads = heads if kv_heads is None else kv_heads
    sizes = {"seq_q": seq_q, "seq_k": seq_k, "heads": heads, "head_dim": head_dim, "kv_heads": kv_heads}
    check_sizes(sizes | {"tile rows": tile[0], "tile keys": tile[1]})
    if heads % kv_heads:
        raise InvalidArgumentError("kv_heads", got=str(kv_heads), allowed=f"divisors of heads = {heads}")
    pairs = heads * cuts(seq_q, tile[0]) * cuts(seq_k, tile[1])
    check_sizes({}, tasks=pairs, accesses=7 * pairs)
    build = Builder(dtype)
    q = build.tensor("Q", (heads, seq_q, head_dim), (1, tile[0], head_dim))
    keys = [build.tensor(name, (kv_heads, seq_k, head_dim), (1, tile[1], head_dim)) for name in ("K", "V")]
    out = build.tensor("O", (seq_q, heads * head_dim), (tile[0], head_dim))
    scores = (
        ()
        if fused
        else tuple(
            build.tensor(name, (heads, seq_q, seq_k), (1, *tile), size)
            for name, size in (("S", 4), ("P", build.itemsize))
        )
    )
    add_attention(build, (q, *keys), out, scores, causal=causal)
    return build.graph()


def add_attention(
    build: Builder, qkv: tuple[Tensor, ...], out: Tensor, scores: tuple[Tensor, ...] = (), *, causal: bool = False
) -> None:
    """Add the tasks of attention, row block by row block; fused where no scores tensors (S, P) are given."""
    q, k, _ = qkv
    heads, seq_q, seq_k = q.shape[0], q.shape[1], k.shape[1]
    group = heads // k.shape[0]
    todo = ["attention"] if not scores else ["qk", "softmax", "pv"]
    for name in todo:
        for row in range(q.grid[1]):
            last_query = min(seq_q, (row + 1) * q.tile[1]) - 1
            visible = min(seq_k, max(0, last_query + 1 + seq_k - seq_q)) if causal else seq_k
            for head in range(heads):
                _add_row(build, name, (q, *qkv[1:], out, *scores), (row, head, head // group, visible))


def _add_row(build: Builder, name: str, tensors: tuple[Tensor, ...], at: tuple[int, int, int, int]) -> None:
    """Add one row block and head of one kind of task. at: row block, head, KV head, visible keys."""
    (q, k, v, out, *_), (row, head, kv_head, visible) = tensors, at
    rows, dim = q.tile_shape((head, row, 0))[1:]
    columns = range(cuts(visible, k.tile[1]))
    phase = "attention"
    target: tuple[Tile, ...] = ((out.name, (row, head)),)
    if name == "qk":
        for col in columns:
            width = k.tile_shape((kv_head, col, 0))[1]
            reads: tuple[Tile, ...] = (("Q", (head, row, 0)), ("K", (kv_head, col, 0)))
            flops = 2 * rows * width * dim
            build.task("qk", reads, (("S", (head, row, col)),), flops, phase="attention qk", index=(row, head, col))
    elif name == "softmax":
        reads = tuple(("S", (head, row, col)) for col in columns)
        writes: tuple[Tile, ...] = tuple(("P", (head, row, col)) for col in columns)
        build.task("softmax", reads, writes, 5 * rows * visible, phase="attention softmax", index=(row, head))
    elif name == "pv":
        reads = tuple(t for col in columns for t in (("P", (head, row, col)), (v.name, (kv_head, col, 0))))
        build.task("pv", reads, target, 2 * rows * visible * dim, phase="attention pv", index=(row, head))
    else:
        walk = tuple(t for col in columns for t in ((k.name, (kv_head, col, 0)), (v.name, (kv_head, col, 0))))
        reads = ((q.name, (head, row, 0)), *walk)
        build.task("attention", reads, target, rows * visible * (4 * dim + 5), phase=phase, index=(row, head))


def attention_block(
    seq: int,
    heads: int,
    head_dim: int,
    intermediate: int,
    tile: tuple[int, int, int] = (128, 128, 128),
    *,
    kv_heads: int | None = None,
    causal: bool = True,
    splits: int = 1,
    dtype: str = "bf16",
) -> TileGraph:
    """Attention, its projection (residual added), gated FFN: a row block needs only its own rows of each stage.

    Norms are left out: they read and write a row block's own tiles and change neither order nor traffic much. The
    hidden size is heads * head_dim. Task.index is (row block, column, K split). Raises InvalidArgumentError.
    """
    bm, bn, bk = check_tile(tile)
    kv_heads = heads if kv_heads is None else kv_heads
    check_sizes({"seq": seq, "heads": heads, "head_dim": head_dim, "intermediate": intermediate, "kv_heads": kv_heads})
    if heads % kv_heads:
        raise InvalidArgumentError("kv_heads", got=str(kv_heads), allowed=f"divisors of heads = {heads}")
    hidden, rows = heads * head_dim, cuts(seq, bm)
    splits = min(max(splits, 1), cuts(intermediate, bn))
    wide, narrow = cuts(intermediate, bn), cuts(hidden, bn)
    accesses = rows * (
        2 * heads * cuts(seq, bk) + narrow * 2 * heads + 3 * wide * narrow + narrow * 2 * (wide + splits)
    )
    check_sizes({}, tasks=rows * (heads + wide + narrow * (1 + splits)), accesses=accesses)
    build = Builder(dtype)
    q = build.tensor("Q", (heads, seq, head_dim), (1, bm, head_dim))
    keys = [build.tensor(name, (kv_heads, seq, head_dim), (1, bk, head_dim)) for name in ("K", "V")]
    attended = build.tensor("attended", (seq, hidden), (bm, head_dim))
    residual = build.tensor("residual", (seq, hidden), (bm, bn))
    w_o, h = build.tensor("W_o", (hidden, hidden), (head_dim, bn)), build.tensor("H", (seq, hidden), (bm, bn))
    add_attention(build, (q, *keys), attended, causal=causal)
    before = len(build.tasks)
    multiply(build, "projection", attended, w_o, h)
    build.tasks[before:] = [_with_residual(task, residual) for task in build.tasks[before:]]
    gate, up = (build.tensor(name, (hidden, intermediate), (bn, bn)) for name in ("W_gate", "W_up"))
    act = build.tensor("act", (seq, intermediate), (bm, bn))
    add_gate_up_silu(build, h, gate, up, act, fused=True)
    multiply(build, "down", act, build.tensor("W_down", (intermediate, hidden), (bn, bn)), _out(build, h), splits)
    return build.graph()


def _out(build: Builder, h: Tensor) -> Tensor:
    return build.tensor("Y", h.shape, h.tile)


def _with_residual(task: Task, residual: Tensor) -> Task:
    reads = (*task.reads, (residual.name, task.writes[0][1]))
    return Task(task.id, task.name, reads, task.writes, task.flops, task.phase, task.index)
