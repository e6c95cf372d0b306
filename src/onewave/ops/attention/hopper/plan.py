"""What the Hopper kernel takes, its tile, and how its work is dealt to the SMs; from shapes and flags alone.

Whether it takes a call depends on the card, dtypes, head_dim, options and strides, never on lengths or the batch: a
row's bits depend on the kernel that computes them. `auto` uses it only where a sweep on a card has passed (tuned.json).
"""

from __future__ import annotations

import heapq
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

PAGE_SIZES = (16, 32, 64, 128, 256)

_HOPPER = (9, 0)
# Narrower heads are padded to 64 columns and no faster than with the portable kernel (docs/log/prefill-attention.md).
_NARROWEST = 40
# K and V of the heads that are walked together: inside an H200's L2, and where tiles can be dealt one by one so little
# that its halves may both hold them. (Of 2 to 32 MB, 4 to 8 were the fastest; on a card at its power limit the way of
# keys and values counts even where nothing waits for it.)
_SECTION_BYTES, _DEALT_SECTION_BYTES = 32 << 20, 8 << 20
# Enough to see how turns and sections beat against each other, and still about a millisecond.
_TILES_TRIED = 8192
# A table costs the host one to four microseconds a tile, once a shape; with more turns the closed form is even enough.
_MOST_DEALT, _MOST_TURNS = 8192, 64
# Sections at the end that a table deals as one, and no more than hold _SECTION_BYTES: where a section has few tiles,
# the last one can't make up for what the others left uneven.
_MOST_LAST = 8
# Heads of packed sequences that are walked together. In turns: enough that sorted tiles come out even, and a long
# sequence's keys and values of so many heads still fit the L2. From a queue tiles come out even anyway.
_PACKED_SECTION, _QUEUED_SECTION = 8, 2
_SPILLED_WITH = 3
# Without a limit to the right: share of the SMs that take part at least (120 of 132 were measured).
_FEWEST_PROGRAMS = 7 / 8
# Turns from which on packed tiles are worth a kernel that sorts them, and the most slots that it sorts.
_SORTED_TURNS, _MOST_SORTED = 8, 8192


@dataclass(frozen=True)
class HopperCall:
    """What decides whether the kernel takes a call.

    page_size: of keys in pages. strides: why TMA can't describe a tensor, None if it can. missing: why
    Triton can't compile it, None if it can.
    """

    capability: tuple[int, int]
    dtype: str
    head_dim: int
    positive_scale: bool = True
    alibi: bool = False
    bias: bool = False
    left: bool = False
    packed: bool = False
    page_size: int | None = None
    strides: str | None = None
    missing: str | None = None


@dataclass(frozen=True)
class Schedule:
    """section: heads walked together; slots: tiles of a head, at most; programs: SMs that take turns over the tiles.

    rows, keys: queries of a tile, and keys of a key tile.
    order: who takes which tile: "turns", closed form; "table", as `dealt` says; "sorted", turns over packed tiles from
    the longest on.
    last: sections at the end that a table deals as one, from the longest tile on.
    tile_cost: what a tile's start and end take, in key tiles.
    """

    section: int
    slots: int
    heads: int
    programs: int
    rows: int
    keys: int
    order: str = "turns"
    last: int = 1
    tile_cost: float = 1.0

    @property
    def turns(self) -> int:
        """Of a program, at most, in closed form."""
        return -(-self.slots * self.heads // self.programs)


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    return json.loads(Path(__file__).parents[1].joinpath("tuned.json").read_text())


def columns_of(head_dim: int) -> int:
    """The columns that a head takes in shared memory and in the products: 64, 128 or 256."""
    return next(width for width in (64, 128, 256) if head_dim <= width)


def config(columns: int) -> dict[str, Any]:
    """Tile and ring for heads of `columns`: gluon_kernel_impl's constants. Not to be changed."""
    return _table()["head_dims"][str(columns)]["config"]


def knows_limit(columns: int, *, packed: bool) -> bool:
    """Whether the kernel is compiled with a limit to the right although the call has none: one that hides nothing.

    With a copy of their code for each of three warpgroups ptxas spills in the loop of whole tiles otherwise; with one
    for all it does not, and the call has the kernel of causal ones of few tiles.
    """
    return config(columns)["WARPGROUPS"] == _SPILLED_WITH and not packed


def swept(dtype: str, head_dim: int) -> bool:
    """Whether a sweep against the reference has passed on a card."""
    return head_dim in _table()["swept"]["head_dims"].get(dtype, ())


@lru_cache(maxsize=1024)
def refusal(call: HopperCall, *, asked_for: bool) -> str | None:
    """Why the kernel does not take a call, None if it does. asked_for: by name, which needs no passed sweep."""
    if call.capability != _HOPPER:
        return f"the Hopper kernel needs sm_90, and this is sm_{call.capability[0]}{call.capability[1]}"
    if call.missing is not None:
        return f"the Hopper kernel needs Triton 3.6's Gluon: {call.missing}"
    if call.alibi or call.bias:
        return "the Hopper kernel has neither ALiBi nor bias"
    if not call.positive_scale:
        return "the Hopper kernel wants a positive scale"
    if call.page_size is not None and call.page_size not in PAGE_SIZES:
        return f"the Hopper kernel reads pages of {', '.join(map(str, PAGE_SIZES))} keys, not of {call.page_size}"
    if call.strides is not None:
        return f"the Hopper kernel reads through TMA: {call.strides}"
    if not asked_for and call.head_dim < _NARROWEST:
        return f"head_dim {call.head_dim}: below {_NARROWEST} the Hopper kernel, which pads to 64, gains nothing"
    if not asked_for and not swept(call.dtype, call.head_dim):
        return f"the Hopper kernel's sweep on a card has not covered {call.dtype} with head_dim {call.head_dim}"
    return None


@lru_cache(maxsize=1024)
def schedule(
    *,
    heads: int,
    group: int,
    num_queries: int,
    num_keys: int,
    columns: int,
    processors: int,
    shift: int = 0,
    left: int | None = None,
    right: int | None = None,
    sequences: int | None = None,
    rows: int | None = None,
    tile_cost: float | None = None,
    queue: bool = False,
    item_bytes: int = 2,
) -> Schedule:
    """Deal the tiles. heads: of all batch rows; sequences: of a packed batch, whose num_queries count all tokens.

    rows, tile_cost: queries of a tile, and what its start and end take in key tiles, where they are not tuned.json's.
    queue: sorted tiles of packed sequences go to whoever is free, not in turns. item_bytes: of a key's or value's
    element.

    Program p takes tile turn * programs + p, or + programs - 1 - p every other turn. Without a limit to the right all
    tiles are as long, and follow head by head; a few programs that as many turns do not need are left out, as turns are
    then whole heads more often. With one, a section's tiles go by from the longest to the shortest; sections and turns
    may beat against each other (a program that always gets the longest), so sections and numbers of programs are tried,
    and the pair is taken whose busiest program has least to do; a table is better still where its tiles are few enough
    to be dealt one by one. Packed lengths are unknown here: a kernel sorts their tiles.
    """
    constants = config(columns)
    rows, keys = int(rows or 64 * constants["WARPGROUPS"]), int(constants["BN"])
    slots = -(-num_queries // rows) if sequences is None else num_queries // rows + sequences
    programs = min(slots * heads, processors)
    if sequences is not None:
        plain = Schedule(_together(heads, group, _PACKED_SECTION), slots, heads, programs, rows, keys)
        if plain.turns < _SORTED_TURNS or slots > _MOST_SORTED:
            return plain
        section = _together(heads, group, _QUEUED_SECTION) if queue else plain.section
        return Schedule(section, slots, heads, programs, rows, keys, "sorted")
    if right is None:
        plain = Schedule(1, slots, heads, programs, rows, keys)
        enough = -(-slots * heads // plain.turns)
        return replace(plain, programs=enough) if enough >= programs * _FEWEST_PROGRAMS else plain
    head_bytes = 2 * item_bytes * num_keys * columns // group
    most = max(group, min(heads, _SECTION_BYTES // max(1, head_bytes)))
    sections = [n for n in range(group, most + 1, group) if heads % n == 0]
    if tile_cost is None:
        tile_cost = float(_table()["head_dims"][str(columns)]["tile_cost"])
    work = work_of_tiles(slots, rows, keys, num_queries, num_keys, shift, left, right, tile_cost)
    fewer = {n for n in (programs, programs - programs % 32) if n > 0}
    tried = [(n, p) for n in reversed(sections) for p in sorted(fewer, reverse=True)]
    section, fewest = min(tried, key=lambda pair: busiest(work, heads, *pair))
    plain = Schedule(section, slots, heads, fewest, rows, keys, tile_cost=tile_cost)
    if not 1 < plain.turns <= _MOST_TURNS or slots * heads > _MOST_DEALT:
        return plain
    return _or_by_table(plain, programs, work, sections, head_bytes)


def _together(heads: int, group: int, most: int) -> int:
    """The most heads that divide all heads and are whole groups; one group if `most` is less."""
    return max(n for n in range(group, max(group, most) + 1, group) if heads % n == 0)


# A table may be this much less even than the closed form, as its sections are smaller; what is tried after it must be
# so much more even.
_EVEN_ENOUGH, _WORTH_ANOTHER = 1.01, 0.995
# Where the busiest program has so many times the mean's work, no sections are dealt as one: a head's tiles then lie
# further apart, which cost sixteen sequences of 1,024 tokens more than 1.2 % of evenness gave
# (docs/log/prefill-attention.md).
_EVEN = 1.02


def _or_by_table(plain: Schedule, programs: int, work: list[float], sections: list[int], head_bytes: int) -> Schedule:
    """The closed form, or a table of so many programs where that is more even.

    sections: heads that may be walked together, the fewest first. The last ones are dealt as one only where that is
    more even by _WORTH_ANOTHER and neither the closed form nor a table without comes within _EVEN of the mean.
    """
    most = max(sections[0], _DEALT_SECTION_BYTES // max(1, head_bytes))
    # The two largest sections: most are even, and more heads share the L2 in smaller ones.
    tables = {
        n: _shares(work, plain.heads, n, programs, min(_MOST_LAST, _SECTION_BYTES // max(1, n * head_bytes)))
        for n in sorted((n for n in sections if n <= most), reverse=True)[:2]
    }
    # Each without, and then what else there is of each.
    without = ((n, *next(shares)) for n, shares in tables.items())
    others = ((n, *share) for n, shares in tables.items() for share in shares)
    best, least, worth = plain, busiest(work, plain.heads, plain.section, plain.programs), _EVEN_ENOUGH
    for tried in (without, others):
        for section, last, share in tried:
            if share < least * worth:
                best = replace(plain, section=section, programs=programs, order="table", last=last)
                least, worth = share, _WORTH_ANOTHER
        if least * programs <= _EVEN:
            break
    return best


def work_of_tiles(
    slots: int, rows: int, keys: int, num_queries: int, num_keys: int, shift: int, left: int | None, right: int,
    tile_cost: float,
) -> list[float]:  # fmt: skip
    """What a head's tiles take, from the last rows to the first, in key tiles: those of each, and tile_cost."""
    work: list[float] = []
    for at in reversed(range(slots)):
        end = min(num_keys, min((at + 1) * rows, num_queries) + shift + right)
        begin = 0 if left is None else max(0, at * rows + shift - left) // keys
        work.append(max(1, -(-max(end, 0) // keys) - begin) + tile_cost)
    return work


def _deal(work: list[float], heads: int, section: int, last: int, programs: int) -> list[list[int]]:
    """Positions of each program's tiles: each goes to whoever has least, as a queue would do it.

    They go by as they are numbered, but those of the last `last` sections the longest first. work: of a head's tiles.
    """
    across = section * len(work)
    each = [n for n in work for _ in range(section)]
    ahead = (heads // section - last) * across
    behind = sorted(range(ahead, heads * len(work)), key=lambda position: -each[position % across])
    rows: list[list[int]] = [[] for _ in range(programs)]
    least = [(0.0, program) for program in range(programs)]
    for position in (*range(ahead), *behind):
        done, program = least[0]
        rows[program].append(position)
        heapq.heapreplace(least, (done + each[position % across], program))
    return rows


def _shares(work: list[float], heads: int, section: int, programs: int, most: int) -> Iterator[tuple[int, float]]:
    """(last, share of all work that _deal's busiest program has), for last = 1, 2, .. `most`, at most all sections."""
    each = [n for n in work for _ in range(section)]
    loads = [0.0] * programs
    before: deque[list[float]] = deque(maxlen=max(1, most))
    for _ in range(heads // section):
        before.append(loads.copy())
        for one in each:
            heapq.heapreplace(loads, loads[0] + one)
    each.sort(reverse=True)
    for last in range(1, len(before) + 1):
        loads = before[-last]
        for one in each:
            for _ in range(last):
                heapq.heapreplace(loads, loads[0] + one)
        yield last, max(loads) / sum(loads)


@lru_cache(maxsize=256)
def dealt(
    *, plan: Schedule, num_queries: int, num_keys: int, shift: int, left: int | None, right: int
) -> tuple[tuple[int, ...], ...]:
    """The table of a Schedule whose order is "table": each program's positions, -1 after its last."""
    sizes = (plan.slots, plan.rows, plan.keys, num_queries, num_keys, shift, left, right)
    positions = _deal(work_of_tiles(*sizes, plan.tile_cost), plan.heads, plan.section, plan.last, plan.programs)
    turns = max(map(len, positions))
    return tuple(tuple(row + [-1] * (turns - len(row))) for row in positions)


def busiest(work: list[float], heads: int, section: int, programs: int) -> float:
    """Share of all work, times `programs` of the card, that the busiest program has: time, in arbitrary units.

    work: of a head's tiles, in order.
    """
    seen = min(heads, max(section, _TILES_TRIED // len(work) // section * section))
    at = torch.arange(seen * len(work), device="cpu")
    turn, program = at // programs, at % programs
    program = torch.where(turn % 2 == 0, program, programs - 1 - program)
    each = torch.tensor(work, dtype=torch.float32, device="cpu")[at % (section * len(work)) // section]
    most = torch.zeros(programs, dtype=torch.float32, device="cpu").index_add_(0, program, each).max()
    return float(most / each.sum())
