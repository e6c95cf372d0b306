"""Packed weights: what goes into a stream comes back bit for bit, through the kernels and through plain indexing."""

import pytest
import torch
from torch import Tensor

from kit.operands.random import randn_half as randn
from kit.operands.read_back import differs
from onewave.base.errors import ShapeError
from onewave.ops.ffn.sizes import FFNSizes
from onewave.ops.ffn.wave.plan import plan_ffn
from onewave.wave.plan.layout import tile_shape
from onewave.wave.plan.program import WaveProgram
from onewave.wave.weights import pack
from onewave.wave.weights.formats.plain import tile_images
from onewave.wave.weights.formats.tile_format import UnpackedRows
from onewave.wave.weights.pack import Weight, WeightStream
from onewave.wave.weights.pack_impl import pack_tiles, unpack_tiles

CPU = torch.device("cpu")
SIZES = FFNSizes(2, 192, 576, 128, True)


@pytest.fixture(scope="module")
def program() -> WaveProgram:
    return plan_ffn(SIZES, workers=5).programs[0]


def filled(program: WaveProgram) -> tuple[WeightStream, dict[str, Weight]]:
    gain = 1 + randn(192, seed=3) / 4
    weights = {
        "up": Weight((randn(576, 192), randn(576, 192, seed=1)), gain),
        "down": Weight((randn(128, 576, seed=2),)),
    }
    stream = WeightStream(program, torch.float16, CPU)
    for name, weight in weights.items():
        stream.put(name, weight)
    return stream, weights


def folded(weight: Weight) -> list[Tensor]:
    return [m if weight.gain is None else (m.float() * weight.gain.float()).half() for m in weight.matrices]


def test_a_packed_matrix_comes_back_bit_for_bit_with_its_gain_in_it(program: WaveProgram) -> None:
    stream, weights = filled(program)
    both = stream.matrix("up", 576, 192, 2)
    assert both.shape == (1152, 192)
    assert both.nbytes == 2 * 1152 * 192
    assert torch.equal(both.dense(), torch.cat(folded(weights["up"])))
    assert torch.equal(stream.matrix("down", 128, 576).dense(), weights["down"].matrices[0])


@pytest.mark.parametrize("rows", [1, 7, 16, 50, 127, 128])
def test_parts_of_any_height_make_up_the_whole(
    program: WaveProgram, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "_PART_BYTES", rows * 576 * 2)
    stream, weights = filled(program)
    found = torch.empty(128, 576, dtype=torch.float16)
    heights = []
    for first, part in stream.matrix("down", 128, 576).parts():
        found[first : first + len(part)] = part
        heights.append(len(part))
    assert sum(heights) == 128
    assert max(heights) == rows
    assert torch.equal(found, weights["down"].matrices[0])


def test_unpacking_reuses_one_buffer_as_large_as_the_largest_part(program: WaveProgram) -> None:
    stream, _ = filled(program)
    first = stream.matrix("up", 576, 192, 2).dense()
    second = stream.matrix("down", 128, 576).dense()
    assert first.data_ptr() == second.data_ptr()


def test_what_is_kept_is_unpacked_once_and_the_same(program: WaveProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "_PART_BYTES", 50 * 576 * 2)
    stream, weights = filled(program)
    both, down = stream.matrix("up", 576, 192, 2), stream.matrix("down", 128, 576)
    parts = [(first, rows.clone()) for first, rows in down.parts()]
    assert stream.unpacked_bytes == both.nbytes + down.nbytes
    stream.keep()
    kept = both.dense()
    assert torch.equal(kept, torch.cat(folded(weights["up"])))
    stream.images.zero_()  # nothing reads it again
    assert both.dense().data_ptr() == kept.data_ptr()
    assert torch.equal(kept, torch.cat(folded(weights["up"])))
    for name, weight in weights.items():
        stream.put(name, weight)
    for (first, rows), (first_before, rows_before) in zip(down.parts(), parts, strict=True):
        assert first == first_before
        assert torch.equal(rows, rows_before)
    assert stream.release()
    assert not stream.release()
    assert both.dense().data_ptr() != kept.data_ptr()
    assert torch.equal(both.dense(), kept)


def test_where_there_is_no_room_to_keep_anything_the_scratch_buffer_serves(
    program: WaveProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, weights = filled(program)
    both = stream.matrix("up", 576, 192, 2)
    both.dense()
    stream.keep()

    def full(*arguments: object, **named: object) -> Tensor:
        raise torch.OutOfMemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", full)
        assert torch.equal(both.dense(), torch.cat(folded(weights["up"])))
    assert not stream.keeping


@pytest.mark.parametrize(
    ("batch", "height", "cols", "count"), [(1, 40, 1100, 1), (4, 33, 600, 2), (16, 64, 256, 2), (64, 130, 320, 1)]
)
def test_the_kernels_pack_and_unpack_as_plain_indexing_does(batch: int, height: int, cols: int, count: int) -> None:
    shape = tile_shape(batch)
    matrices = tuple(randn(height, cols + 64, seed=seed)[:, :cols] for seed in range(count))  # rows further apart
    weight = Weight(matrices, 1 + randn(cols, seed=9) / 4)
    blocks, tiles = -(-height * count // shape.rows), -(-cols // shape.cols)
    places = torch.randperm(blocks * tiles + 3, generator=torch.Generator().manual_seed(0))[: blocks * tiles].int()
    for gain in (weight.gain, None):
        weight = Weight(matrices, gain)
        expected = torch.zeros(blocks * tiles + 3, 8192, dtype=torch.float16)
        expected[places.long()] = tile_images(weight.block(0, blocks * shape.rows, CPU), shape)
        found = torch.zeros_like(expected)
        pack_tiles(found, places, matrices, gain, shape)
        assert torch.equal(found, expected)
    for first, last in ((0, height), (5, 17), (height - 1, height)):
        out = torch.full((count, last - first, cols), float("nan"), dtype=torch.float16)
        low, high = first * count // shape.rows, -(-last * count // shape.rows)
        unpack_tiles(expected, places, UnpackedRows(out, count, first, low, high - low), shape)
        assert torch.equal(out, torch.stack([matrix[first:last] for matrix in matrices]))


def test_a_tile_that_reads_back_otherwise_is_noticed(program: WaveProgram) -> None:
    stream, weights = filled(program)
    assert not any(differs(stream, name, weight) for name, weight in weights.items())
    for block in (0, 36, 71):
        stream.put("up", weights["up"])
        row = stream.program.stream["up"]
        place = int(row[(row[:, 0] == block) & (row[:, 1] == 0)][0, 2])
        stream.images[place, 70] += 1
        assert differs(stream, "up", weights["up"])


def test_weights_that_are_no_numbers_read_back_as_they_were(program: WaveProgram) -> None:
    stream, weights = filled(program)
    down = weights["down"].matrices[0]
    down[0, 0], down[127, 500] = torch.nan, torch.inf
    assert differs(stream, "down", weights["down"])
    stream.put("down", weights["down"])
    assert not differs(stream, "down", weights["down"])
    down[0, 0] = 1
    assert differs(stream, "down", weights["down"])


def test_a_matrix_of_another_shape_than_planned_is_refused(program: WaveProgram) -> None:
    stream = WeightStream(program, torch.float16, CPU)
    with pytest.raises(ShapeError, match="72 x 1 tiles"):
        stream.put("up", Weight((randn(560, 192), randn(560, 192))))
    with pytest.raises(ShapeError, match="one shape and dtype"):
        stream.put("down", Weight((randn(128, 576).float(),)))
