"""Random weights and the shapes of compact tiles."""

import torch
from torch import Tensor

from onewave.wave.plan.layout import COMPACT_BYTES, TileShape, tile_shape


def shape_of(batch: int, images: int) -> TileShape:
    return tile_shape(batch, head_dim=64, weight_bytes=COMPACT_BYTES, images=images)


def bits_of(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.int16)
