"""Random rows that are quantised already: of nested formats, and of e4m3 numbers."""

import torch

from onewave.base.group_rounding import GroupedRows


def nested_rows(count: int, cols: int, bits: int, *, seed: int = 0) -> GroupedRows:
    """Rows of four, six or eight bits, about as large as a model's weights. Some groups of eight have no minimum, those
    of six none."""
    dice, group = torch.Generator().manual_seed(seed), 32 if bits == 8 else 128

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=dice)

    groups = -(-cols // group)
    scales = (whole(512, 2048, count, groups) / 2.0 ** {4: 18, 6: 22, 8: 24}[bits]).half()
    there = whole(0, 2, count, groups) if bits == 8 else 1
    minima = (-whole(512, 2048, count, groups) / 2.0 ** (16 if bits == 4 else 19) * there).half() if bits != 6 else None
    steps = whole(0 if bits == 4 else -128, 64 if bits == 4 else 128, count, -(-cols // 32), 2).to(torch.int8)
    codes = whole(0, 1 << bits, count, cols).to(torch.uint8)
    return GroupedRows(codes, scales, minima, torch.full((count,), 2.0**-5), steps)


def float_rows(count: int, cols: int, *, seed: int = 0) -> GroupedRows:
    """Rows of e4m3 numbers of any size, with a scale for 128 columns."""
    dice = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (count, cols), generator=dice).to(torch.uint8)
    codes[codes & 127 == 127] = 0  # no number
    scales = (torch.rand(count, -(-cols // 128), generator=dice) + 0.5) * 2.0**-7
    return GroupedRows(codes, scales, None, torch.full((count,), 2.0**-5))
