"""What a product reads of packed tiles, and what it makes of them, the kernel's own source executed in NumPy."""

from __future__ import annotations

import re
import threading
import types
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.jit import ConstexprFunction, JITFunction

from kit.numpy_gpu.gluon_in_numpy import Array, Gluon, wrapped
from kit.numpy_gpu.numpy_memory import Memory
from kit.operands.compact import shape_of
from onewave.ops.linear.hopper import packed_kernel, packed_values
from onewave.wave.weights.compact import bases_of, compact_images, scales_of

BATCHES = {8: 1, 16: 8, 32: 16, 64: 32}
STATEMENT = re.compile(
    r"(mov|and|shr|shl|lop3|mul\.rn)\.(?:b32|u32|bf16x2) (\S+?), (\S+?)(?:, (\S+?))?(?:, (\S+?), 0xEA)?;"
)


def run_asm(text: str, registers: str, operands: Any, **_: Any) -> tuple[Array, ...]:
    """The instructions of inline assembly, one by one on whole tensors."""
    outputs = registers.count("=")
    named = {f"${outputs + at}": np.asarray(each).astype(np.uint32) for at, each in enumerate(operands)}

    def value(word: str) -> Any:
        return named[word] if word in named else np.uint32(int(word, 0))

    for operation, target, *words in STATEMENT.findall(text):
        first, *rest = (value(word) for word in words if word)
        if operation == "mul.rn":
            halves = [
                (each[..., None].view(np.uint16).astype(np.uint32) << 16).view(np.float32) for each in (first, *rest)
            ]
            exact = (halves[0] * halves[1]).view(np.uint32)
            assert not (exact & 0xFFFF).any()  # nothing is rounded
            named[target] = (exact >> 16).astype(np.uint16).view(np.uint32)[..., 0]
        elif operation == "lop3":
            named[target] = (first & rest[0]) | rest[1]
        else:
            named[target] = {
                "mov": lambda x: x, "and": np.bitwise_and, "shr": np.right_shift, "shl": np.left_shift,
            }[operation](first, *rest)  # fmt: skip
    return tuple(wrapped(named[f"${at}"].view(np.int32)) for at in range(outputs))


class Copies:
    """Shared memory of which each place is written once, by what a copy brings."""

    def __init__(self, memory: Memory):
        self.memory, self.places = memory, dict[int, Array]()

    def index(self, at: int) -> Copies.Place:
        return Copies.Place(self, int(at))

    class Place:
        def __init__(self, copies: Copies, at: int):
            self.copies, self.at = copies, at


def in_numpy(memory: Memory) -> dict[str, Any]:
    """The module's functions over NumPy."""
    gl = Gluon(memory, 0, (1, 1), threading.Lock())
    gl.inline_asm_elementwise = run_asm  # type: ignore[method-assign]
    nothing = types.SimpleNamespace(wait=lambda *_: None)

    def copy(target: Copies.Place, source: Any) -> None:
        assert target.at not in target.copies.places
        target.copies.places[target.at] = gl.load(source)

    space: dict[str, Any] = {
        "gl": gl, "mbarrier": nothing, "max": max, "min": min, "len": len, "range": range,
        "async_copy": types.SimpleNamespace(async_copy_global_to_shared=copy, mbarrier_arrive=lambda *_, **__: None),
    }  # fmt: skip
    for name, value in {**vars(packed_values), **vars(packed_kernel)}.items():
        if isinstance(value, JITFunction):
            space[name] = types.FunctionType(value.fn.__code__, space, name, value.fn.__defaults__)
        elif isinstance(value, ConstexprFunction):
            space[name] = (lambda: "registers") if name.endswith("_layout") else value.fn
        elif name.startswith("_") and hasattr(value, "value"):
            space[name] = value.value
    return space


@pytest.mark.parametrize(("tile_rows", "images", "rows"), [(8, 1, 64), (16, 1, 128), (32, 2, 64), (64, 1, 128)])
def test_each_unit_gets_the_weights_that_lie_there(tile_rows: int, images: int, rows: int) -> None:
    shape = shape_of(BATCHES[tile_rows], images)
    assert shape.rows == tile_rows
    dice = torch.Generator().manual_seed(tile_rows)
    height, cols = 2 * rows - 64 + tile_rows, 2 * shape.cols
    weights = torch.randn(height, cols, generator=dice).bfloat16()
    weights[3, 5::97] *= 2.0**-40  # thirteen bits do not reach these
    bases = bases_of(weights)
    tiles, lists, reached = compact_images(weights, bases, shape)
    assert bool(reached)
    order = torch.randperm(len(tiles), generator=dice)
    places = order.argsort()
    counts = torch.nn.functional.pad(lists[:, 0].view(-1, 2), (0, 0, 0, -(height // tile_rows) % (64 // tile_rows)))
    memory = Memory()
    packed = packed_kernel.Packed(
        words=memory.put(tiles[order].view(torch.int32).numpy()),
        lists=memory.put(lists[order].numpy()),
        longest=memory.put(counts.view(-1, 64 // tile_rows, 2).amax(dim=1).int().numpy()),
        places=memory.put(places.int().numpy()),
        scales=memory.put(scales_of(bases).numpy()),
        tiles=2,
        blocks=height // tile_rows,
    )
    row_blocks, units = -(-height // rows), cols // 64
    sizes = packed_kernel.Sizes(tokens=1, columns=height, token_blocks=1, row_blocks=row_blocks)
    c = types.SimpleNamespace(R=tile_rows, IMAGES=images, ROWS=rows, STAGES=units * row_blocks, BAND=16)
    planes, beside = tuple(Copies(memory) for _ in range(3)), Copies(memory)
    own = in_numpy(memory)
    ring = types.SimpleNamespace(
        planes=planes, beside=beside, full=types.SimpleNamespace(index=int), free=types.SimpleNamespace(index=int)
    )
    own["load_words"](packed, sizes, ring, c)

    def words_of(slot: int, group: int, unit: int) -> Any:
        blocks = own["blocks_of"](tile_rows)
        kinds = (*planes, beside) if own["needs_all"](unit, tile_rows) else (planes[0], planes[2])
        found = (
            [each.places[slot * blocks + block][4 * group : 4 * group + 4] for each in kinds] for block in range(blocks)
        )
        return tuple(tuple(each) for each in found)

    for slot in range(units * row_blocks):
        block, unit = slot // units, slot % units
        for group in range(rows // 64):
            first = block * rows + group * 64
            k, within = divmod(unit, units // 2)
            factors = own["row_factors"](packed, first, c)
            pairs = own["widened"](words_of(slot, group, unit), factors, unit % 4 > 1, c)
            most = int(own["load_longest"](packed, first, k)) if first < height else 0
            if most:
                pairs = own["with_listed"](pairs, packed, first, k, within, most, factors, c)
            # [column of a pair, 16 columns, half of them, half of 16 rows, warp, row in 8, pair in 8 columns]
            bits = torch.from_numpy(
                np.stack([np.asarray(pair).astype(np.int64).astype(np.uint32).view(np.int32) for pair in pairs])
            ).int()
            halves = torch.stack((bits << 16, bits & -0x10000)).view(torch.float32).view(2, 4, 2, 2, 4, 8, 4)
            found = halves.permute(4, 3, 5, 1, 2, 6, 0).reshape(64, 64)
            expected = weights[first : first + 64, unit * 64 : unit * 64 + 64]
            assert torch.equal(found[: len(expected)].bfloat16(), expected), (block, group, unit)
