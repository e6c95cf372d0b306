"""bfloat16 weights in thirteen bits come back bit for bit, and the kernel's instructions make the same numbers."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kit.numpy_gpu.numpy_memory import compact_numbers, listed_numbers, wrapped
from kit.operands.compact import bits_of, shape_of
from kit.operands.random import randn
from kit.operands.read_back import differs
from kit.ptx.ptx_text import executed
from onewave.base.weight_formats import COMPACT
from onewave.ops.ffn.sizes import FFNSizes
from onewave.ops.ffn.wave.plan import plan_ffn
from onewave.wave.kernel.widen import compact_values
from onewave.wave.kernel.words import boxes_of, tile_bytes
from onewave.wave.plan.layout import COMPACT_BYTES, LIST_WORDS, TileShape, tile_shape
from onewave.wave.weights.compact import MAX_BASE, bases_of, compact_images, restore_images, scales_of
from onewave.wave.weights.pack import Weight, WeightStream

CPU = torch.device("cpu")
SHAPES = pytest.mark.parametrize(("batch", "images"), list(itertools.product((1, 2, 8, 16), (1, 2))))
THREADS, PLACES = np.arange(128), np.arange(32)


def numbers_in(bits: np.ndarray) -> np.ndarray:
    """The numbers that bits of bfloat16 stand for."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def packed(rows: Tensor, shape: TileShape) -> tuple[Tensor, Tensor, bool]:
    """A matrix as tiles and their lists, and whether they hold all of it, and if so it has come back."""
    bases = bases_of(rows)
    images, lists, reached = compact_images(rows, bases, shape)
    if reached:
        assert torch.equal(
            bits_of(restore_images(images, lists, scales_of(bases), rows.shape[1], shape)), bits_of(rows)
        )
    return images, lists, bool(reached)


@SHAPES
def test_weights_come_back_bit_for_bit(batch: int, images: int) -> None:
    shape = shape_of(batch, images)
    scale = torch.logspace(-37, 26, 3 * shape.rows)[:, None]  # from next to nothing up to next to the largest
    rows = (randn(3 * shape.rows, 2 * shape.cols - 72, seed=batch) * scale).bfloat16()
    rows[::3, ::5] = 0.0
    rows[1::3, ::7] = -0.0
    rows[5] = 0.0
    made, lists, reached = packed(rows, shape)
    assert reached
    assert made.shape == (6, shape.tile_bytes)
    assert made.dtype is torch.uint8
    assert lists.shape == (6, LIST_WORDS)
    assert tile_bytes.fn(COMPACT.number, images) == shape.tile_bytes == 13 * 1024 * images
    assert shape.slot_bytes == shape.tile_bytes + 4 * LIST_WORDS


def test_a_tile_is_three_boxes_and_four_words_beside_them_for_every_thread() -> None:
    shape = shape_of(1, 2)
    assert boxes_of.fn(COMPACT.number) * 32 * shape.images * 128 + 8 * shape.images * 128 == shape.tile_bytes
    assert COMPACT.weight_bytes == COMPACT_BYTES


@pytest.mark.parametrize("base", [0, 1, 60, MAX_BASE])
def test_every_number_of_thirteen_bits_is_a_weight_that_needs_no_list(base: int) -> None:
    shape = shape_of(1, 1)
    bits = np.random.default_rng(base).permutation(np.append(np.arange(4096), np.arange(4096) | 0x8000))
    rows = torch.from_numpy(np.ldexp(numbers_in(bits), base).reshape(8, 1024))
    rows[:, -1] = 2.0 ** (base + 31 - 127)  # what the row's base is of
    wanted = rows.bfloat16()
    assert torch.equal(wanted.double(), rows)
    assert torch.equal(bases_of(wanted), torch.full((8,), base, dtype=torch.int32))
    _, lists, reached = packed(wanted, shape)
    assert reached
    assert not lists.any()


@SHAPES
def test_weights_far_below_their_rows_largest_are_listed(batch: int, images: int) -> None:
    shape = shape_of(batch, images)
    rows = randn(2 * shape.rows, 2 * shape.cols, seed=batch).bfloat16()
    rows[:, 3] = 5.75  # 2^2 and more: no row has another largest power of two
    rows[rows.abs() < 1e-6] = 1e-6
    far = torch.tensor([5.78125 * 2**-31, 2**-29, 1.5 * 2**-30, -(2**-38), 1.9 * 2**-39, -1e-20, 3.3e-16, 2**-90])
    rows[shape.rows + 2, 128 * shape.quarters - 4 :][:8] = far.bfloat16()
    rows[1, 17] = -1e-20
    # All but the second and the third, whose last bits are zeros.
    _, lists, reached = packed(rows, shape)
    assert reached
    assert lists[:, 0].sum() == 7
    assert lists[0, 0] == 1
    number = (lists[0, 1:2] & -0x10000).view(torch.float32)
    bases = bases_of(rows)
    assert float(number) * 2.0 ** (int(bases[1]) - 64) == float(torch.tensor(-1e-20).bfloat16())
    assert not lists[:, 1:][torch.arange(LIST_WORDS - 1) >= lists[:, :1]].any()


def test_subnormal_weights_are_kept_where_they_are_near_their_rows_largest() -> None:
    shape = shape_of(2, 1)
    rows = torch.zeros(shape.rows, shape.cols, dtype=torch.bfloat16)
    bits_of(rows)[:, :254] = torch.cat((torch.arange(127), torch.arange(127) - 0x8000)).to(torch.int16)
    rows[::2, 300] = 2.0**-96  # the largest whose base is 0
    _, lists, reached = packed(rows, shape)
    assert reached
    assert not lists.any()


@pytest.mark.parametrize(
    ("largest", "other", "is_kept"),
    [
        (1.0, 1.0, True),
        (1.0, float("nan"), False),
        (1.0, float("inf"), False),
        (-float("inf"), 1.0, False),
        (1.99 * 2.0**94, -1.0, True),  # as large as they may be, and as far apart
        (2.0**95, 2.0, False),
        (-1.0, 2.0**-94, True),
        (1.0, -(2.0**-95), False),
        (2.0**-60, 1e-39, False),
    ],
)
def test_a_flag_tells_whether_all_weights_are_kept(largest: float, other: float, is_kept: bool) -> None:
    shape = shape_of(8, 2)
    rows = torch.zeros(2 * shape.rows, shape.cols + 64, dtype=torch.bfloat16)
    rows[7, [3, 200]] = torch.tensor([largest, other]).bfloat16()
    assert packed(rows, shape)[2] is is_kept


@SHAPES
def test_a_tile_lists_thirty_one_weights_and_no_more(batch: int, images: int) -> None:
    shape = shape_of(batch, images)
    rows = randn(shape.rows, 2 * shape.cols, seed=3).bfloat16()
    rows[rows.abs() < 1e-4] = 1.0
    places = torch.randperm(shape.rows * shape.cols, generator=torch.Generator().manual_seed(batch))
    row, column = places[: LIST_WORDS - 1] // shape.cols, places[: LIST_WORDS - 1] % shape.cols
    rows[row, column + shape.cols] = 1e-15 * (1 + torch.arange(LIST_WORDS - 1) / 16).bfloat16()
    rows[0, 5] = -1e-15
    _, lists, reached = packed(rows, shape)
    assert reached
    assert lists[:, 0].tolist() == [1, LIST_WORDS - 1]
    one_more = places[LIST_WORDS]
    rows[one_more // shape.cols, one_more % shape.cols + shape.cols] = 1e-15
    _, lists, reached = packed(rows, shape)
    assert not reached
    assert lists[:, 0].tolist() == [1, LIST_WORDS - 1]


def of_threads(rows: Tensor, shape: TileShape) -> np.ndarray:
    """The weights of whole row blocks' tiles that each thread multiplies: [tiles, halves, 128, 32], place by place.

    Pair (k * 2 + i) * 2 + j of thread 4 r + t of a warp: row r + 8 j, columns 16 k + 8 i + 2 t and the one behind it.
    """
    half, thread, place = np.meshgrid(np.arange(2 * shape.images), THREADS, PLACES, indexing="ij")
    k, i, j, second = place >> 3, place >> 2 & 1, place >> 1 & 1, place & 1
    lane = thread % 32
    row = thread // 32 * 16 + lane // 4 + 8 * j
    column = half % 2 * 64 + 16 * k + 8 * i + lane % 4 * 2 + second
    group = half // 2 * shape.quarters + row // shape.rows
    values, found = rows.double().numpy(), []
    for block, tile in itertools.product(range(0, len(rows), shape.rows), range(0, rows.shape[1], shape.cols)):
        found.append(values[block + row % shape.rows, tile + group * 128 + column])
    return np.array(found)


def mixed_rows(shape: TileShape) -> Tensor:
    """Rows of weights near and far, of which no two are alike; of every tile some are in its list."""
    rows = randn(2 * shape.rows, 2 * shape.cols, seed=9) * torch.logspace(-3, 3, 2 * shape.rows)[:, None]
    dice = torch.Generator().manual_seed(4)
    for row, column in itertools.product(range(0, len(rows), shape.rows), range(0, rows.shape[1], shape.cols)):
        at = torch.randint(row, row + shape.rows, (40,), generator=dice)
        columns = torch.randint(column, column + shape.cols, (40,), generator=dice)
        rows[at, columns] *= torch.logspace(-5, -13, 40)
    rows[2, -8:] = -0.0
    return rows.bfloat16()


@SHAPES
def test_the_instructions_make_a_threads_numbers_of_its_words(batch: int, images: int) -> None:
    shape = shape_of(batch, images)
    rows = mixed_rows(shape)
    bases = bases_of(rows)
    tiles, lists, reached = compact_images(rows, bases, shape)
    assert reached
    words = tiles.numpy().view(np.uint32)
    planes = words[:, : -images * 256].reshape(len(words), 3, 2 * images, 128, 4)
    beside = words[:, -images * 256 :].reshape(len(words), 2 * images, 128)
    inputs = [planes[:, at, ..., k] for at in range(3) for k in range(4)] + [beside]
    twice = {f"${16 + 2 * at + copy}": word for at, word in enumerate(inputs) for copy in range(2)}
    registers = executed(compact_values._COMPACT.value, twice)
    made = np.stack([registers[f"${pair}"] for pair in range(16)], axis=-1).view(np.uint16)
    kept = numbers_in(made)
    wanted = of_threads(torch.ldexp(rows.double(), -bases[:, None]), shape)
    listed = lists[:, 0].sum()
    assert (lists[:, 0] > 10).all()
    assert (kept != wanted).sum() == listed
    assert (kept[kept != wanted] == 0).all()
    assert (np.signbit(kept) == np.signbit(wanted)).all()
    # And the simulation's stand-in makes what they make.
    stood_in = compact_numbers(tuple(wrapped(np.stack((word, word), -1)) for word in inputs[:12]), doubled(beside))
    assert (np.stack(stood_in, axis=-2).view(np.uint16).reshape(made.shape) == made).all()


def doubled(word: np.ndarray) -> np.ndarray:
    return wrapped(np.stack((word, word), axis=-1))


@SHAPES
def test_the_instructions_make_a_listed_number_in_its_place_and_nothing_elsewhere(batch: int, images: int) -> None:
    shape = shape_of(batch, images)
    rows = mixed_rows(shape)
    bases = bases_of(rows)
    _, lists, _ = compact_images(rows, bases, shape)
    wanted = of_threads(torch.ldexp(rows.double(), -bases[:, None]), shape)
    for tile, words in enumerate(lists.numpy()):
        for word in words[1 : 1 + words[0]]:
            inputs = {"$16": THREADS.astype(np.uint32), "$18": np.full(128, word, dtype=np.int32).view(np.uint32)}
            registers = executed(compact_values._LISTED.value, inputs)
            made = np.stack([registers[f"${pair}"] for pair in range(16)], axis=-1).view(np.uint16)
            thread, place = (int(at) for at in np.argwhere(made)[0])
            assert np.count_nonzero(made) == 1
            half = int(word) >> 12 & 3
            assert numbers_in(made)[thread, place] == wanted[tile, half, thread, place] * 2.0**64 != 0
            stood_in = listed_numbers(doubled(THREADS), doubled(inputs["$18"].view(np.int32)))
            assert (np.stack(stood_in, axis=-2).view(np.uint16).reshape(128, 32) == made).all()


@pytest.fixture
def stream() -> WeightStream:
    plan = plan_ffn(FFNSizes(2, 192, 576, 128, True), workers=5)
    sizes = {"up": 1152, "down": 128}
    shape = tile_shape(2, weight_bytes=COMPACT_BYTES)
    program = replace(plan.programs[0], shape=shape, first_scale={"down": 0, "up": 128}, num_scales=sum(sizes.values()))
    return WeightStream(program, torch.bfloat16, CPU, COMPACT)


def test_a_packed_matrix_comes_back_as_it_was(stream: WeightStream) -> None:
    gain = (1 + randn(192, seed=3) / 4).bfloat16()
    up = Weight((randn(576, 192).bfloat16(), randn(576, 192, seed=1).bfloat16()), gain)
    down = Weight((randn(128, 576, seed=2).bfloat16(),))
    down.matrices[0][3, 77] = 1e-20
    for name, weight in (("up", up), ("down", down)):
        stream.put(name, weight)
        assert not differs(stream, name, weight)
    assert stream.reached
    both = stream.matrix("up", 576, 192, 2)
    for found, matrix in zip(both.dense().split(576), up.matrices, strict=True):
        assert torch.equal(bits_of(found), bits_of((matrix.float() * gain.float()).bfloat16()))
    assert torch.equal(bits_of(stream.matrix("down", 128, 576).dense()), bits_of(down.matrices[0]))
    assert both.nbytes == 1152 * 192 // 8192 * (13312 + 128) + 1152 * 4
    assert stream.images.nbytes == stream.program.stream_tiles * 13312
    stream.scales[5] *= 2
    assert differs(stream, "down", down)


def test_a_stream_says_whether_it_holds_all_that_was_put(stream: WeightStream) -> None:
    down = randn(128, 576, seed=2).bfloat16()
    down[90, 500] = 1e-30
    stream.put("down", Weight((down,)))
    assert not stream.reached
    stream.put("down", Weight((torch.ones(128, 576, dtype=torch.bfloat16),)))
    assert not stream.reached, "what was not kept once is not forgotten"
