"""Where one launch for all that comes behind attention has been measured to win: what `auto` and `explain` read.

As in ffn/measured.py: a row is a number of rows of one layer's sizes on one GPU, medians of one run in which all
arrangements took turns. `auto` takes one launch where it was ahead of every arrangement of separate launches by more
than runs differ (MARGIN), and between two numbers of rows where it was at both.
"""

from dataclasses import dataclass
from typing import NamedTuple

from onewave.ops.ffn.measured import MARGIN


class Layer(NamedTuple):
    """A measured case: a layer of these sizes and dtype on a GPU, by its driver's name (None in a question: any)."""

    attended: int
    hidden: int
    intermediate: int
    dtype: str
    gpu: str | None = None


@dataclass(frozen=True)
class Measured:
    """Medians of one run, microseconds a call. source: the ledger's lines.

    separate: our operators one after the other, `backend="separate"`. cublas: the same with cuBLAS's products. two:
    each of these for both halves of the rows on two streams. chain: one launch.
    """

    layer: Layer
    rows: int
    separate_us: float
    separate_two_us: float
    cublas_us: float
    cublas_two_us: float
    chain_us: float
    source: str

    @property
    def gain(self) -> float:
        """The fastest separate arrangement's time over that of one launch."""
        return min(self.separate_us, self.separate_two_us, self.cublas_us, self.cublas_two_us) / self.chain_us

    @property
    def best(self) -> str:
        """The backend for `auto`."""
        return "chain" if self.gain * (1 - MARGIN) > 1 else "separate"

    def __str__(self) -> str:
        return (
            f"{self.rows} rows: separate {self.separate_us:.1f} (two streams {self.separate_two_us:.1f}), with cuBLAS "
            f"{self.cublas_us:.1f} ({self.cublas_two_us:.1f}), chain {self.chain_us:.1f} us; one launch "
            f"{self.gain:.3f} x as fast: {self.best} ({self.source})"
        )


_LARGE = Layer(4096, 4096, 14336, "bfloat16", "NVIDIA H200")
_SMALL = Layer(2048, 2048, 8192, "bfloat16", "NVIDIA H200")


def _row(layer: Layer, rows: int, line: int, us: tuple[float, float, float, float, float]) -> Measured:
    """line: the first of the run's lines, one an arrangement. us: in the order of Measured."""
    return Measured(layer, rows, *us, f"ledger/h200.jsonl:{line}-{line + 4}")


# Rows; first line in ledger/h200.jsonl; separate, on two streams, cuBLAS, on two streams, chain.
# fmt: off
MEASURED: tuple[Measured, ...] = (
    _row(_LARGE, 512, 5069, (334.0, 482.5, 324.7, 366.5, 443.7)),
    _row(_LARGE, 1024, 5054, (626.7, 667.5, 629.5, 660.0, 644.9)),
    _row(_LARGE, 2048, 5029, (1242.5, 1267.2, 1248.9, 1226.2, 1216.3)),
    _row(_LARGE, 4096, 5014, (2459.5, 2498.0, 2507.6, 2472.3, 2383.2)),
    _row(_LARGE, 8192, 5019, (4992.4, 4975.6, 5035.7, 4987.2, 4772.8)),
    _row(_LARGE, 16384, 5024, (9964.5, 9870.1, 10152.4, 9859.9, 9556.9)),
    _row(_SMALL, 1024, 5059, (190.3, 223.4, 203.1, 214.1, 252.5)),
    _row(_SMALL, 2048, 5044, (371.6, 393.9, 386.5, 397.9, 400.1)),
    _row(_SMALL, 4096, 5039, (740.5, 750.7, 772.6, 751.0, 760.6)),
    _row(_SMALL, 8192, 5034, (1497.4, 1445.9, 1569.1, 1541.2, 1480.7)),
    _row(_SMALL, 16384, 5049, (2943.7, 2883.0, 3114.5, 3116.2, 2931.0)),
    _row(_SMALL, 32768, 5064, (6230.1, 5925.1, 6081.9, 6098.2, 5827.8)),
)
# fmt: on
"""The layers of an 8B and of a 1B."""


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
