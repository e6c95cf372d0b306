"""The widening of compact tiles for products of several tokens, its own source executed in NumPy."""

import threading
import types
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.jit import ConstexprFunction, JITFunction

from kit.numpy_gpu.gluon_in_numpy import Array, Gluon, wrapped
from kit.numpy_gpu.numpy_memory import Memory
from kit.operands.compact import shape_of
from onewave.ops.linear.hopper import compact_kernel
from onewave.wave.weights.compact import bases_of, compact_images, scales_of

BATCHES = {8: 1, 16: 8, 32: 16}


class Stage:
    """A stage that keeps the words it is given."""

    words: Array

    def store(self, values: Array) -> None:
        self.words = values.astype(np.int32)  # NumPy has wider ones of constants


def in_numpy(memory: Memory) -> dict[str, Any]:
    """The module's functions over NumPy."""
    gl = Gluon(memory, 0, (1, 1), threading.Lock())
    space: dict[str, Any] = {"gl": gl}
    for name, value in vars(compact_kernel).items():
        if isinstance(value, JITFunction):
            space[name] = types.FunctionType(value.fn.__code__, space, name, value.fn.__defaults__)
        elif isinstance(value, ConstexprFunction):
            space[name] = value.fn if name != "words_layout" else lambda: "registers"
        elif name.startswith("_") and hasattr(value, "value"):
            space[name] = np.int32(value.value)

    def times(pairs: Array, factors: Array) -> Array:
        halves = [
            (np.asarray(words)[..., None].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            for words in (pairs, np.broadcast_to(factors, pairs.shape).copy())
        ]
        exact = (halves[0] * halves[1]).view(np.uint32)
        assert not (exact & 0xFFFF).any()  # nothing is rounded
        return wrapped((exact >> 16).astype(np.uint16).view(np.int32)[..., 0])

    space["times"] = times
    return space


@pytest.mark.parametrize(
    ("tile_rows", "images", "columns", "slices"),
    [(8, 2, 32, 4), (8, 1, 64, 4), (16, 2, 32, 4), (16, 1, 256, 1), (32, 2, 64, 2), (32, 1, 64, 4)],
)
def test_each_stage_gets_the_weights_that_tma_would_bring(
    tile_rows: int, images: int, columns: int, slices: int
) -> None:
    shape = shape_of(BATCHES[tile_rows], images)
    assert shape.rows == tile_rows
    dice = torch.Generator().manual_seed(tile_rows)
    rows, cols = 2 * columns + tile_rows, 2 * shape.cols
    weights = torch.randn(rows, cols, generator=dice).bfloat16()
    weights[3, 5::97] *= 2.0**-40  # thirteen bits do not reach these
    weights[rows - 1] = 0.0
    bases = bases_of(weights)
    tiles, lists, reached = compact_images(weights, bases, shape)
    assert bool(reached)
    assert int(lists[:, 0].max()) > 2
    order = torch.randperm(len(tiles), generator=dice)
    memory = Memory()
    packed = compact_kernel.Packed(
        words=memory.put(tiles[order].view(torch.int32).numpy()),
        lists=memory.put(lists[order].numpy()),
        places=memory.put(order.argsort().int().numpy()),
        scales=memory.put(scales_of(bases).numpy()),
        tiles=wrapped(np.int32(2)),
        blocks=wrapped(np.int32(rows // tile_rows)),
        listed=wrapped(np.int32(1)),
    )
    c = types.SimpleNamespace(COLUMNS=columns, SLICES=slices)
    t = types.SimpleNamespace(R=tile_rows, IMAGES=images)
    own, stage = in_numpy(memory), Stage()
    units = slices if tile_rows > 8 else slices // 2
    for column, step in product(range(3), range(cols // 64 // slices)):
        k = step * units
        place = own["load_places"](packed, wrapped(np.int32(column)), wrapped(np.int32(k)), c, t)
        loaded = own["load_parts"](packed, place, wrapped(np.int32(column)), wrapped(np.int32(k)), c, t)
        factors = own["factors_of"](packed, wrapped(np.int32(column)), c, t)
        own["widen_stage"](loaded, factors, packed, wrapped(np.int32(column)), wrapped(np.int32(k)), stage, c, t)
        found = torch.from_numpy(np.ascontiguousarray(stage.words)).view(torch.bfloat16).view(slices, columns, 64)
        inside = min(columns, rows - column * columns)
        for part in range(slices):
            first = (step * slices + part) * 64
            expected = weights[column * columns :][:inside, first : first + 64]
            assert torch.equal(found[part, :inside], expected), (column, step, part)
