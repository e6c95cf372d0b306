"""Lower bounds on traffic, and how far above them a result lies.

A bound's `gap` is what was moved over the bound, less 1: 0 is optimal. A bound that does not apply (its source assumes
a smaller memory, or larger matrices) is shown but never used as the best.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from onewave.base.errors import InvalidArgumentError
from onewave.tiles.graph.builders import check_sizes
from onewave.tiles.graph.graph import TileGraph
from onewave.tiles.search.panels import check_game
from onewave.tiles.sim.traffic import compulsory


@dataclass(frozen=True)
class Bound:
    """At least `value` of `unit` ("bytes" or "panel loads") move. applies: whether its assumptions hold here."""

    name: str
    value: float
    unit: str
    applies: bool
    source: str

    def gap(self, measured: float) -> float | None:
        """measured / value - 1; None where the bound says nothing (0)."""
        return measured / self.value - 1 if self.value > 0 else None


def best_bound(bounds: Iterable[Bound]) -> Bound:
    """The highest bound that applies. Raises InvalidArgumentError where none does."""
    usable = [bound for bound in bounds if bound.applies]
    if not usable:
        raise InvalidArgumentError("bounds", got="none that applies", allowed="one or more")
    return max(usable, key=lambda bound: bound.value)


def graph_bound(graph: TileGraph) -> Bound:
    """Compulsory traffic of any graph in bytes: its inputs once in, its outputs once out."""
    return Bound(
        "compulsory", float(sum(compulsory(graph))), "bytes", True, "every input once in, every output once out"
    )


def gemm_bounds(
    m: int, n: int, k: int, capacity: int, *, itemsize: float = 2.0, accumulators: int = 0, workers: int = 1
) -> tuple[Bound, ...]:
    """Bounds in bytes on loads plus stores of C[m, n] = A[m, k] B[k, n] through a fast memory.

    capacity: bytes of the cache. itemsize: bytes an element. accumulators: elements of C that workers hold in registers
    meanwhile; they are fast memory too, so S, the elements that it holds, is capacity / itemsize + accumulators.
    - compulsory: A and B once in, C once out.
    - Smith-van de Geijn: 2mnk / sqrt(S) - 2S (Smith et al. 2017, arXiv:1702.02017), and its leading term alone.
    - COSMA: 2mnk / sqrt(S) + mn (Kwasniewski et al. 2019, arXiv:1908.09606, theorem 1), where sqrt(S) is at most m and
      n, and 2 sqrt(S) at most k. With a smaller k, columns of B of full depth that stay, S / k at a time, while A goes
      by move less: mnk^2 / S + nk + mn. With workers P > 1, also its parallel form per worker, each having an equal
      share s of S: P times min(2mnk / (P sqrt(s)) + s, 3 (mnk / P)^(2/3)), which counts every worker's own traffic, so
      it bounds what the workers receive and not what a shared cache loads.
    Raises InvalidArgumentError.
    """
    check_sizes({"M": m, "N": n, "K": k, "workers": workers})
    fast = _fast_elements(capacity, itemsize, accumulators)
    products = float(m) * n * k
    side = math.sqrt(fast)
    leading = 2 * products / side
    fits = fast >= 1 and side <= min(m, n) and 2 * side <= k
    smith, cosma = "arXiv:1702.02017", "arXiv:1908.09606"
    found = [
        ("compulsory", m * k + k * n + m * n, True, "A and B once in, C once out"),
        ("Smith-van de Geijn", max(0.0, leading - 2 * fast), True, f"2mnk/sqrt(S) - 2S, {smith}"),
        ("Smith-van de Geijn, leading term", leading, False, f"2mnk/sqrt(S), for S far below mn, {smith}"),
        ("COSMA", leading + m * n, fits, f"2mnk/sqrt(S) + mn, {cosma}"),
    ]
    if workers > 1:
        share = fast / workers
        one = min(2 * products / (workers * math.sqrt(share)) + share, 3 * (products / workers) ** (2 / 3))
        source = f"P min(2mnk/(P sqrt(s)) + s, 3(mnk/P)^(2/3)), what P workers receive, {cosma}"
        found.append(("COSMA, parallel", one * workers, False, source))
    return tuple(Bound(name, value * itemsize, "bytes", applies, source) for name, value, applies, source in found)


@dataclass(frozen=True)
class ChainShape:
    """Two chained products, Y = f(X W0) W1 with f element by element or by rows: attention is one, a head at a time.

    pairs: elements of the intermediate, all heads together, those alone that are used; depth: the length of their sums;
    width: columns of the result that each is multiplied into (both are head_dim in attention). Raises
    InvalidArgumentError.
    """

    pairs: int
    depth: int
    width: int

    def __post_init__(self) -> None:
        check_sizes({"pairs": self.pairs, "depth": self.depth, "width": self.width})

    @classmethod
    def of_attention(cls, seq_q: int, seq_k: int, heads: int, head_dim: int, *, causal: bool) -> "ChainShape":
        """Attention of all heads; causal: the last query sees the last key. Heads that share keys change nothing."""
        first = seq_k - seq_q + 1
        seen = sum(range(max(0, first), seq_k + 1)) if causal else seq_q * seq_k
        return cls(heads * max(1, seen), head_dim, head_dim)


def chain_bounds(
    shape: ChainShape, capacity: int, *, itemsize: float = 2.0, accumulators: int = 0, workers: int = 1
) -> tuple[Bound, ...]:
    """Bounds in bytes on loads plus stores of two chained products through a fast memory; see gemm_bounds.

    A red-blue pebble game (Hong & Kung 1981, doi:10.1145/800076.802486) in which every multiply-add is done once and an
    element of the intermediate (T of them, D = depth + width) is multiplied only when its sum is whole. The schedule is
    cut where X loads and newly begun sums have come; S + X elements are all that a part touches. Begun sums of the
    result are stored in the end.
    - two products: of the part's elements, a, b of the first product's factors, h of the intermediate, c, e of the
      second's, it makes at most sqrt(abh) + sqrt(hce) <= ((S + X)/3)^(3/2) multiply-adds, no more than of one product:
      the intermediate serves both and still costs as much. X = 2S: 2TD/sqrt(S) - 2S - T, where T begun sums may never
      leave. One product's argument is Smith et al.'s (arXiv:1702.02017).
    - intermediate kept: elements that are begun, finished and used up in a part need their rows and columns of all four
      matrices there, so (S + X)^2 / 4D^2 of them at most; S more may be left over from before, and others are loaded.
      X = S: T D^2 / (S + D^2) - S. Flash attention moves 4 T head_dim^2 / S. Without constants it is Saha & Ye's bound
      (arXiv:2402.07443).
    With workers, the better of the two for what they receive, each with an equal share of S: not what a shared cache
    loads. Raises InvalidArgumentError.
    """
    check_sizes({"workers": workers})
    fast = _fast_elements(capacity, itemsize, accumulators)
    two, kept = _chain_traffic(shape, fast, 1)
    found = [
        ("two products", two, True, "2TD/sqrt(S) - 2S - T, Hong & Kung's game with arXiv:1702.02017's segments"),
        ("intermediate kept", kept, True, "T D^2/(S + D^2) - S, Hong & Kung's game, as arXiv:2402.07443"),
    ]
    if workers > 1:
        received = max(_chain_traffic(shape, fast / workers, workers))
        found.append(("chain, parallel", received, False, "the same with S / P each, what P workers receive"))
    return tuple(Bound(name, value * itemsize, "bytes", applies, source) for name, value, applies, source in found)


def _chain_traffic(shape: ChainShape, fast: float, workers: int) -> tuple[float, float]:
    """Elements by either bound of chain_bounds, of workers with `fast` elements each."""
    both = shape.depth + shape.width
    two = 2 * shape.pairs * both / math.sqrt(fast) - 2 * fast * workers - shape.pairs
    kept = shape.pairs * both**2 / (fast + both**2) - fast * workers
    return max(0.0, two), max(0.0, kept)


def _fast_elements(capacity: int, itemsize: float, accumulators: int) -> float:
    if capacity < 1 or accumulators < 0 or not itemsize > 0:
        raise InvalidArgumentError("capacity", got=f"{capacity} bytes", allowed="1 byte or more")
    return capacity / itemsize + accumulators


def panel_bound(rows: int, cols: int, capacity: int) -> int:
    """Fewest panel loads that any order of a rows x cols grid needs with room for `capacity` whole panels.

    Page-fetch bound: a load brings one panel beside at most c - 1 others, so it makes at most c - 1 new tiles
    possible; the first c loads together at most floor(c/2) ceil(c/2), for that many pairs exist among c panels. Every
    panel is loaded at least once. Raises InvalidArgumentError.
    """
    check_game(rows, cols, capacity)
    first = (capacity // 2) * (capacity - capacity // 2)
    fetches = capacity + -(-max(0, rows * cols - first) // (capacity - 1))
    return max(rows + cols, fetches if rows * cols > first else 0)


def panel_bounds(rows: int, cols: int, capacity: int) -> tuple[Bound, ...]:
    """Bounds in panel loads: compulsory and page fetch. Raises InvalidArgumentError."""
    fetches = panel_bound(rows, cols, capacity)
    return (
        Bound("compulsory", float(rows + cols), "panel loads", True, "every panel once"),
        Bound("page fetch", float(fetches), "panel loads", True, "a load makes at most c - 1 new tiles possible"),
    )
