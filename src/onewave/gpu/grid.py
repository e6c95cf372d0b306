"""Grids of two axes: a GPU takes 2^31 - 1 programs along axis 0, but only 65,535 along axis 1."""

MAX_SECOND = 65_535


def grid_of(first: int, second: int) -> tuple[tuple[int, int], int]:
    """Return the grid of first x second programs, and the axis of `first`, the kernel's AXIS: 1 if second is too long.

    Where both are longer than 65,535, no GPU's memory holds the outputs of so many programs.
    """
    return ((second, first), 1) if second > MAX_SECOND else ((first, second), 0)
