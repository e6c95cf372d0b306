"""A decode step's proved table, run by tiles.interpret with several workers in random order, against the forward pass.

Operators are plain float64 NumPy on what the graph says a task reads. An activation's tile is [sequences, 1 + values]:
the place of its first value, then the values, as tiles are what one task made.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kit.models.tiny_decoders import BASE, in_float32, random_model
from kit.task_tables.execute import execute
from onewave.models import llama_plan
from onewave.models.batch import Batch
from onewave.models.decode_wave import wave_weights
from onewave.models.llama_plan import DecodePlan, DecodeStep, plan_decode
from onewave.wave.plan.layout import keys_per_split, splits_of
from onewave.wave.plan.operations import INPUT, OUTPUT

Tiles = Sequence[Any]


def joined(tiles: Tiles) -> np.ndarray:
    """All values of a row from the tiles that hold it, in their places."""
    end = max(int(tile[0, 0]) + tile.shape[1] - 1 for tile in tiles)
    row = np.full((len(tiles[0]), end), np.nan)
    for tile in tiles:
        first = int(tile[0, 0])
        row[:, first : first + tile.shape[1] - 1] = tile[:, 1:]
    return row


def placed(first: int, values: np.ndarray) -> np.ndarray:
    return np.concatenate((np.full((len(values), 1), first), values), axis=1)


def normed(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps)


class Step:
    """The operators of one step. weights: rows by operation, norm gains multiplied in."""

    def __init__(self, model: Any, plan: DecodePlan, angles: np.ndarray):
        self.config, self.groups, self.angles = model.config, plan.groups, angles
        self.rows = plan.program.shape.rows

    def operators(self) -> dict[str, Any]:
        found: dict[str, Any] = {"head": lambda reads: self.product(reads, norm=True)}
        for layer in range(self.config.num_layers):
            found |= {
                f"qkv{layer}": lambda reads: self.product(reads, norm=True),
                f"attend{layer}": self.attend,
                f"combine{layer}": self.combine,
                f"o{layer}": self.add,
                f"gate_up{layer}": self.gate,
                f"down{layer}": self.add,
            }
        return found

    def product(self, reads: Tiles, *, norm: bool = False) -> list[np.ndarray]:
        weights = [tile for tile in reads if tile.dtype == object]
        x = joined([tile for tile in reads if tile.dtype != object])
        x = normed(x, self.config.rms_norm_eps) if norm else x
        first = weights[0][0]["row"]
        matrix = np.concatenate([tile[0]["rows"] for tile in weights])
        return [placed(first, x @ matrix.T)]

    def gate(self, reads: Tiles) -> list[np.ndarray]:
        (made,) = self.product(reads, norm=True)
        gate, up = made[:, 1::2], made[:, 2::2]
        return [placed(int(made[0, 0]) // 2, gate / (1 + np.exp(-gate)) * up)]

    def add(self, reads: Tiles) -> list[np.ndarray]:
        """A product onto the residual stream: its row blocks (or, at first, the embedding) come last."""
        last = max(i for i, tile in enumerate(reads) if tile.dtype == object) + 1
        (made,) = self.product(reads[:last])
        first, stop = int(made[0, 0]), int(made[0, 0]) + made.shape[1] - 1
        total = made[:, 1:] + joined(reads[last:])[:, first:stop]
        blocks = [placed(at, total[:, at - first :][:, : self.rows]) for at in range(first, stop, self.rows)]
        return [placed(first, total), *blocks]

    def rotated(self, heads: np.ndarray) -> np.ndarray:
        half = heads.shape[-1] // 2
        cos, sin = self.angles[:half], self.angles[half:]
        a, b = heads[..., :half], heads[..., half:]
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)

    def attend(self, reads: Tiles) -> list[np.ndarray]:
        cache, groups, dim = reads[-1][0], self.groups, self.groups.head_dim
        row = joined(reads[:-1])[0]
        group = cache["unit"] % groups.count
        head, kv_head = groups.first_head(group), group // groups.of_kv_head
        q = self.rotated(row[head * dim :][: groups.heads_of(group) * dim].reshape(-1, dim)) * dim**-0.5
        keys, values = cache["keys"], cache["values"]
        if cache["last"]:
            k = row[(groups.heads + kv_head) * dim :][:dim]
            v = row[(groups.heads + groups.kv_heads + kv_head) * dim :][:dim]
            keys, values = np.vstack((keys, self.rotated(k))), np.vstack((values, v))
        scores = q @ keys.T
        peak = scores.max(axis=1, initial=-1e30)
        weights = np.exp(scores - peak[:, None])
        part = np.concatenate((peak[:, None], weights.sum(axis=1)[:, None], weights @ values), axis=1)
        made = [part[first : first + groups.merged] for first in range(0, len(part), groups.merged)]
        if groups.reader_merges and cache["split"] == 0:  # finished attention; several splits make none
            made.append(np.full_like(part, np.nan))
        return [*made, part[:1, :1]] if cache["last"] else made

    def combine(self, reads: Tiles) -> list[np.ndarray]:
        parts = np.stack(reads)  # [splits, heads, 2 + dim]
        scale = np.exp(parts[:, :, 0] - parts[:, :, 0].max(axis=0))
        total = (parts[:, :, 2:] * scale[:, :, None]).sum(axis=0) / (parts[:, :, 1] * scale).sum(axis=0)[:, None]
        return [total]


# So many keys that each split has some: the shipped plan gives a split without any no tile of the cache.
@pytest.mark.parametrize(
    ("workers", "seed", "splits", "context"),
    [(1, 0, 4, 500), (3, 1, 4, 512), (7, 2, 4, 500), (3, 3, 8, 1000), (7, 4, 16, 10200)],
)
def test_the_table_gives_the_forward_passs_logits(
    workers: int, seed: int, splits: int, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_plan, "_ATTENTION_TASKS", 2 * splits)
    model = in_float32(random_model(replace(BASE, num_heads=4, num_kv_heads=2, max_position=10304)))
    plan = plan_decode(DecodeStep(model.config), workers=workers, context=context)
    graph, table, groups = plan.graph, plan.table, plan.groups
    assert groups.of_kv_head == 1  # so a unit is its KV head's
    assert splits_of(context + 1, groups.splits, reader_merges=groups.reader_merges) == groups.splits == splits
    kv = model.new_cache(num_slots=1, capacity=context + 1)
    kv.k.normal_(generator=torch.Generator().manual_seed(1))
    kv.v.normal_(generator=torch.Generator().manual_seed(2))
    step = Step(model, plan, model.rotary.rows(context + 1)[context].double().numpy())
    memory: dict[int, np.ndarray] = {}

    def put(name: str, index: tuple[int, ...], value: Any) -> None:
        boxed = np.empty(1, dtype=object)
        boxed[0] = value
        memory[graph.tile_number((name, index))] = boxed

    token = 17
    embedded = model.weights.embedding[token][None].double().numpy()
    memory[graph.tile_number((INPUT, (0, 0)))] = placed(0, embedded)
    rows = plan.program.shape.rows
    for name, weight in wave_weights(model).items():
        blocks = graph.tensors[f"W_{name}"].grid[0]
        whole = weight.block(0, blocks * rows, torch.device("cpu")).double().numpy()
        for block in range(blocks):
            part = whole[block * rows : (block + 1) * rows]
            put(f"W_{name}", (block, 0), {"row": block * rows, "rows": part})
    share = keys_per_split(context + 1, groups.splits, reader_merges=groups.reader_merges)
    for layer in range(model.config.num_layers):
        for unit in range(groups.count):
            keys, values = (cache[layer, 0, unit, :context].double().numpy() for cache in (kv.k, kv.v))
            for split in range(groups.splits):
                span = slice(split * share, (split + 1) * share)
                where = {"unit": unit, "split": split, "last": split == groups.splits - 1}
                put(f"cache{layer}", (unit, split), {**where, "keys": keys[span], "values": values[span]})
    operators = step.operators()
    layers = range(model.config.num_layers)
    operators |= {f"o{layer}": lambda reads: step.add(with_places(reads, step)) for layer in layers}
    found = execute(table, memory, operators, seed=seed)
    logits = joined(
        [
            found[graph.tile_number((OUTPUT, (0, i)))]
            for i in range(graph.tensors[OUTPUT].grid[1])
            if graph.tile_number((OUTPUT, (0, i))) in found
        ]
    )
    batch = Batch.decode(*torch.tensor([[token], [context], [0]]))
    expected = model.forward(batch, kv).double().numpy()
    assert np.abs(logits[:, :131] - expected).max() < 1e-4 * np.abs(expected).max()


def with_places(reads: Tiles, step: Step) -> list[Any]:
    """Attention [heads, dim], unit by unit and part by part, as one row: as it was merged, or merged here where the
    splits come in front of it."""
    groups = step.groups
    few = groups.count * groups.splits if groups.reader_merges else 0
    tiles = few + sum(len(groups.parts_of(group)) for group in range(groups.count))
    whole = reads[few:tiles]
    if few:
        whole = [step.combine(reads[first : first + groups.splits])[0] for first in range(0, few, groups.splits)]
    row = np.concatenate([tile.reshape(1, -1) for tile in whole], axis=1)
    return [placed(0, row), *reads[tiles:]]
