"""Where fusing the two products of many rows has been measured to win: the table that `auto` and `explain` read."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MEASURED", "Measured", "measured", "table_lines"]


@dataclass(frozen=True)
class Measured:
    """One measurement beside two cuBLAS products in the same run. us: medians, microseconds a call.

    card: as the driver names it. source: the ledger's line. fused: of backend="chain", streams: of backend="streams",
    each in its own order and tile (see source).
    """

    card: str
    dtype: str
    rows: int
    hidden: int
    intermediate: int
    out: int
    gated: bool
    products_us: float
    fused_us: float
    streams_us: float
    source: str

    @property
    def best(self) -> str:
        """The backend that was fastest; a tie goes to the products."""
        times = {"torch": self.products_us, "chain": self.fused_us, "streams": self.streams_us}
        return min(times, key=lambda name: times[name])


MEASURED: tuple[Measured, ...] = ()
"""Empty as yet: the kernel for many rows is right on a card, but no ledger line says where it is ahead."""


def measured(
    rows: int,
    hidden: int,
    intermediate: int,
    out: int,
    gated: bool,
    dtype: str,
    *,
    card: str | None = None,
    table: tuple[Measured, ...] | None = None,
) -> Measured | None:
    """The measurement that speaks for a call: of its very sizes, but for rows, where a neighbour on either side agrees.

    A number of rows between two measured ones counts as measured if both have the same winner; then the nearer one is
    returned. card: only what was measured on it, None for any. table: MEASURED unless given.
    """
    known = sorted(
        (
            each
            for each in (MEASURED if table is None else table)
            if (each.hidden, each.intermediate, each.out, each.gated, each.dtype)
            == (hidden, intermediate, out, gated, dtype)
            and card in (None, each.card)
        ),
        key=lambda each: each.rows,
    )
    below = [each for each in known if each.rows <= rows]
    above = [each for each in known if each.rows >= rows]
    if not below or not above or below[-1].best != above[0].best:
        return None
    return min(below[-1], above[0], key=lambda each: abs(each.rows - rows))


def table_lines(
    hidden: int,
    intermediate: int,
    out: int,
    gated: bool,
    dtype: str,
    *,
    table: tuple[Measured, ...] | None = None,
) -> tuple[str, ...]:
    """What is known about a block of these sizes, a sentence a measured number of rows."""
    known = [
        each
        for each in (MEASURED if table is None else table)
        if (each.hidden, each.intermediate, each.out, each.gated, each.dtype)
        == (hidden, intermediate, out, gated, dtype)
    ]
    if not known:
        return ("many rows: no sizes like these measured on a card, so auto takes two products",)
    return tuple(
        f"measured at {each.rows} rows on {each.card}: two products {each.products_us:.1f} us, chain "
        f"{each.fused_us:.1f} us, streams {each.streams_us:.1f} us: {each.best} ({each.source})"
        for each in sorted(known, key=lambda each: (each.card, each.rows))
    )
