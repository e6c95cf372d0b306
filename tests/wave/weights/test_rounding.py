"""Rows rounded to one byte, their images in a stream, and the instructions that widen them again."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from kit.operands.random import randn
from kit.operands.read_back import differs
from kit.ptx.ptx_text import executed
from onewave.base.errors import InvalidArgumentError
from onewave.base.rounding import restore_rows, round_rows
from onewave.base.weight_formats import ROW_ROUNDINGS, RowRounding, find_rounding
from onewave.ops.ffn.sizes import FFNSizes
from onewave.ops.ffn.wave.plan import plan_ffn
from onewave.wave.kernel.widen import byte_values
from onewave.wave.plan.layout import tile_shape
from onewave.wave.plan.program import WaveProgram
from onewave.wave.weights.formats.row_bytes import byte_images, bytes_of_registers, operands_of_registers
from onewave.wave.weights.formats.tile_format import Tiles, UnpackedRows
from onewave.wave.weights.pack import Weight, WeightStream
from onewave.wave.weights.pack_impl import unpack_bytes
from onewave.wave.weights.rounding import paired, place_in_image, unpaired

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("rounding", ROW_ROUNDINGS.values(), ids=str)


def values_of(rounding: RowRounding) -> Tensor:
    """The values of the 256 bytes, written out."""
    byte = np.arange(256)
    if rounding.name == "int8":
        return torch.from_numpy(byte.astype(np.uint8).view(np.int8).astype(np.float64))
    sign, exponent, mantissa = 1 - 2 * (byte >> 7), byte >> 3 & 15, byte & 7
    value = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    return torch.from_numpy(np.where((byte & 127) == 127, np.nan, sign * value))


@BOTH
def test_each_value_is_the_nearest_of_the_formats(rounding: RowRounding) -> None:
    rows = randn(5, 700) * torch.tensor([1e-3, 1.0, 30.0, 1e-20, 1e20])[:, None]
    made, scales = round_rows(rows, rounding)
    assert torch.equal(scales, rows.abs().amax(1) / rounding.largest)
    known = values_of(rounding)
    known = known[known.abs() <= rounding.largest]
    found = restore_rows(made, scales, rounding, torch.float32).double()
    distance = (found - rows.double()).abs() / scales[:, None].double()
    nearest = (rows.double()[..., None] / scales[:, None, None].double() - known).abs().amin(-1)
    assert (distance <= nearest + 1e-4).all()


@BOTH
def test_rows_of_zeros_stay_zeros_and_rows_of_nonsense_show(rounding: RowRounding) -> None:
    rows = torch.tensor([[0.0, 0.0], [1e-41, -1e-42], [1.0, float("nan")], [float("inf"), 1.0], [2.0, -4.0]])
    found = restore_rows(*round_rows(rows, rounding), rounding, torch.float32)
    assert torch.equal(found[:2], torch.zeros(2, 2))
    assert found[2:4].isnan().any(1).all()
    assert torch.allclose(found[4], rows[4], rtol=0.07)


def test_an_unknown_rounding_is_refused_with_those_that_are_known() -> None:
    assert find_rounding(None) is None
    assert find_rounding("fp8") is ROW_ROUNDINGS["fp8"]
    with pytest.raises(InvalidArgumentError, match="int8, fp8, int4 or None"):
        find_rounding("int3")


@pytest.mark.parametrize(("batch", "images"), [(1, 1), (2, 2), (8, 1), (16, 2), (32, 1)])
def test_an_image_holds_operand_a_in_the_order_that_threads_read(batch: int, images: int) -> None:
    shape = tile_shape(batch, weight_bytes=1, images=images)
    rows = torch.randint(256, (2 * shape.rows, 3 * shape.cols - 64), generator=torch.Generator().manual_seed(batch))
    made = byte_images(rows.to(torch.uint8), shape, ROW_ROUNDINGS["fp8"])  # whose values any byte may be
    found = unpaired(made, ROW_ROUNDINGS["fp8"]).view(2, 3, images, 8192)
    row, column = torch.meshgrid(torch.arange(64), torch.arange(128), indexing="ij")
    at = place_in_image(row, column)
    assert torch.equal(at.flatten().sort().values, torch.arange(8192))
    padded = torch.nn.functional.pad(rows, (0, 64))
    for block, tile, image in itertools.product(range(2), range(3), range(images)):
        first = tile * shape.cols + image * 128 * shape.quarters
        expected = padded[block * shape.rows + row % shape.rows, first + row // shape.rows * 128 + column]
        assert torch.equal(found[block, tile, image, at].long(), expected)


def test_a_threads_whole_bytes_are_its_registers_of_a_product() -> None:
    operands = torch.randint(256, (2, 64, 128), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    images = bytes_of_registers(operands)
    assert torch.equal(operands_of_registers(images), operands)
    registers = images.view(2, 4, 4, 32, 4, 4)  # 32 columns, 16 rows, thread
    for step, warp, thread, number, byte in itertools.product(range(4), (0, 3), (0, 5, 30), range(4), range(4)):
        row = 16 * warp + 8 * (number % 2) + thread // 4
        column = 32 * step + 8 * (number // 2) + 2 * (thread % 4) + byte // 2 + 16 * (byte % 2)
        assert registers[1, step, warp, thread, number, byte] == operands[1, row, column]


@pytest.mark.parametrize(
    ("text", "rounding", "dtype", "exponent"),
    [
        (byte_values._INT8, "int8", torch.bfloat16, 133),
        (byte_values._INT8, "int8", torch.float16, 24),
        (byte_values._FP8_BF16, "fp8", torch.bfloat16, 120),
        (byte_values._FP8_FP16, "fp8", torch.float16, 8),
    ],
)
def test_all_bytes_widen_exactly_in_every_place_of_a_word(
    text: object, rounding: str, dtype: torch.dtype, exponent: int
) -> None:
    # -128 is never rounded to, and two of fp8's are no numbers.
    used = np.flatnonzero(np.arange(256) != 128 if rounding == "int8" else np.arange(256) & 127 != 127)
    dice = np.random.default_rng(1)
    raw = np.stack([dice.permutation(np.tile(used, 4)) for _ in range(4)], axis=1).astype(np.uint8)
    words = paired(torch.from_numpy(raw), ROW_ROUNDINGS[rounding]).numpy().view(np.uint32)[:, 0]
    made = executed(text.value, {"$4": words})
    expected = values_of(ROW_ROUNDINGS[rounding]) * 2.0**-exponent
    for place in range(4):
        found = torch.from_numpy(np.ascontiguousarray(made[f"${place}"])).view(dtype)
        assert torch.equal(found.double(), expected[torch.from_numpy(raw[:, place].astype(np.int64))])


@pytest.mark.parametrize(("rounding", "exponent"), [(1, 133), (2, 120)])
def test_sums_get_back_what_numbers_are_too_small_by_and_activations_too_large(rounding: int, exponent: int) -> None:
    found = re.search(r"mov.b32 f, 0x(\w{4})(\w{4});", byte_values._RAISED.value)
    assert found
    assert found[1] == found[2]
    bits = torch.tensor(int(found[1], 16), dtype=torch.int32).to(torch.int16)
    raised = float(bits.view(torch.bfloat16))
    assert byte_values.lowered.fn(raised * 2.0**-exponent, gl.bfloat16, rounding) == 1.0
    assert byte_values.lowered.fn({1: 2.0**-24, 2: 2.0**-8}[rounding], gl.float16, rounding) == 1.0


@BOTH
def test_bytes_that_were_paired_come_apart_again(rounding: RowRounding) -> None:
    every = torch.cartesian_prod(torch.arange(256), torch.arange(256)).to(torch.uint8)
    if rounding.name == "int8":
        every = every[(every != 128).all(1)]
    pairs = paired(every, rounding)
    assert torch.equal(unpaired(pairs, rounding), every)
    assert len(pairs.unique(dim=0)) == len(every)


@pytest.fixture(scope="module")
def program() -> WaveProgram:
    plan = plan_ffn(FFNSizes(2, 192, 576, 128, True), workers=5)
    return of_bytes(plan.programs[0])


def of_bytes(plain: WaveProgram) -> WaveProgram:
    """The same order of tiles, for weights of one byte."""
    rows = {"up": 1152, "down": 128}
    return replace(
        plain, shape=tile_shape(2, weight_bytes=1), first_scale={"down": 0, "up": 128}, num_scales=sum(rows.values())
    )


@BOTH
def test_a_rounded_matrix_comes_back_as_its_rounded_rows(program: WaveProgram, rounding: RowRounding) -> None:
    gain = 1 + randn(192, seed=3) / 4
    up = Weight((randn(576, 192).half(), randn(576, 192, seed=1).half()), gain.half())
    down = Weight((randn(128, 576, seed=2).half(),))
    stream = WeightStream(program, torch.float16, CPU, rounding)
    for name, weight in (("up", up), ("down", down)):
        stream.put(name, weight)
        assert not differs(stream, name, weight)
    both = stream.matrix("up", 576, 192, 2)
    for found, matrix in zip(both.dense().split(576), up.matrices, strict=True):
        wide = matrix.float() * gain.half().float()
        assert torch.equal(found, restore_rows(*round_rows(wide, rounding), rounding, torch.float16))
    assert both.nbytes == 1152 * 192 + 1152 * 4
    assert stream.images.nbytes == program.stream_tiles * 8192
    stream.scales[5] *= 2
    assert differs(stream, "down", down)
    down.matrices[0][5, 5] = torch.inf  # a row of no numbers, in the stream as outside
    stream.put("down", down)
    assert not differs(stream, "down", down)


@BOTH
@pytest.mark.parametrize(
    ("batch", "images", "height", "cols", "count"), [(1, 1, 40, 1100, 1), (4, 2, 33, 600, 2), (16, 2, 64, 256, 2)]
)
def test_the_unpacking_kernel_reads_what_was_packed(
    rounding: RowRounding, batch: int, images: int, height: int, cols: int, count: int
) -> None:
    shape = tile_shape(batch, weight_bytes=1, images=images)
    matrices = tuple(randn(height, cols, seed=seed).half() for seed in range(count))
    blocks, tiles = -(-height * count // shape.rows), -(-cols // shape.cols)
    made, scales = round_rows(Weight(matrices).block(0, blocks * shape.rows, CPU, wide=True), rounding)
    places = torch.randperm(blocks * tiles + 3, generator=torch.Generator().manual_seed(0))[: blocks * tiles].int()
    stream = torch.zeros(blocks * tiles + 3, 8192 * images, dtype=torch.uint8)
    stream[places.long()] = byte_images(made, shape, rounding)
    for first, last in ((0, height), (5, 17), (height - 1, height)):
        out = torch.full((count, last - first, cols), float("nan"), dtype=torch.float16)
        low, high = first * count // shape.rows, -(-last * count // shape.rows)
        part = UnpackedRows(out, count, first, low, high - low)
        unpack_bytes(Tiles(stream, scales), places, part, shape, rounding.number)
        for found, matrix in zip(out, matrices, strict=True):
            rows = round_rows(matrix.float()[first:last], rounding)
            assert torch.equal(found, restore_rows(*rows, rounding, torch.float16))
