"""A product's reads of packed tiles and its results, the kernel's own source executed in NumPy."""

from __future__ import annotations

import re
import threading
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.jit import ConstexprFunction, JITFunction

from kit.numpy_gpu.gluon_in_numpy import Array, Gluon, wrapped
from kit.numpy_gpu.numpy_memory import Memory
from kit.operands.nested import nested_rows
from onewave.base.weight_formats import COMPACT, NESTED, NIBBLES, ROUNDINGS, WeightFormat, mixed
from onewave.ops.linear.hopper import narrow_values, packed_kernel, packed_ring, packed_values
from onewave.wave.plan.layout import tile_shape
from onewave.wave.weights.formats import tile_format

BATCHES = {8: 1, 16: 8, 32: 16, 64: 32}
STATEMENT = re.compile(r"([a-z]\w*)((?:\.\w+)+) (\{.*?\}|\S+?), (.*?);")


def floats(words: Any) -> Any:
    """Bfloat16 halves of words, float64 [..., 2]."""
    return (words[..., None].view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def halves(values: Any) -> Any:
    """Undo floats, rounded once; float64 to nearest, ties to even."""
    rounded = torch.from_numpy(np.asarray(values, np.float32)).bfloat16()
    assert (values.astype(np.float32) == values).all()  # no rounding but that one
    return rounded.view(torch.int16).numpy().view(np.uint16).view(np.uint32)[..., 0]


def exact(values: Any) -> Any:
    made = halves(values)
    assert (floats(made) == values).all()  # nothing is rounded
    return made


def bits_of(values: Any) -> Any:
    assert (values.astype(np.float32) == values).all()
    return values.astype(np.float32).view(np.uint32)


def run_asm(text: str, registers: str, operands: Any, **_: Any) -> tuple[Array, ...]:
    """The instructions of inline assembly, one by one on whole tensors."""
    outputs = registers.count("=")
    named = {f"${outputs + at}": np.asarray(each).astype(np.uint32) for at, each in enumerate(operands)}
    float32 = lambda word: word.view(np.float32).astype(np.float64)  # noqa: E731
    doing: dict[str, Any] = {
        "mov": lambda x: x, "and": np.bitwise_and, "shr": np.right_shift, "shl": np.left_shift,
        "lop3": lambda x, mask, more, table: (x & mask) ^ more if table.flat[0] == 0x6A else (x & mask) | more,
        "prmt": lambda x, _, order: permuted(x, int(order.flat[0])),
        "mul.bf16x2": lambda x, y: exact(floats(x) * floats(y)),
        "sub.bf16x2": lambda x, y: exact(floats(x) - floats(y)),
        "fma.bf16x2": lambda x, y, z: halves(floats(x) * floats(y) + floats(z)),
        "bfe": lambda x, first, count: (x << 32 - count - first).view(np.int32) >> (32 - count).view(np.int32),
        "cvt.f16": lambda x: bits_of((x & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)),
        "cvt.s32": lambda x: bits_of(x.view(np.int32).astype(np.float64)),
        "cvt.f32": lambda x, y: halves(np.stack((float32(y), float32(x)), axis=-1)),
        "mul.f32": lambda x, y: bits_of(float32(x) * float32(y)),
        "fma.f32": lambda x, y, z: (float32(x) * float32(y) + float32(z)).astype(np.float32).view(np.uint32),
        "sub.f32": lambda x, y: bits_of(float32(x) - float32(y)),
    }  # fmt: skip

    def value(word: str) -> Any:
        return named[word] if word in named else np.full(shape, int(word, 0), np.uint32)

    shape = named[f"${outputs}"].shape
    for name, kinds, target, words in STATEMENT.findall(text):
        operation = name if name in doing else f"{name}.{kinds.split('.')[-1]}"
        if target.startswith("{"):  # the lower half of a word, as the word
            named[target[1:].split(",")[0]] = value(words)
        else:
            named[target] = doing[operation](*map(value, words.split(", ")))
    return tuple(wrapped(named[f"${at}"].view(np.int32)) for at in range(outputs))


def permuted(words: Any, order: int) -> Any:
    """Bytes of words in the order of prmt, of the first operand."""
    found = words[..., None].view(np.uint8)
    return np.ascontiguousarray(found[..., [order >> 4 * at & 15 for at in range(4)]]).view(np.uint32)[..., 0]


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
    gl.inline_asm_elementwise = run_asm
    nothing = types.SimpleNamespace(wait=lambda *_: None)

    def copy(target: Copies.Place, source: Any) -> None:
        assert target.at not in target.copies.places
        target.copies.places[target.at] = gl.load(source)

    space: dict[str, Any] = {
        "gl": gl, "mbarrier": nothing, "max": max, "min": min, "len": len, "range": range,
        "async_copy": types.SimpleNamespace(async_copy_global_to_shared=copy, mbarrier_arrive=lambda *_, **__: None),
    }  # fmt: skip
    modules = (packed_values, narrow_values, packed_ring, packed_kernel)
    for name, value in (each for module in modules for each in vars(module).items()):
        if isinstance(value, JITFunction):
            space[name] = types.FunctionType(value.fn.__code__, space, name, value.fn.__defaults__)
        elif isinstance(value, ConstexprFunction):
            space[name] = (lambda: "registers") if name.endswith("_layout") else value.fn
        elif name.startswith("_") and hasattr(value, "value"):
            space[name] = value.value
    return space


def numbers_of(own: dict[str, Any], packed: Any, planes: Any, beside: Copies, c: Any) -> Tensor:
    """The product's numbers of copied words, float32 [rows, columns]: each row block's rows, unit by unit."""
    units = packed.tiles * own["units_of"](c.R, c.IMAGES)
    blocks, unroll, lines = own["blocks_of"](c.R), 4 if c.R == 8 else 2, own["lines_in_stage"](c.FORMAT, c.R)
    found: list[Tensor] = []
    for first in range(0, packed.blocks * c.R, 64):
        block, group = first // c.ROWS, first % c.ROWS // 64
        factors, words, made = own["load_factors"](packed, first, "sums", c), (), list[Tensor]()
        scaled = factors

        def part(copies: Copies, at: int, group: int = group) -> Any:
            return copies.places[at][4 * group : 4 * group + 4]

        for number in range(units):
            slot, unit = block * units + number, number % unroll
            at_words = slot // own["share_of_words"](c.FORMAT, c.R)
            before, words = words, ()
            for each in range(blocks):
                brought: list[Any] = []
                for plane in range(len(planes)):
                    if own["brings_plane"](plane, unit, c.FORMAT, c.R):
                        brought.append(part(planes[plane], at_words * blocks + each))
                    elif c.FORMAT != 3:
                        brought.append(before[each][plane])
                for line in range(lines):
                    if own["lines_of"](unit, c.FORMAT, c.R):
                        brought.append(part(beside, (slot * blocks + each) * lines + line))
                    elif c.FORMAT != 3:
                        brought.append(before[each][2 + line])
                words = (*words, tuple(brought))
            if own["makes_factors"](unit, c.FORMAT):
                scaled = own["group_factors"](words, factors, unit, c)
            pairs = own["widened"](words, scaled, unit, c)
            if c.FORMAT == 3:
                k, within = divmod(number, units // packed.tiles)
                if most := int(own["load_longest"](packed, first, k)):
                    pairs = own["with_listed"](pairs, packed, first, k, within, most, factors, c)
            # [column of a pair, 16 columns, half of them, half of 16 rows, warp, row in 8, pair in 8 columns]
            bits = np.stack([np.asarray(pair).astype(np.int64).astype(np.uint32).view(np.int32) for pair in pairs])
            pair_bits = torch.from_numpy(bits).int()
            both = torch.stack((pair_bits << 16, pair_bits & -0x10000)).view(torch.float32).view(2, 4, 2, 2, 4, 8, 4)
            made.append(both.permute(4, 3, 5, 1, 2, 6, 0).reshape(64, 64))
        if c.FORMAT < 3:  # multiplied in another order
            order = [at // 4 * 4 + own["unit_at"](at % 4, c.FORMAT, c.R) for at in range(units)]
            made = [made[order.index(unit)] for unit in range(units)]
        rows = torch.cat(made, dim=1)
        if c.FORMAT < 3:
            rows = rows * torch.from_numpy(np.array(factors[0]).astype(np.float32))[:, None]
        found.append(rows)
    return torch.cat(found)


@pytest.mark.parametrize(
    ("form", "tile_rows", "images", "rows"),
    [
        (COMPACT, 8, 1, 64), (COMPACT, 16, 1, 128), (COMPACT, 32, 2, 64), (COMPACT, 64, 1, 128),
        (ROUNDINGS["int8"], 8, 1, 128), (ROUNDINGS["int8"], 16, 2, 64), (ROUNDINGS["int8"], 32, 2, 64),
        (ROUNDINGS["fp8"], 8, 1, 64), (ROUNDINGS["fp8"], 64, 2, 128), (NIBBLES[128, False], 8, 1, 64),
        (NIBBLES[128, False], 32, 4, 128),
        (NIBBLES[64, False], 8, 1, 64), (NIBBLES[32, False], 64, 1, 128), (NIBBLES[128, True], 16, 1, 64),
        (NIBBLES[32, True], 8, 1, 64), (mixed(NESTED, {}), 8, 1, 64), (mixed(NESTED, {}), 32, 2, 128),
    ],
)  # fmt: skip
def test_each_unit_gets_the_weights_that_lie_there(form: WeightFormat, tile_rows: int, images: int, rows: int) -> None:
    shape = tile_shape(BATCHES[tile_rows], head_dim=64, weight_bytes=form.weight_bytes, images=images)
    assert shape.rows == tile_rows
    dice = torch.Generator().manual_seed(tile_rows)
    height, cols = 2 * rows - 64 + tile_rows, 2 * shape.cols
    weights = torch.randn(height, cols, generator=dice).bfloat16()
    if form is COMPACT:
        weights[3, 5::97] *= 2.0**-40  # thirteen bits do not reach these
    # Sums of bytes are scaled, and no number is rounded.
    dtype = torch.float32 if form.number < 3 else torch.bfloat16
    kind = tile_format(form, shape, dtype)
    if kind.product == NESTED.number:
        made = kind.pack_groups(nested_rows(height, cols, 4))
    else:
        made = kind.pack(weights.float() if kind.wide else weights)
    order = torch.randperm(len(made.images), generator=dice)
    lists, longest, memory = made.lists, None, Memory()
    if lists is not None:
        together = 64 // tile_rows
        counts = torch.nn.functional.pad(lists[:, 0].view(-1, 2), (0, 0, 0, -(height // tile_rows) % together))
        longest = memory.put(counts.view(-1, together, 2).amax(dim=1).int().numpy())
    packed = packed_kernel.Packed(
        words=memory.put(made.images[order].view(torch.int32).numpy()),
        lists=None if lists is None else memory.put(lists[order].numpy()),
        longest=longest,
        places=memory.put(order.argsort().int().numpy()),
        scales=memory.put(made.scales.numpy()),
        tiles=2,
        blocks=height // tile_rows,
    )
    row_blocks = -(-height // rows)
    sizes = packed_kernel.Sizes(tokens=1, columns=height, token_blocks=1, row_blocks=row_blocks)
    c = types.SimpleNamespace(
        FORMAT=kind.product, R=tile_rows, IMAGES=images, ROWS=rows, STAGES=cols // 64 * row_blocks, BAND=16
    )
    own = in_numpy(memory)
    c.WORDS = c.STAGES // own["share_of_words"](c.FORMAT, c.R)
    planes, beside = tuple(Copies(memory) for _ in range(own["planes_of"](kind.product))), Copies(memory)
    full = types.SimpleNamespace(index=int)
    own["load_words"](packed, sizes, types.SimpleNamespace(planes=planes, beside=beside, full=full, free=full), c)
    found = numbers_of(own, packed, planes, beside, c)[:height]
    assert torch.equal(found.to(dtype), kind.restore(made, cols))
