"""Sizes of the feed-forward block, for both plans."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FFNSizes:
    """x [rows, hidden] -> [rows, intermediate] -> [rows, out]. rows: of packed weights, their largest batch, padded."""

    rows: int
    hidden: int
    intermediate: int
    out: int
    gated: bool
