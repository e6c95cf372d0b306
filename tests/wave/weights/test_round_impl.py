"""The kernels that round weights and pack them make the bits that plain PyTorch makes."""

import pytest
import torch

from kit.operands.random import randn
from onewave.base.weight_formats import NIBBLES, ROW_ROUNDINGS, Rounding
from onewave.wave.plan.layout import tile_shape
from onewave.wave.weights.formats import Tiles, tile_format
from onewave.wave.weights.pack import Weight

INT4, INT8, FP8 = NIBBLES[128, False], ROW_ROUNDINGS["int8"], ROW_ROUNDINGS["fp8"]
MORE = 3  # tiles of a stream beside a matrix's


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # by the interpreter, of infinities
@pytest.mark.parametrize(
    ("form", "batch", "images", "height", "cols", "count", "gained"),
    [
        (INT4, 1, 2, 11, 1100, 1, True),  # columns that do not fill tiles, rows that do not fill row blocks
        (NIBBLES[32, False], 4, 4, 13, 600, 2, True),
        (INT4, 8, 1, 8, 200, 2, False),
        (INT8, 1, 2, 11, 1100, 2, True),
        (INT8, 8, 1, 20, 200, 1, False),
        (FP8, 16, 1, 20, 200, 1, False),
    ],
    ids=lambda given: getattr(given, "name", given),
)
def test_the_kernels_round_and_pack_as_plain_pytorch_does(
    form: Rounding, batch: int, images: int, height: int, cols: int, count: int, gained: bool
) -> None:
    shape = tile_shape(batch, weight_bytes=form.weight_bytes, images=images)
    matrices = tuple((randn(height, cols, seed=seed) * 0.02).bfloat16() for seed in range(count))
    for matrix in matrices:
        # Not subnormal, which the interpreter reads as other numbers.
        matrix *= torch.logspace(-30, 30, height)[:, None]
        matrix[:, ::3] *= 1e-3
        matrix[3] = 0.0
        matrix[4, 5], matrix[5, 6] = torch.inf, torch.nan
        matrix[6, ::7] = -0.0
    weight = Weight(matrices, (1 + randn(cols, seed=9) / 4).bfloat16() if gained else None)
    blocks, tiles = -(-height * count // shape.rows), -(-cols // shape.cols)
    packing = tile_format(form, shape, torch.bfloat16)
    expected = packing.pack(weight.block(0, blocks * shape.rows, torch.device("cpu"), wide=True))
    places = torch.randperm(blocks * tiles + MORE, generator=torch.Generator().manual_seed(0))[: blocks * tiles].int()
    stream = torch.full((blocks * tiles + MORE, shape.tile_bytes), 99, dtype=torch.uint8)
    scales = torch.full((blocks * shape.rows,), 99.0)
    assert packing.pack_by_kernel(Tiles(stream, scales), places, matrices, weight.gain)
    assert torch.equal(scales.nan_to_num(98.0), expected.scales.nan_to_num(98.0))
    assert torch.equal(stream[places.long()], expected.images)
    assert (stream == 99).all(dim=1).sum() == MORE
