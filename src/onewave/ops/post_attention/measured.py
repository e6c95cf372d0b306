"""Where one launch for all that comes behind attention has been measured to win: what `auto` and `explain` read.

As in ffn/measured.py: a row is a number of rows of one layer's sizes on one GPU, medians of one run in which all
arrangements took turns. `auto` takes one launch where it was ahead of every arrangement of separate launches by more
than runs differ (MARGIN), and between two numbers of rows where it was at both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from onewave.ops.ffn.measured import MARGIN


class Layer(NamedTuple):
    """What was measured: a layer of these sizes and dtype on a GPU, by its driver's name (None in a question: any)."""

    attended: int
    hidden: int
    intermediate: int
    dtype: str
    gpu: str | None = None


@dataclass(frozen=True)
class Measured:
    """Medians of one run, microseconds a call. source: the ledger's lines.

    separate: our operators one after the other, `backend="separate"`. cublas: the same with cuBLAS's products. halves:
    these for halves of the rows on two streams. chain: one launch.
    """

    layer: Layer
    rows: int
    separate_us: float
    cublas_us: float
    halves_us: float
    chain_us: float
    source: str

    @property
    def gain(self) -> float:
        """The fastest separate arrangement's time over that of one launch."""
        return min(self.separate_us, self.cublas_us, self.halves_us) / self.chain_us

    @property
    def best(self) -> str:
        """The backend for `auto`."""
        return "chain" if self.gain * (1 - MARGIN) > 1 else "separate"

    def __str__(self) -> str:
        return (
            f"{self.rows} rows: separate {self.separate_us:.1f}, with cuBLAS {self.cublas_us:.1f}, on two streams "
            f"{self.halves_us:.1f}, chain {self.chain_us:.1f} us; one launch {self.gain:.3f} x as fast: "
            f"{self.best} ({self.source})"
        )


# fmt: off
MEASURED: tuple[Measured, ...] = ()
# fmt: on


def fastest(rows: int, layer: Layer) -> str:
    """Return the backend for a call: of a number of rows between two measured ones what both have, else "separate"."""
    known = _known(layer)
    below = [each for each in known if each.rows <= rows]
    above = [each for each in known if each.rows >= rows]
    both = below[-1:] + above[:1]
    return "chain" if len(both) == 2 and all(each.best == "chain" for each in both) else "separate"


def table_lines(layer: Layer) -> tuple[str, ...]:
    """Return what is known about a layer, a sentence a measured number of rows, losses included."""
    known = _known(layer)
    if not known:
        return ("nothing of these sizes, this dtype and GPU has been measured, so auto takes separate launches",)
    found = [
        "auto: one launch where it is ahead of all separate ones; between numbers of rows where it is on both sides"
    ]
    for name in dict.fromkeys(each.layer.gpu for each in known):
        found.append(f"measured on {name}, the GPU that it goes for:")
        found += [f"  {each}" for each in known if each.layer.gpu == name]
    return tuple(found)


def _known(layer: Layer) -> list[Measured]:
    known = [each for each in MEASURED if layer in (each.layer, each.layer._replace(gpu=None))]
    return sorted(known, key=lambda each: (each.layer.gpu or "", each.rows))
