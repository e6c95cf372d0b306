"""Where one launch for both products has been measured to win: the table that `auto` and `explain` read.

A row of the table is a number of rows of x on one block: medians of one run, in which all arrangements took turns on
the same operands (`onewave bench ops ffn`). `auto` fuses only where one launch was ahead of every arrangement of two,
by more than runs differ; and only on what was measured: the card, the dtype and the sizes of the block must be those of
the table, and a number of rows must be one of its, or lie between two that agree. Everything else takes two products.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MARGIN", "MEASURED", "Measured", "measured", "table_lines"]

MARGIN = 0.01
"""By how much one arrangement must be faster than another to count as faster: more than medians of two runs differ."""


@dataclass(frozen=True)
class Measured:
    """Medians of one run, microseconds a call. card: as the driver names it. source: the ledger's lines.

    products: two cuBLAS products (three with a gate), which `backend="torch"` runs. together: gate and up as one cuBLAS
    product, which needs both matrices in one: nobody's backend, but two launches that one launch has to beat; None
    without a gate. streams, chain, wave: those backends, in their own order and tile; wave is None beyond 64 rows.
    """

    card: str
    dtype: str
    rows: int
    hidden: int
    intermediate: int
    out: int
    gated: bool
    products_us: float
    together_us: float | None
    streams_us: float
    chain_us: float
    wave_us: float | None
    source: str

    @property
    def two_launches_us(self) -> float:
        """The fastest arrangement of two launches (or more)."""
        times = (self.products_us, self.together_us, self.streams_us)
        return min(time for time in times if time is not None)

    @property
    def one_launch(self) -> tuple[str, float]:
        """The faster backend of one launch, and its time."""
        if self.wave_us is not None and self.wave_us <= self.chain_us:
            return "wave", self.wave_us
        return "chain", self.chain_us

    @property
    def best(self) -> str:
        """The backend for `auto`: one launch where it is ahead of every two, else the products or streams."""
        name, time = self.one_launch
        if time < (1 - MARGIN) * self.two_launches_us:
            return name
        return "streams" if self.streams_us < (1 - MARGIN) * self.products_us else "torch"

    def __str__(self) -> str:
        parts = [f"two products {self.products_us:.1f}"]
        parts += [] if self.together_us is None else [f"gate and up in one {self.together_us:.1f}"]
        parts += [f"streams {self.streams_us:.1f}", f"chain {self.chain_us:.1f}"]
        parts += [] if self.wave_us is None else [f"wave {self.wave_us:.1f}"]
        ratio = self.two_launches_us / self.one_launch[1]
        return (
            f"{self.rows} rows: {', '.join(parts)} us; one launch {ratio:.2f} x as fast as two: "
            f"{self.best} ({self.source})"
        )


def _h200(
    rows: int,
    products: float,
    together: float | None,
    streams: float,
    chain: float,
    wave: float | None,
    line: int,
) -> Measured:
    """A row of the block of 4096 and 14336 in bfloat16. line: the first of the run's lines, one an arrangement."""
    lines = 3 + (together is not None) + (wave is not None)
    times = (products, together, streams, chain, wave)
    source = f"ledger/h200.jsonl:{line}-{line + lines - 1}"
    return Measured("NVIDIA H200", "bfloat16", rows, 4096, 14336, 4096, together is not None, *times, source)


# rows, two products, gate and up in one, streams, chain, wave; first line in ledger/h200.jsonl
# fmt: off
MEASURED: tuple[Measured, ...] = (
    _h200(1, 65.2, None, 120.2, 74.0, 57.3, 271),
    _h200(2, 66.3, None, 120.9, 75.0, 58.2, 275),
    _h200(4, 67.1, None, 120.9, 74.8, 60.3, 279),
    _h200(8, 67.0, None, 118.9, 75.0, 63.8, 283),
    _h200(16, 66.3, None, 116.2, 74.9, 67.7, 287),
    _h200(32, 70.3, None, 110.6, 73.7, 81.9, 291),
    _h200(64, 71.8, None, 97.7, 71.7, 141.7, 295),
    _h200(128, 76.0, None, 111.5, 81.2, None, 203),
    _h200(256, 97.0, None, 126.8, 110.5, None, 206),
    _h200(512, 170.5, None, 179.8, 177.3, None, 209),
    _h200(1024, 317.0, None, 337.9, 330.5, None, 212),
    _h200(2048, 656.5, None, 650.2, 657.6, None, 215),
    _h200(4096, 1429.2, None, 1418.9, 1272.2, None, 218),
    _h200(8192, 2903.9, None, 2930.5, 2753.2, None, 221),
    _h200(16384, 5835.8, None, 5944.0, 5770.8, None, 224),
    _h200(32768, 11663.2, None, 12010.9, 11654.9, None, 227),
    _h200(64, 107.4, 103.8, 118.7, 97.8, 212.5, 230),
    _h200(128, 112.5, 107.4, 147.4, 137.9, None, 235),
    _h200(256, 150.1, 143.9, 168.8, 153.4, None, 239),
    _h200(512, 265.9, 245.1, 253.1, 260.9, None, 243),
    _h200(1024, 490.5, 475.9, 470.0, 463.6, None, 247),
    _h200(2048, 1081.2, 1037.5, 967.0, 926.1, None, 251),
    _h200(4096, 2200.1, 2208.1, 2100.2, 1835.6, None, 255),
    _h200(8192, 4457.4, 4303.6, 4335.9, 3674.1, None, 259),
    _h200(16384, 8851.8, 8663.0, 8682.7, 8584.5, None, 263),
    _h200(32768, 17803.7, 17456.5, 17692.2, 17552.2, None, 267),
)
# fmt: on
"""What is known, without and with a gate."""


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
    known = _of_these_sizes((hidden, intermediate, out, gated, dtype), card, table)
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
    card: str | None = None,
    table: tuple[Measured, ...] | None = None,
) -> tuple[str, ...]:
    """What is known about a block of these sizes, a sentence a measured number of rows, losses included."""
    known = _of_these_sizes((hidden, intermediate, out, gated, dtype), card, table)
    if not known:
        return (
            "nothing of these sizes, this dtype and card has been measured, so auto takes two products "
            f"(onewave bench ops ffn --shape ROWS,{hidden},{intermediate}{',gated' if gated else ''} measures it)",
        )
    found = ["auto: one launch where it is ahead of every two; two products between numbers of rows that disagree"]
    for name in dict.fromkeys(each.card for each in known):
        found.append(f"measured on {name}, the card that it goes for:")
        found += [f"  {each}" for each in known if each.card == name]
    return tuple(found)


def _of_these_sizes(
    sizes: tuple[int, int, int, bool, str], card: str | None, table: tuple[Measured, ...] | None
) -> list[Measured]:
    """In the order of their rows."""
    known = [
        each
        for each in (MEASURED if table is None else table)
        if (each.hidden, each.intermediate, each.out, each.gated, each.dtype) == sizes and card in (None, each.card)
    ]
    return sorted(known, key=lambda each: (each.card, each.rows))
