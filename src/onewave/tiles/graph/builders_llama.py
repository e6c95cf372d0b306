"""One decode step of a LLaMA-family model as a graph: every task of every layer, from the model's plain numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any, cast

from onewave.base.errors import ConfigError, InvalidArgumentError, shown
from onewave.tiles.graph.builders import Builder, check_sizes, cuts
from onewave.tiles.graph.graph import Tensor, Tile, TileGraph

__all__ = ["DecodeShape", "built_in_models", "decode_shape", "decode_step"]

# What one task streams from a weight matrix: long enough to hide a task's start (~1 us at one worker's share of the
# memory's bandwidth is ~36 kB on an H200), short enough that the last wave of a layer's GEMM stays a small part of it.
WEIGHT_TILE_BYTES = 256 * 1024
SILU_COLUMNS = 1024
KV_TILE_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class DecodeShape:
    """The numbers that a decode step depends on. context: tokens already in the cache; batch: sequences."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    layers: int
    vocab: int
    context: int = 4096
    batch: int = 1

    def __post_init__(self) -> None:
        check_sizes({name: int(value) for name, value in vars(self).items() if name != "context"})
        if not 0 <= self.context < 2**40:
            raise InvalidArgumentError("context", got=str(self.context), allowed="0 to 2^40 - 1")
        if self.heads % self.kv_heads:
            raise InvalidArgumentError("kv_heads", got=str(self.kv_heads), allowed=f"divisors of heads = {self.heads}")

    @property
    def weight_elements(self) -> int:
        """Elements of all matrices that a step streams: the layers' and the head's."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        layer = self.hidden * (qkv + self.heads * self.head_dim + 3 * self.intermediate)
        return self.layers * layer + self.vocab * self.hidden


def built_in_models() -> tuple[str, ...]:
    """Names of the configurations that come with onewave."""
    folder = resources.files("onewave") / "models" / "builtin"
    return tuple(sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".json")))


def decode_shape(model: str, *, context: int = 4096, batch: int = 1) -> DecodeShape:
    """Read a model's numbers. model: a built-in name, or the path of a config.json.

    Raises ConfigError, InvalidArgumentError.
    """
    if model in built_in_models():
        text = (resources.files("onewave") / "models" / "builtin" / f"{model}.json").read_text(encoding="utf-8")
    elif model.endswith(".json"):
        try:
            text = Path(model).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"config {model}", got=type(error).__name__, allowed="a readable config.json") from None
    else:
        allowed = f"{', '.join(built_in_models())}, or the path of a config.json"
        raise InvalidArgumentError("model", got=shown(model), allowed=allowed)
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise ConfigError(f"config {model}", got="malformed JSON", allowed="a config.json object")
    fields = cast("dict[str, object]", document)

    def number(name: str, fallback: int | None = None) -> int:
        value = fields.get(name)
        value = fallback if value is None else value
        if type(value) is not int:
            raise ConfigError(f"config {model}: {name}", got=repr(value)[:40], allowed="a whole number")
        return value

    heads = number("num_attention_heads")
    hidden = number("hidden_size")
    return DecodeShape(
        hidden=hidden,
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", hidden // max(heads, 1)),
        intermediate=number("intermediate_size"),
        layers=number("num_hidden_layers"),
        vocab=number("vocab_size"),
        context=context,
        batch=batch,
    )


def decode_step(
    shape: DecodeShape,
    *,
    workers: int = 132,
    split: int | None = None,
    dtype: str = "bf16",
    kv_dtype: str | None = None,
) -> TileGraph:
    """One token for each of `batch` sequences, all layers and the head.

    Phases: norm, qkv, rope+append, attention (split over the keys), combine, o-proj, ffn (gate_up, silu, down), head.
    Matrices are cut into bands of rows of 256 KiB (twice the activations that a band is multiplied with, if that is
    more), less where that would leave under 1.5 tasks a worker. Activations are cut into blocks of 8 sequences, or a
    quarter of the batch. What every task of a stage reads is one tile a block, written by one task; what many tasks
    write is gathered by norm, silu and combine, so the accesses stay linear in the tasks. The row that rope+append adds
    to the cache is a tile of its own. split: keys a task of attention; by default about two tasks a worker, 64 keys at
    least and 8 MiB of K at most. Task.index is (layer, place in the stage). Raises InvalidArgumentError.
    """
    step = _Step(shape, workers, split, dtype, kv_dtype or dtype)
    x = step.tensor("x0", (shape.batch, shape.hidden), (step.rows, shape.hidden))
    for layer in range(shape.layers):
        x = step.layer(layer, x)
    normed = step.norm("final", x, shape.layers)
    width = step.band(shape.vocab, shape.hidden, 1)
    step.linear("head", "head", normed, "logits", shape.vocab, width, shape.layers)
    return step.build.graph()


class _Step:
    """The graph under construction."""

    def __init__(self, shape: DecodeShape, workers: int, split: int | None, dtype: str, kv_dtype: str):
        self.build, self.kv_build = Builder(dtype), Builder(kv_dtype)
        self.shape, self.workers = shape, workers
        check_sizes({"workers": workers, "split": 1 if split is None else split})
        total = shape.batch * shape.kv_heads * shape.context
        # A task's keys stay a small part of a cache however long the context is.
        most = max(64, int(KV_TILE_BYTES / (shape.head_dim * self.kv_build.itemsize)))
        self.split = split or min(most, max(64, -(-cuts(total, 2 * workers) // 64) * 64))
        self.splits = max(1, cuts(shape.context, self.split))
        self.rows = min(shape.batch, max(8, cuts(shape.batch, 4)))  # sequences a block of activations
        self.blocks = cuts(shape.batch, self.rows)
        self._check()

    def _check(self) -> None:
        shape = self.shape
        rows = shape.hidden * 2 + shape.intermediate + (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        worst = min(rows, 4 * rows * shape.hidden * 4 // WEIGHT_TILE_BYTES + 8 * self.workers)
        tasks = shape.layers * (worst + shape.kv_heads * (8 + shape.batch * self.splits))
        check_sizes({}, tasks=tasks + min(shape.vocab, shape.vocab * shape.hidden * 8 // WEIGHT_TILE_BYTES + 1024))

    def tensor(self, name: str, shape: tuple[int, ...], tile: tuple[int, ...], itemsize: float | None = None) -> Tensor:
        return self.build.tensor(name, shape, tile, itemsize)

    def band(self, rows: int, depth: int, matrices: int) -> int:
        """Rows of a weight tile: a power of two."""
        most = max(WEIGHT_TILE_BYTES, 2 * self.shape.batch * depth * self.build.itemsize)
        width = 1
        while width * 2 * depth * matrices * self.build.itemsize <= most:
            width *= 2
        while width > 1 and 2 * cuts(rows, width) < 3 * self.workers:
            width //= 2
        return width

    def linear(
        self,
        name: str,
        phase: str,
        x: Tensor,
        out: str,
        rows: int,
        width: int,
        layer: int,
        *,
        residual: Tensor | None = None,
        matrices: int = 1,
    ) -> Tensor:
        """out = x W^T (+ residual), W [rows, depth] in bands of `width` rows; two matrices for gate and up."""
        batch, depth = x.shape
        names = [f"W_{name}{layer}" if matrices == 1 else f"W_{half}{layer}" for half in ("gate", "up")[:matrices]]
        for weight in names:
            self.tensor(weight, (rows, depth), (width, depth))
        made = self.tensor(out, (batch, rows * matrices), (self.rows, width * matrices))
        inputs = every_tile(x)
        for place in range(made.grid[1]):
            count = min(width, rows - place * width) * matrices
            reads = (*inputs, *((weight, (place, 0)) for weight in names))
            if residual is not None:
                columns = overlapping(residual, place * width, count)
                reads += tuple((residual.name, (block, col)) for block in range(self.blocks) for col in columns)
            writes = tuple((out, (block, place)) for block in range(self.blocks))
            self.build.task(name, reads, writes, 2 * batch * count * depth, phase=phase, index=(layer, place))
        return made

    def norm(self, name: str, x: Tensor, layer: int) -> Tensor:
        """Gather a block of x, normalise every row, write one tile."""
        weight = self.tensor(f"W_{name}_norm{layer}", (self.shape.hidden,), (self.shape.hidden,))
        made = self.tensor(f"{name}_normed{layer}", x.shape, (self.rows, x.shape[1]))
        first = self.blocks if name == "ffn" else 0
        for block in range(self.blocks):
            reads = (*((x.name, (block, col)) for col in range(x.grid[1])), (weight.name, (0,)))
            flops = 4 * made.tile_shape((block, 0))[0] * x.shape[1]
            target = ((made.name, (block, 0)),)
            self.build.task("norm", reads, target, flops, phase="norm", index=(layer, first + block))
        return made

    def layer(self, layer: int, x: Tensor) -> Tensor:
        """Add one layer; returns its output, the next layer's input."""
        shape = self.shape
        qkv_rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        normed = self.norm("attention", x, layer)
        width = self.band(qkv_rows, shape.hidden, 1)
        qkv = self.linear("qkv", "qkv", normed, f"qkv{layer}", qkv_rows, width, layer)
        attended = self.attention(layer, qkv)
        width = self.band(shape.hidden, attended.shape[1], 1)
        h = self.linear("o_proj", "o-proj", attended, f"h{layer}", shape.hidden, width, layer, residual=x)
        normed = self.norm("ffn", h, layer)
        width = self.band(shape.intermediate, shape.hidden, 2)
        both = self.linear("gate_up", "ffn", normed, f"gate_up{layer}", shape.intermediate, width, layer, matrices=2)
        act = self.silu(layer, both, width)
        width = self.band(shape.hidden, shape.intermediate, 1)
        return self.linear("down", "ffn", act, f"x{layer + 1}", shape.hidden, width, layer, residual=h)

    def silu(self, layer: int, both: Tensor, width: int) -> Tensor:
        """Gather gate and up, write SiLU(gate) * up in wide tiles."""
        step = max(width, SILU_COLUMNS // width * width)
        act = self.tensor(f"act{layer}", (both.shape[0], self.shape.intermediate), (self.rows, step))
        for block, place in product(range(self.blocks), range(act.grid[1])):
            rows, count = act.tile_shape((block, place))
            reads = tuple((both.name, (block, col)) for col in overlapping(both, 2 * place * step, 2 * count))
            target = ((act.name, (block, place)),)
            index = (layer, block * act.grid[1] + place)
            self.build.task("silu", reads, target, 5 * rows * count, phase="ffn", index=index)
        return act

    def attention(self, layer: int, qkv: Tensor) -> Tensor:
        """Add rope+append, split attention and combine; returns the attended heads."""
        shape, batch, dim = self.shape, self.shape.batch, self.shape.head_dim
        group = shape.heads // shape.kv_heads
        q = self.tensor(f"q{layer}", (batch, shape.heads * dim), (self.rows, group * dim))
        fresh = self.rope_append(layer, qkv, q)
        itemsize = self.kv_build.itemsize
        caches: list[Tensor] = []
        if shape.context:
            whole = (batch, shape.kv_heads, shape.context, dim)
            caches = [self.tensor(f"{name}{layer}", whole, (1, 1, self.split, dim), itemsize) for name in "KV"]
        # A partial result: the group's outputs with their running maximum and sum, in float32.
        parts = (batch, shape.kv_heads, self.splits, group * (dim + 2))
        partial = self.tensor(f"partial{layer}", parts, (1, 1, 1, parts[3]), 4)
        for place, (b, kv, part) in enumerate(product(range(batch), range(shape.kv_heads), range(self.splits))):
            keys = min(shape.context, (part + 1) * self.split) - part * self.split
            reads: tuple[Tile, ...] = (
                (q.name, (b // self.rows, kv)),
                *((cache.name, (b, kv, part, 0)) for cache in caches),
            )
            if part == self.splits - 1:
                keys += 1
                reads += tuple((new.name, (b, kv, 0)) for new in fresh)
            flops = group * keys * (4 * dim + 5)
            writes = ((partial.name, (b, kv, part, 0)),)
            self.build.task("attention", reads, writes, flops, phase="attention", index=(layer, place))
        return self.combine(layer, partial, q)

    def rope_append(self, layer: int, qkv: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate a block's q and k of one KV head; q becomes one tile, k and v the cache's new rows. Returns those."""
        shape, batch, dim = self.shape, self.shape.batch, self.shape.head_dim
        group = shape.heads // shape.kv_heads
        rows = (batch, shape.kv_heads, dim)
        new_k, new_v = (self.tensor(f"new_{n}{layer}", rows, (1, 1, dim), self.kv_build.itemsize) for n in "KV")
        for kv, block in product(range(shape.kv_heads), range(self.blocks)):
            spans = ((kv * group, group), (shape.heads + kv, 1), (shape.heads + shape.kv_heads + kv, 1))
            needed = {col for first, heads in spans for col in overlapping(qkv, first * dim, heads * dim)}
            sequences = range(block * self.rows, min(batch, (block + 1) * self.rows))
            reads = tuple((qkv.name, (block, col)) for col in sorted(needed))
            writes = ((q.name, (block, kv)), *((new.name, (b, kv, 0)) for new in (new_k, new_v) for b in sequences))
            flops = 6 * len(sequences) * (group + 1) * dim
            index = (layer, kv * self.blocks + block)
            self.build.task("rope_append", reads, writes, flops, phase="rope+append", index=index)
        return new_k, new_v

    def combine(self, layer: int, partial: Tensor, q: Tensor) -> Tensor:
        """Merge the partial results of a block and KV head."""
        attended = self.tensor(f"attended{layer}", q.shape, q.tile)
        for kv, block in product(range(self.shape.kv_heads), range(self.blocks)):
            sequences = range(block * self.rows, min(self.shape.batch, (block + 1) * self.rows))
            reads = tuple((partial.name, (b, kv, part, 0)) for b in sequences for part in range(self.splits))
            flops = 3 * len(reads) * attended.tile[1]
            index = (layer, kv * self.blocks + block)
            target = ((attended.name, (block, kv)),)
            self.build.task("combine", reads, target, flops, phase="combine", index=index)
        return attended


def every_tile(tensor: Tensor) -> tuple[Tile, ...]:
    """All tiles of a matrix."""
    return tuple((tensor.name, (row, col)) for row in range(tensor.grid[0]) for col in range(tensor.grid[1]))


def overlapping(tensor: Tensor, first: int, count: int) -> range:
    """Columns of a matrix's grid that hold any of the elements first to first + count."""
    return range(first // tensor.tile[1], cuts(first + count, tensor.tile[1]))
