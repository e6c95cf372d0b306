"""Where one launch for both products has been measured to win: the table that `auto` and `explain` read.

A row of the table is a number of rows of x on one block: medians of one run, in which all arrangements took turns on
the same operands (`onewave bench ops ffn`). `auto` fuses only where one launch was ahead of every arrangement of two by
more than runs differ, and only on what was measured: the GPU, the dtype and the sizes of the block must be those of
the table, and a number of rows must be one of its, or lie between two that agree (`fastest`). Everything else takes two
products.
"""

from __future__ import annotations

from dataclasses import dataclass

MARGIN = 0.02
"""By how much one arrangement must be faster than another to count as faster.

With 64 rows, chain was 1 % behind, even and 1 % ahead of two products (ledger/h200.jsonl:200, 296 and 352).
"""


@dataclass(frozen=True)
class Measured:
    """Medians of one run, microseconds a call. GPU: as the driver names it. source: the ledger's lines.

    products: two cuBLAS products (three with a gate), which `backend="torch"` runs. together: gate and up as one cuBLAS
    product, which needs both matrices in one: no backend, but two launches that one launch has to beat; None
    without a gate. streams, chain, wave: those backends, in their own order and tile; wave is None beyond 64 rows.
    """

    gpu: str
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
        return "streams" if self.streams_ahead else "torch"

    @property
    def streams_ahead(self) -> bool:
        """Whether streams is ahead of the products, the two arrangements of two launches that are backends."""
        return self.streams_us < (1 - MARGIN) * self.products_us

    def __str__(self) -> str:
        parts = [f"two products {self.products_us:.1f}"]
        parts += [] if self.together_us is None else [f"gate and up in one {self.together_us:.1f}"]
        parts += [f"streams {self.streams_us:.1f}", f"chain {self.chain_us:.1f}"]
        parts += [] if self.wave_us is None else [f"wave {self.wave_us:.1f}"]
        ratio = self.two_launches_us / self.one_launch[1]
        return (
            f"{self.rows} rows: {', '.join(parts)} us; one launch {ratio:.3f} x as fast as two: "
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


# rows, two products, gate and up in one, streams, chain, wave; first line in ledger/h200.jsonl (from line 1432 on with
# bands of eight row blocks, before with four)
# fmt: off
MEASURED: tuple[Measured, ...] = (
    _h200(1, 64.3, None, 120.4, 74.9, 46.4, 2861),
    _h200(2, 64.1, None, 118.9, 74.9, 47.2, 2579),
    _h200(4, 64.4, None, 117.0, 75.3, 47.4, 2583),
    _h200(8, 63.6, None, 115.5, 73.2, 47.1, 2865),
    _h200(16, 64.5, None, 115.1, 73.0, 48.2, 2869),
    _h200(32, 65.8, None, 109.9, 72.0, 53.0, 2873),
    _h200(64, 72.4, None, 94.9, 73.2, 102.6, 2019),
    _h200(128, 77.9, None, 118.4, 83.5, None, 355),
    _h200(256, 111.3, None, 144.2, 125.1, None, 358),
    _h200(512, 199.5, None, 212.3, 208.6, None, 361),
    _h200(1024, 370.2, None, 396.5, 390.1, None, 1432),
    _h200(2048, 749.5, None, 754.4, 737.7, None, 1435),
    _h200(4096, 1469.3, None, 1513.3, 1472.0, None, 1438),
    _h200(8192, 2951.7, None, 3015.5, 2924.7, None, 1441),
    _h200(16384, 6077.9, None, 6094.8, 5888.1, None, 376),
    _h200(32768, 11955.3, None, 12153.5, 11982.0, None, 379),
    _h200(1, 97.4, 90.4, 144.3, 108.2, 68.8, 2599),
    _h200(2, 95.5, 90.0, 141.8, 107.0, 69.0, 2604),
    _h200(4, 95.9, 90.7, 143.6, 107.3, 69.4, 2609),
    _h200(8, 97.0, 91.4, 139.1, 103.9, 69.5, 2614),
    _h200(16, 98.2, 92.3, 138.3, 102.5, 73.5, 2619),
    _h200(32, 99.5, 94.4, 131.7, 99.5, 80.2, 2721),
    _h200(64, 108.1, 103.2, 119.9, 99.5, 158.0, 2053),
    _h200(96, 111.7, 106.5, 156.0, 139.4, None, 453),
    _h200(128, 116.2, 112.7, 155.5, 142.1, None, 387),
    _h200(256, 162.6, 167.4, 204.5, 185.5, None, 391),
    _h200(512, 328.5, 275.5, 286.7, 320.2, None, 395),
    _h200(1024, 581.0, 563.4, 551.9, 551.3, None, 1444),
    _h200(2048, 1147.1, 1098.4, 1101.6, 1097.6, None, 1448),
    _h200(4096, 2279.6, 2219.5, 2186.1, 2128.2, None, 1452),
    _h200(8192, 4567.3, 4442.5, 4291.0, 4243.3, None, 1456),
    _h200(16384, 9155.4, 8939.6, 8556.5, 8419.6, None, 1460),
    _h200(32768, 18343.3, 17557.8, 17835.2, 17735.4, None, 419),
)
# fmt: on
"""What is known, without and with a gate."""


def fastest(
    rows: int,
    hidden: int,
    intermediate: int,
    out: int,
    gated: bool,
    dtype: str,
    *,
    gpu: str | None = None,
    table: tuple[Measured, ...] | None = None,
) -> str:
    """The backend for a call: "wave", "chain", "streams" or "torch".

    Of a number of rows between two measured ones is known what both have: the same winner; or, if the winners differ,
    that `streams` is ahead of the products. Whatever is not known takes the products. GPU: only what was measured on
    it, None for any. table: MEASURED unless given.
    """
    known = _of_these_sizes((hidden, intermediate, out, gated, dtype), gpu, table)
    below = [each for each in known if each.rows <= rows]
    above = [each for each in known if each.rows >= rows]
    if not below or not above:
        return "torch"
    sides = (below[-1], above[0])
    if sides[0].best == sides[1].best:
        return sides[0].best
    return "streams" if all(each.streams_ahead for each in sides) else "torch"


def table_lines(
    hidden: int,
    intermediate: int,
    out: int,
    gated: bool,
    dtype: str,
    *,
    gpu: str | None = None,
    table: tuple[Measured, ...] | None = None,
) -> tuple[str, ...]:
    """What is known about a block of these sizes, a sentence a measured number of rows, losses included."""
    known = _of_these_sizes((hidden, intermediate, out, gated, dtype), gpu, table)
    if not known:
        return (
            "nothing of these sizes, this dtype and GPU has been measured, so auto takes two products "
            f"(onewave bench ops ffn --shape ROWS,{hidden},{intermediate}{',gated' if gated else ''} measures it)",
        )
    found = ["auto: one launch where it is ahead of every two; between numbers of rows what both sides agree on"]
    for name in dict.fromkeys(each.gpu for each in known):
        found.append(f"measured on {name}, the GPU that it goes for:")
        found += [f"  {each}" for each in known if each.gpu == name]
    return tuple(found)


def _of_these_sizes(
    sizes: tuple[int, int, int, bool, str], gpu: str | None, table: tuple[Measured, ...] | None
) -> list[Measured]:
    """In the order of their rows."""
    known = [
        each
        for each in (MEASURED if table is None else table)
        if (each.hidden, each.intermediate, each.out, each.gated, each.dtype) == sizes and gpu in (None, each.gpu)
    ]
    return sorted(known, key=lambda each: (each.gpu, each.rows))
