"""Where each tensor that thread blocks exchange lies in a set of the exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onewave.base.errors import UnsupportedError
from onewave.wave.plan.layout import TileShape, mergeable_head_words
from onewave.wave.plan.operations import OUTPUT, AnyOperation, Combination, Operation


@dataclass(frozen=True)
class Region:
    """Where a tensor lies in a set of the exchange: words from `first` on; stride: words a sequence (or slices)."""

    name: str
    first: int
    words: int
    stride: int
    producer: str


def regions_of(operations: Mapping[str, AnyOperation], shape: TileShape) -> tuple[Region, ...]:
    """Give every tensor that blocks exchange its place in a set; 16-byte aligned."""
    found: list[Region] = []
    first = 0
    for name, operation in operations.items():
        for target, words, stride in _exchanged(operation, shape.batch):
            if target == OUTPUT or any(region.name == target for region in found):
                continue
            found.append(Region(target, first, words, stride, name))
            first += -(-words // 32) * 32
    if first >= 1 << 31:
        raise UnsupportedError("wave: exchanged words", got=f"{first:,}", allowed="below 2^31", next="Use fewer slices")
    return tuple(found)


def _exchanged(operation: AnyOperation, batch: int) -> list[tuple[str, int, int]]:
    """The tensors that an operation publishes, their words, and Region's stride of each."""
    if isinstance(operation, Operation):
        if operation.partial:
            return [(operation.target, operation.rows * operation.slices * batch, operation.slices)]
        stride = -(-operation.outputs // 8) * 4
        return [(operation.target, stride * batch, stride)]
    groups = operation.groups
    whole = groups.heads * groups.head_dim // 2
    if isinstance(operation, Combination):
        return [(operation.target, whole * batch, whole)]
    if groups.reader_merges:
        stride = groups.heads * mergeable_head_words(groups.head_dim)
        return [(operation.target, stride * batch, stride), (operation.combined, whole * batch, whole)]
    return [(operation.target, groups.part_words * groups.splits * groups.count * batch, groups.part_words)]
