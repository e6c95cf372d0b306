"""How the Hopper kernel's tiles are dealt to the SMs, and its tile; from shapes and flags alone."""

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

# K and V of the heads that are walked together: inside an H200's L2, and where tiles can be dealt one by one so little
# that its halves may both hold them. (Of 2 to 32 MB, 4 to 8 were the fastest; on a GPU at its power limit the way of
# keys and values counts even where nothing waits for it.)
_SECTION_BYTES, _DEALT_SECTION_BYTES = 32 << 20, 8 << 20
# Enough to see how turns and sections beat against each other, and still about a millisecond.
_TILES_TRIED = 8192
# A table costs the host one to four microseconds a tile, once a shape; with more turns the closed form is even enough.
_MAX_DEALT, _MAX_TURNS = 8192, 64
# Sections at the end that a table deals as one, and no more than hold _SECTION_BYTES: where a section has few tiles,
# the last one can't make up for what the others left uneven.
_MAX_LAST = 8
# Heads of packed sequences that are walked together. In turns: enough that sorted tiles come out even, and a long
# sequence's keys and values of so many heads still fit the L2. From a queue tiles come out even anyway.
_PACKED_SECTION, _QUEUED_SECTION = 8, 2
_SPILLED_WITH = 3
# Without a limit to the right: share of the SMs that take part at least (120 of 132 were measured).
_FEWEST_PROGRAMS = 7 / 8
# Turns from which on packed tiles are worth a kernel that sorts them, and the most slots that it sorts.
_SORTED_TURNS, _MAX_SORTED = 8, 8192


@dataclass(frozen=True)
class Work:
    """The rows whose tiles are dealt. A query at place p sees the keys p - left .. p + right; query 0 is at `shift`.

    heads: of all batch rows; group: heads of a KV head. sequences: of a packed batch; then heads are of one row, and
    num_queries count all tokens.
    """

    heads: int
    group: int
    num_queries: int
    num_keys: int
    shift: int = 0
    left: int | None = None
    right: int | None = None
    sequences: int | None = None


@dataclass(frozen=True)
class Schedule:
    """How the tiles of a Work are dealt.

    section: heads walked together; slots: tiles of a head, at most; programs: SMs that take turns over the tiles.
    rows, keys: queries of a tile, and keys of a key tile.
    order: the rule: "turns", closed form; "table", as `dealt` says; "sorted", turns over packed tiles from the longest
    on.
    last: sections at the end that a table deals as one, from the longest tile on.
    tile_cost: what a tile's start and end take, in key tiles.
    """

    work: Work
    section: int
    slots: int
    programs: int
    rows: int
    keys: int
    order: str = "turns"
    last: int = 1
    tile_cost: float = 1.0

    @property
    def turns(self) -> int:
        """Turns of a program, at most, in closed form."""
        return -(-self.tiles // self.programs)

    @property
    def tiles(self) -> int:
        """Tiles of all heads, at most."""
        return self.slots * self.work.heads


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    return json.loads(Path(__file__).parents[1].joinpath("tuned.json").read_text())


def columns_of(head_dim: int) -> int:
    """The columns that a head takes in shared memory and in the products."""
    return next(width for width in (64, 128, 192, 256) if head_dim <= width)


def box_columns(columns: int) -> int:
    """Columns of a box of TMA: all of a head's if they are a power of two, else 64."""
    return columns if columns.bit_count() == 1 else 64


def config(columns: int, rows: int | None = None) -> dict[str, Any]:
    """Tile and ring for heads of `columns`: hopper/kernel.py's constants. Not to be changed.

    rows: of a tile, where there are several; None: of long sequences.
    """
    return next(each["config"] for each in _tiles(columns) if rows in (None, 64 * each["config"]["WARPGROUPS"]))


def _tiles(columns: int) -> list[dict[str, Any]]:
    """Tiles of tuned.json for heads of `columns`, that of long sequences first. A row has the same bits with each."""
    found = _table()["head_dims"][str(columns)]
    return [found, *found.get("others", ())]


def _tile_for(work: Work, columns: int, num_sms: int) -> dict[str, Any]:
    """The tile whose busiest program is expected to end first."""
    tiles = _tiles(columns)
    if len(tiles) == 1 or work.sequences is not None:
        return tiles[0]
    return min(tiles, key=lambda each: _expected(work, each, num_sms))


def _expected(work: Work, tile: dict[str, Any], num_sms: int) -> float:
    """Time of the busiest program with a tile, in arbitrary units."""
    rows, keys = 64 * tile["config"]["WARPGROUPS"], tile["config"]["BN"]
    slots, step, own = -(-work.num_queries // rows), tile["step_time"], tile["tile_time"]
    if work.right is None:
        return -(-slots * work.heads // num_sms) * (step * -(-work.num_keys // keys) + own)
    costs = [step * cost + own for cost in tile_costs(Schedule(work, 1, slots, num_sms, rows, keys, tile_cost=0.0))]
    return max(*costs, sum(costs) * work.heads / num_sms)


def knows_limit(columns: int, rows: int, *, packed: bool) -> bool:
    """Whether the kernel is compiled with a limit to the right although the call has none: one that hides nothing.

    With a copy of their code for each of three warpgroups ptxas spills in the loop of whole tiles otherwise; with one
    for all it does not, and the call has the kernel of causal ones of few tiles.
    """
    return config(columns, rows)["WARPGROUPS"] == _SPILLED_WITH and not packed


def swept(dtype: str, head_dim: int) -> bool:
    """Whether a sweep against the reference has passed on a GPU."""
    return head_dim in _table()["swept"]["head_dims"].get(dtype, ())


@lru_cache(maxsize=1024)
def schedule(
    work: Work,
    *,
    columns: int,
    num_sms: int,
    rows: int | None = None,
    tile_cost: float | None = None,
    queue: bool = False,
    item_bytes: int = 2,
) -> Schedule:
    """Deal the tiles of heads of so many columns.

    rows, tile_cost: queries of a tile, and what its start and end take in key tiles; by default those of one of
    tuned.json's tiles, the one that is expected to take the least time. queue:
    sorted tiles of packed sequences go to the next free program, not in turns. item_bytes: of a key's or value's
    element.

    Program p takes tile turn * programs + p, or + programs - 1 - p every other turn. Without a limit to the right all
    tiles are as long, and follow head by head; a few programs that as many turns do not need are left out, as turns are
    then whole heads more often. With one, a section's tiles go by from the longest to the shortest; sections and turns
    may beat against each other (a program that always gets the longest), so sections and numbers of programs are tried,
    and the pair is taken whose busiest program has least to do; a table is better still where its tiles are few enough
    to be dealt one by one. Packed lengths are unknown here: a kernel sorts their tiles.
    """
    tile = _tile_for(work, columns, num_sms)
    heads, group = work.heads, work.group
    rows, keys = int(rows or 64 * tile["config"]["WARPGROUPS"]), int(tile["config"]["BN"])
    packed = work.sequences is not None
    slots = work.num_queries // rows + work.sequences if work.sequences is not None else -(-work.num_queries // rows)
    programs = min(slots * heads, num_sms)
    if packed:
        plain = Schedule(work, _together(heads, group, _PACKED_SECTION), slots, programs, rows, keys)
        if plain.turns < _SORTED_TURNS or slots > _MAX_SORTED:
            return plain
        section = _together(heads, group, _QUEUED_SECTION) if queue else plain.section
        return replace(plain, section=section, order="sorted")
    if work.right is None:
        plain = Schedule(work, 1, slots, programs, rows, keys)
        enough = -(-plain.tiles // plain.turns)
        return replace(plain, programs=enough) if enough >= programs * _FEWEST_PROGRAMS else plain
    head_bytes = 2 * item_bytes * work.num_keys * columns // group
    most = max(group, min(heads, _SECTION_BYTES // max(1, head_bytes)))
    sections = [n for n in range(group, most + 1, group) if heads % n == 0]
    if tile_cost is None:
        tile_cost = float(tile["tile_cost"])
    plain = Schedule(work, 1, slots, programs, rows, keys, tile_cost=tile_cost)
    costs = tile_costs(plain)
    fewer = {n for n in (programs, programs - programs % 32) if n > 0}
    tried = [(n, p) for n in reversed(sections) for p in sorted(fewer, reverse=True)]
    section, fewest = min(tried, key=lambda pair: busiest(costs, heads, *pair))
    plain = replace(plain, section=section, programs=fewest)
    if not 1 < plain.turns <= _MAX_TURNS or plain.tiles > _MAX_DEALT:
        return plain
    return _or_by_table(plain, programs, costs, sections, head_bytes)


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


def _or_by_table(plain: Schedule, programs: int, costs: list[float], sections: list[int], head_bytes: int) -> Schedule:
    """The closed form, or a table of so many programs where that is more even.

    sections: heads that may be walked together, the fewest first. The last ones are dealt as one only where that is
    more even by _WORTH_ANOTHER and neither the closed form nor a table without comes within _EVEN of the mean.
    """
    heads = plain.work.heads
    most = max(sections[0], _DEALT_SECTION_BYTES // max(1, head_bytes))
    # The two largest sections: most are even, and more heads share the L2 in smaller ones.
    tables = {
        n: _shares(costs, heads, n, programs, min(_MAX_LAST, _SECTION_BYTES // max(1, n * head_bytes)))
        for n in sorted((n for n in sections if n <= most), reverse=True)[:2]
    }
    # Each without, and then what else there is of each.
    without = ((n, *next(shares)) for n, shares in tables.items())
    others = ((n, *share) for n, shares in tables.items() for share in shares)
    best, least, worth = plain, busiest(costs, heads, plain.section, plain.programs), _EVEN_ENOUGH
    for tried in (without, others):
        for section, last, share in tried:
            if share < least * worth:
                best = replace(plain, section=section, programs=programs, order="table", last=last)
                least, worth = share, _WORTH_ANOTHER
        if least * programs <= _EVEN:
            break
    return best


def tile_costs(plan: Schedule) -> list[float]:
    """Costs of a head's tiles, from the last rows to the first, in key tiles: those of each, and tile_cost."""
    work = plan.work
    assert work.right is not None
    costs: list[float] = []
    for at in reversed(range(plan.slots)):
        end = min(work.num_keys, min((at + 1) * plan.rows, work.num_queries) + work.shift + work.right)
        begin = 0 if work.left is None else max(0, at * plan.rows + work.shift - work.left) // plan.keys
        costs.append(max(1, -(-max(end, 0) // plan.keys) - begin) + plan.tile_cost)
    return costs


def _deal(costs: list[float], heads: int, section: int, last: int, programs: int) -> list[list[int]]:
    """Positions of each program's tiles: each goes to the program with the least work, as a queue would do it.

    They go by as they are numbered, but those of the last `last` sections the longest first. costs: of a head's tiles.
    """
    across = section * len(costs)
    each = [n for n in costs for _ in range(section)]
    ahead = (heads // section - last) * across
    behind = sorted(range(ahead, heads * len(costs)), key=lambda position: -each[position % across])
    rows: list[list[int]] = [[] for _ in range(programs)]
    least = [(0.0, program) for program in range(programs)]
    for position in (*range(ahead), *behind):
        done, program = least[0]
        rows[program].append(position)
        heapq.heapreplace(least, (done + each[position % across], program))
    return rows


def _shares(costs: list[float], heads: int, section: int, programs: int, most: int) -> Iterator[tuple[int, float]]:
    """(last, share of all work that _deal's busiest program has), for last = 1, 2, .. `most`, at most all sections."""
    each = [n for n in costs for _ in range(section)]
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
def dealt(plan: Schedule) -> tuple[tuple[int, ...], ...]:
    """The table of a Schedule whose order is "table": each program's positions, -1 after its last."""
    positions = _deal(tile_costs(plan), plan.work.heads, plan.section, plan.last, plan.programs)
    turns = max(map(len, positions))
    return tuple(tuple(row + [-1] * (turns - len(row))) for row in positions)


def busiest(costs: list[float], heads: int, section: int, programs: int) -> float:
    """Share of all work, times `programs` of the GPU, that the busiest program has: time, in arbitrary units.

    costs: of a head's tiles, in order.
    """
    seen = min(heads, max(section, _TILES_TRIED // len(costs) // section * section))
    at = torch.arange(seen * len(costs), device="cpu")
    turn, program = at // programs, at % programs
    program = torch.where(turn % 2 == 0, program, programs - 1 - program)
    each = torch.tensor(costs, dtype=torch.float32, device="cpu")[at % (section * len(costs)) // section]
    most = torch.zeros(programs, dtype=torch.float32, device="cpu").index_add_(0, program, each).max()
    return float(most / each.sum())
