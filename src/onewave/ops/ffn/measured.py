"""Where one launch for both products has been measured to win: the table that `auto` and `explain` read.

A row of the table is a number of rows of x on one block: medians of one run, where all arrangements took turns on
the same operands (`onewave bench ops ffn`). `auto` fuses only where one launch was ahead of every arrangement of two by
more than runs differ, and only on what was measured: the GPU, the dtype and the sizes of the block must be those of
the table, and a number of rows must be one of its, or lie between two that agree (`fastest`). Everything else takes two
products.
"""

from dataclasses import dataclass
from typing import NamedTuple

MARGIN = 0.02
"""By how much one arrangement must be faster than another to count as faster.

With 64 rows, chain was 1 % behind, even and 1 % ahead of two products (ledger/h200.jsonl:200, 296 and 352).
"""


class Block(NamedTuple):
    """A measured case: a block of these sizes and dtype on a GPU, by its driver's name (None in a question: any)."""

    hidden: int
    intermediate: int
    out: int
    gated: bool
    dtype: str
    gpu: str | None = None


@dataclass(frozen=True)
class Measured:
    """Medians of one run, microseconds a call. source: the ledger's lines.

    products: two cuBLAS products (three with a gate), which `backend="torch"` runs. together: gate and up as one cuBLAS
    product, which needs both matrices in one: no backend, but two launches that one launch has to beat; None
    without a gate. streams, chain, wave: those backends, in their own order and tile; wave is None beyond 64 rows.
    """

    block: Block
    rows: int
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
    rows: int, line: int, products: float, together: float | None, streams: float, chain: float, wave: float | None
) -> Measured:
    """A row of the block of 4096 and 14336 in bfloat16. line: the first of the run's lines, one an arrangement."""
    last = line + 2 + (together is not None) + (wave is not None)
    block = Block(4096, 14336, 4096, together is not None, "bfloat16", "NVIDIA H200")
    return Measured(block, rows, products, together, streams, chain, wave, f"ledger/h200.jsonl:{line}-{last}")


# rows; first line in ledger/h200.jsonl (from line 1432 on with bands of eight row blocks, before with four); two
# products, gate and up in one, streams, chain, wave
# fmt: off
MEASURED: tuple[Measured, ...] = (
    _h200(1, 2861, 64.3, None, 120.4, 74.9, 46.4),
    _h200(2, 2579, 64.1, None, 118.9, 74.9, 47.2),
    _h200(4, 2583, 64.4, None, 117.0, 75.3, 47.4),
    _h200(8, 2865, 63.6, None, 115.5, 73.2, 47.1),
    _h200(16, 2869, 64.5, None, 115.1, 73.0, 48.2),
    _h200(32, 2873, 65.8, None, 109.9, 72.0, 53.0),
    _h200(64, 2019, 72.4, None, 94.9, 73.2, 102.6),
    _h200(128, 355, 77.9, None, 118.4, 83.5, None),
    _h200(256, 358, 111.3, None, 144.2, 125.1, None),
    _h200(512, 361, 199.5, None, 212.3, 208.6, None),
    _h200(1024, 1432, 370.2, None, 396.5, 390.1, None),
    _h200(2048, 1435, 749.5, None, 754.4, 737.7, None),
    _h200(4096, 1438, 1469.3, None, 1513.3, 1472.0, None),
    _h200(8192, 1441, 2951.7, None, 3015.5, 2924.7, None),
    _h200(16384, 376, 6077.9, None, 6094.8, 5888.1, None),
    _h200(32768, 379, 11955.3, None, 12153.5, 11982.0, None),
    _h200(1, 2599, 97.4, 90.4, 144.3, 108.2, 68.8),
    _h200(2, 2604, 95.5, 90.0, 141.8, 107.0, 69.0),
    _h200(4, 2609, 95.9, 90.7, 143.6, 107.3, 69.4),
    _h200(8, 2614, 97.0, 91.4, 139.1, 103.9, 69.5),
    _h200(16, 2619, 98.2, 92.3, 138.3, 102.5, 73.5),
    _h200(32, 2721, 99.5, 94.4, 131.7, 99.5, 80.2),
    _h200(64, 2053, 108.1, 103.2, 119.9, 99.5, 158.0),
    _h200(96, 453, 111.7, 106.5, 156.0, 139.4, None),
    _h200(128, 387, 116.2, 112.7, 155.5, 142.1, None),
    _h200(256, 391, 162.6, 167.4, 204.5, 185.5, None),
    _h200(512, 395, 328.5, 275.5, 286.7, 320.2, None),
    _h200(1024, 1444, 581.0, 563.4, 551.9, 551.3, None),
    _h200(2048, 1448, 1147.1, 1098.4, 1101.6, 1097.6, None),
    _h200(4096, 1452, 2279.6, 2219.5, 2186.1, 2128.2, None),
    _h200(8192, 1456, 4567.3, 4442.5, 4291.0, 4243.3, None),
    _h200(16384, 1460, 9155.4, 8939.6, 8556.5, 8419.6, None),
    _h200(32768, 419, 18343.3, 17557.8, 17835.2, 17735.4, None),
)
# fmt: on
"""The measurements, without and with a gate."""


def fastest(rows: int, block: Block) -> str:
    """The backend for a call: "wave", "chain", "streams" or "torch".

    Of a number of rows between two measured ones is known what both have: the same winner; or, if the winners differ,
    that `streams` is ahead of the products. Whatever is not known takes the products.
    """
    known = _known(block)
    below = [each for each in known if each.rows <= rows]
    above = [each for each in known if each.rows >= rows]
    if not below or not above:
        return "torch"
    sides = (below[-1], above[0])
    if sides[0].best == sides[1].best:
        return sides[0].best
    return "streams" if all(each.streams_ahead for each in sides) else "torch"


def table_lines(block: Block) -> tuple[str, ...]:
    """Return what is known about a block, a sentence for each measured number of rows, losses included."""
    known = _known(block)
    if not known:
        shape = f"ROWS,{block.hidden},{block.intermediate}{',gated' * block.gated}"
        return (
            "nothing of these sizes, this dtype and GPU has been measured, so auto takes two products "
            f"(onewave bench ops ffn --shape {shape} measures it)",
        )
    found = ["auto: one launch where it is ahead of every two; between numbers of rows what both sides agree on"]
    for name in dict.fromkeys(each.block.gpu for each in known):
        found.append(f"measured on {name}, the GPU that it goes for:")
        found += [f"  {each}" for each in known if each.block.gpu == name]
    return tuple(found)


def _known(block: Block) -> list[Measured]:
    """The table's rows of a block, in the order of their rows."""
    known = [each for each in MEASURED if block in (each.block, each.block._replace(gpu=None))]
    return sorted(known, key=lambda each: (each.block.gpu or "", each.rows))
