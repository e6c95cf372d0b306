"""Two chained products in blocks: which block order and sizes move the fewest bytes, by closed form.

C[m, l] = A[m, k] B[k, l], then E[m, n] = C[m, l] D[l, n], block by block: for each block of m and l, the inner loop
along k completes a block of C, which stays on chip, and the inner loop along n adds its product into E. The analysis
follows Chimera (Zheng et al. 2023, HPCA, doi 10.1109/HPCA56546.2023.10071018): a block comes in again each time a loop
around it turns, except inside the innermost turning loop that it depends on.

With block sizes t of m and l and a of k and n, A, B, D and E move about m l (k + n) (1 / t_m + 1 / t_l) elements,
E counted once a pass, while a block of C and what multiplies or takes it must fit: t^2 + 2 a t <= S elements. The sum
is least at t_m = t_l = t, so t = -a + sqrt(a^2 + S).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from onewave.base.errors import InvalidArgumentError, check_one_of
from onewave.tiles.graph.builders import DTYPES, check_sizes, cuts
from onewave.tiles.graph.graph import TileGraph
from onewave.tiles.graph.notation import parse_notation

STEP = 16
"""Block sizes of m and l are multiples of it."""
BLOCK_ORDERS = ("ml", "lm")
"""Outer loop first. The loops along k and n are inside both, so that a block of C never leaves the chip."""

TENSORS: dict[str, str] = {"A": "mk", "B": "kl", "D": "ln", "E": "mn"}
INNER = {"A": "k", "B": "k", "D": "n", "E": "n"}


@dataclass(frozen=True)
class Movement:
    """Bytes by tensor that a block order moves; E's are its stores and, after each block's first pass, its loads."""

    by_tensor: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.by_tensor.values())


@dataclass(frozen=True)
class ChainPlan:
    """A block order, the blocks' sizes in elements, the on-chip bytes that they need and the bytes that they move."""

    order: str
    blocks: dict[str, int]
    needed: int
    moved: Movement


def closed_form(capacity: int, inner: int, itemsize: float = 2.0) -> int:
    """The block size of m and l that moves the least: -a + sqrt(a^2 + S), rounded down to a multiple of STEP.

    capacity: bytes on chip, S elements. inner: a, the block size of k and n. Raises InvalidArgumentError where not even
    STEP fits.
    """
    elements = capacity / itemsize
    size = int(-inner + math.sqrt(inner * inner + elements)) // STEP * STEP
    if size < STEP:
        least = math.ceil((STEP * STEP + 2 * inner * STEP) * itemsize)
        raise InvalidArgumentError("on-chip memory", got=f"{capacity:,} bytes", allowed=f"{least:,} or more")
    return size


def needed_bytes(order: str, sizes: Mapping[str, int], blocks: Mapping[str, int], itemsize: float) -> int:
    """On-chip bytes: a block of C, what the running product reads and writes, and what the other one keeps meanwhile.

    A product keeps a block over the other's turn where a loop over blocks of m or l brings it back to the same one.
    """
    area = {name: math.prod(blocks[dim] for dim in dims) for name, dims in TENSORS.items()}
    turns = {dim: cuts(sizes[dim], blocks[dim]) for dim in "mnkl"}
    kept = {name for name in TENSORS if len(_loops(name, order, turns)) < sum(turns[dim] > 1 for dim in order)}
    first = area["A"] + area["B"] + sum(area[name] for name in ("D", "E") if name in kept)
    second = area["D"] + area["E"] + sum(area[name] for name in ("A", "B") if name in kept)
    return math.ceil((blocks["m"] * blocks["l"] + max(first, second)) * itemsize)


def square_blocks(sizes: Mapping[str, int], capacity: int, inner: int, itemsize: float = 2.0) -> dict[str, int]:
    """The closed form's blocks for the order "ml", m's and l's a few steps smaller where they would not fit.

    The closed form does not count what a product keeps over the other's turn. Raises InvalidArgumentError where not
    even STEP fits.
    """
    needed = 0
    for size in range(closed_form(capacity, inner, itemsize), 0, -STEP):
        blocks = {dim: min(sizes[dim], size if dim in "ml" else inner) for dim in "mnkl"}
        needed = needed_bytes("ml", sizes, blocks, itemsize)
        if needed <= capacity:
            return blocks
    raise InvalidArgumentError("on-chip memory", got=f"{capacity:,} bytes", allowed=f"{needed:,} or more")


def _loops(name: str, order: str, turns: Mapping[str, int]) -> list[str]:
    """The turning loops around a tensor, outermost first, without the inner ones that it does not depend on."""
    loops = [dim for dim in (*order, INNER[name]) if turns[dim] > 1]
    while loops and loops[-1] not in TENSORS[name]:
        loops.pop()
    return loops


def movement(order: str, sizes: Mapping[str, int], blocks: Mapping[str, int], itemsize: float = 2.0) -> Movement:
    """Bytes that each tensor moves to or from memory; C moves none.

    sizes, blocks: elements along m, n, k and l. A tensor is brought in once for every turn of the loops around it, out
    to the innermost loop that turns and that it depends on. Raises InvalidArgumentError.
    """
    check_one_of("block order", order, BLOCK_ORDERS)
    turns = {dim: cuts(sizes[dim], blocks[dim]) for dim in "mnkl"}
    found: dict[str, int] = {}
    for name, dims in TENSORS.items():
        loops = _loops(name, order, turns)
        # Turns of loops that the tensor lacks repeat it; those of its own dimensions make it up.
        passes = math.prod(turns[dim] for dim in loops if dim not in dims)
        once = math.ceil(math.prod(sizes[dim] for dim in dims) * itemsize)
        found[name] = once * (2 * passes - 1 if name == "E" else passes)
    return Movement(found)


def best_blocks(
    sizes: Mapping[str, int], capacity: int, itemsize: float = 2.0, inner: Iterable[int] = (STEP,)
) -> ChainPlan:
    """Try both block orders and every block size of m and l (multiples of STEP), with k and n in `inner` or whole.

    Raises InvalidArgumentError where nothing fits.
    """
    best: ChainPlan | None = None
    k_and_n = ({*(min(size, sizes[dim]) for size in inner), sizes[dim]} for dim in "kn")
    m_and_l = (_block_sizes(sizes[dim]) for dim in "ml")
    for k, n, m, l_ in product(*map(sorted, k_and_n), *m_and_l):
        blocks = {"m": m, "n": n, "k": k, "l": l_}
        for order in BLOCK_ORDERS:
            needed = needed_bytes(order, sizes, blocks, itemsize)
            if needed > capacity:
                continue
            plan = ChainPlan(order, blocks, needed, movement(order, sizes, blocks, itemsize))
            if best is None or (plan.moved.total, needed) < (best.moved.total, best.needed):
                best = plan
    if best is None:
        raise _no_room(capacity)
    return best


def _no_room(capacity: int) -> InvalidArgumentError:
    return InvalidArgumentError("on-chip memory", got=f"{capacity:,} bytes", allowed="room for one block")


def separate_bytes(sizes: Mapping[str, int], capacity: int, itemsize: float = 2.0, inner: int = STEP) -> int:
    """Bytes that the two products move as two launches, each with the block sizes that are best for it alone.

    A block of the result stays on chip while the loop along its depth runs, so each result is stored once, and C is
    stored by the first launch and read by the second. Raises InvalidArgumentError where nothing fits.
    """
    total = 0
    for rows, depth, cols in ("mkl", "mln"):
        best: float | None = None
        a = min(inner, sizes[depth])
        for m in _block_sizes(sizes[rows]):
            for n in _block_sizes(sizes[cols]):
                if (m * n + a * (m + n)) * itemsize > capacity:
                    break
                once = sizes[rows] * sizes[depth] * cuts(sizes[cols], n)
                once += sizes[depth] * sizes[cols] * cuts(sizes[rows], m) + sizes[rows] * sizes[cols]
                best = once * itemsize if best is None else min(best, once * itemsize)
        if best is None:
            raise _no_room(capacity)
        total += math.ceil(best)
    return total


def _block_sizes(size: int) -> list[int]:
    """Sizes that cut `size` into different numbers of blocks: for each number the smallest multiple of STEP."""
    found = {min(size, -(-cuts(size, pieces) // STEP) * STEP) for pieces in range(1, cuts(size, STEP) + 1)}
    return sorted(found)


def chain_graph(order: str, sizes: Mapping[str, int], blocks: Mapping[str, int], dtype: str = "bf16") -> TileGraph:
    """The chain as a graph, its tasks in the block order, for a simulator to count. Raises InvalidArgumentError."""
    if order not in BLOCK_ORDERS or dtype not in DTYPES:
        raise InvalidArgumentError("chain", got=f"{order}, {dtype}", allowed=f"{BLOCK_ORDERS}, {tuple(DTYPES)}")
    check_sizes({dim: sizes[dim] for dim in "mnkl"} | {f"block of {dim}": blocks[dim] for dim in "mnkl"})
    loops = {dim: f"for {dim}:{blocks[dim]} {{" for dim in "mnkl"}
    text = f"""
    dim {" ".join(f"{dim}={sizes[dim]}" for dim in "mnkl")}
    dtype {dtype}
    op first C[m,l] += A[m,k] * B[k,l]
    op second E[m,n] += C[m,l] * D[l,n]
    tree {loops[order[0]]} {loops[order[1]]} {loops["k"]} first }} {loops["n"]} second }} }} }}
    """
    return parse_notation(text).graph
