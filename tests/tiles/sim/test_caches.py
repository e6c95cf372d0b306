"""Caches: traces counted by hand, and laws that hold for every stream."""

import dataclasses
import itertools
import time
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onewave.base.errors import InvalidArgumentError
from onewave.tiles.search.panels import panel_loads, strip_snake_loads
from onewave.tiles.sim.caches import Stream, replay

ROW = [(r, c) for r in range(3) for c in range(3)]
SNAKE = [(r, c if r % 2 == 0 else 2 - c) for r in range(3) for c in range(3)]


def stream(text, *, writes="", nbytes=1):
    """Accesses of one-letter tiles; a letter in upper case writes."""
    tiles = np.array([ord(letter.lower()) for letter in text], dtype=np.int64)
    write = np.array([letter.isupper() for letter in text], dtype=np.bool_)
    return Stream(tiles, write, np.full(len(text), nbytes, dtype=np.int64))


# Counted by hand. Row order at 4 panels: the first row loads A0 B0 B1 B2 (4). LRU then has (old to new) B0 B1 A0 B2:
# A1 evicts B0, B0 evicts B1, B1 evicts A0, B2 stays (3): 7. The third row does the same: A2 evicts A1's elders one
# by one, and B2 stays (3): 10. Belady keeps two columns of three: A1 takes dead A0's place (1), A2 takes A1's: 6.
# FIFO at 4: row two evicts A0 (A1), then finds B0 B1 B2 (1); row three evicts B0 (A2), then B0 evicts B1, B1 evicts B2,
# B2 evicts A1 (4): 9. Snake at 3: LRU's turn reuses the last column: 4 + (1 + 2) + (1 + 2) less one in each later row.
HAND_COUNTED = {
    ("row", "lru"): [12, 12, 10, 6, 6],
    ("row", "fifo"): [12, 12, 9, 6, 6],
    ("row", "belady"): [12, 9, 6, 6, 6],
    ("snake", "lru"): [10, 10, 8, 6, 6],
    ("snake", "fifo"): [10, 9, 9, 6, 6],
    ("snake", "belady"): [10, 8, 6, 6, 6],
}


@pytest.mark.parametrize(("name", "policy"), HAND_COUNTED)
def test_three_by_three_loads_equal_the_count_by_hand(name, policy):
    order = ROW if name == "row" else SNAKE
    assert [panel_loads(3, 3, order, c, policy) for c in range(2, 7)] == HAND_COUNTED[name, policy]


def fewest_loads(order, rows, capacity):
    """The least number of loads for one order, over every choice of what to evict."""

    @cache
    def best(at, resident):
        if at == len(order):
            return 0
        needed = frozenset((order[at][0], rows + order[at][1]))
        missing = needed - resident
        others = resident - needed
        kept = min(len(others), capacity - len(needed))
        return len(missing) + min(best(at + 1, needed | set(keep)) for keep in itertools.combinations(others, kept))

    return best(0, frozenset())


@settings(max_examples=40)
@given(st.permutations([(r, c) for r in range(3) for c in range(3)]), st.integers(2, 6))
def test_belady_is_the_least_of_all_evictions_and_lru_and_fifo_load_no_less(order, capacity):
    least = fewest_loads(tuple(order), 3, capacity)
    assert panel_loads(3, 3, order, capacity, "belady") == least
    assert panel_loads(3, 3, order, capacity, "lru") >= least
    assert panel_loads(3, 3, order, capacity, "fifo") >= least
    assert least >= 6


def test_the_strip_snake_formula_is_what_the_strip_snake_loads():
    for rows, cols, capacity in itertools.product((1, 3, 4, 7), (1, 2, 5), (2, 3, 4)):
        height, order = capacity - 1, []
        for strip, top in enumerate(range(0, rows, height)):
            columns = range(cols) if strip % 2 == 0 else range(cols - 1, -1, -1)
            order += [(r, c) for c in columns for r in range(top, min(rows, top + height))]
        assert panel_loads(rows, cols, order, capacity, "belady") == strip_snake_loads(rows, cols, capacity)


# Counted by hand, room for two, a b a c a b: a and b load, a hits, and c evicts b under LRU and Belady but a, the first
# to have come, under FIFO. LRU: a hits, b loads again (4). FIFO: a evicts b, b evicts c (5). Belady at c weighs a, read
# at once, against b: as LRU (4).
@pytest.mark.parametrize(("policy", "loads"), [("lru", 4), ("fifo", 5), ("belady", 4)])
def test_three_tiles_in_room_for_two(policy, loads):
    assert replay(policy, stream("abacab"), 2).num_loads == loads


def test_a_written_tile_is_stored_when_it_is_evicted_and_the_rest_at_the_end():
    result = replay("lru", stream("AbcBd"), 2)
    # A is written without a load; c evicts it (dirty); B is resident, becomes dirty; d evicts c (clean); B is flushed.
    assert result.loaded.tolist() == [False, True, True, False, True]
    evicted = [
        (int(at), chr(int(t)), bool(d))
        for at, t, d in zip(result.evicted_at, result.evicted_tile, result.evicted_dirty, strict=True)
    ]
    assert evicted == [(2, "a", True), (4, "c", False), (5, "b", True)]
    assert (result.loaded_bytes, result.stored_bytes) == (3, 2)


def test_belady_gives_up_a_tile_that_is_overwritten_before_it_is_read():
    # At c, a is read again soon and b is overwritten first: keeping b would save nothing.
    result = replay("belady", stream("abcBa"), 2)
    assert result.num_loads == 3
    assert chr(int(result.evicted_tile[0])) == "b"


accesses = st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=40)


@settings(max_examples=80)
@given(accesses, st.integers(1, 8), st.sampled_from(["lru", "fifo", "belady"]))
def test_what_a_cache_moves_obeys_the_laws(items, capacity, policy):
    tile = np.array([t for t, _ in items], dtype=np.int64)
    write = np.array([w for _, w in items])
    size = 3 + tile % 3 if policy != "belady" else np.full(len(tile), 3)
    made = Stream(tile, write, size)
    result = replay(policy, made, 5 * capacity)
    first_reads = {t for at, (t, w) in enumerate(items) if not w and t not in tile[:at]}
    assert set(tile[result.loaded].tolist()) >= first_reads
    assert (result.loaded == (~result.hit & ~write)).all()
    assert result.stored_bytes >= sum({int(t): int(s) for t, s, w in zip(tile, size, write, strict=True) if w}.values())
    # Bytes that came in and did not leave fit.
    came, left = int(size[~result.hit].sum()), 0
    for at, t in zip(result.evicted_at, result.evicted_tile, strict=True):
        left += int(size[tile == t][0]) if at < len(tile) else 0
    assert came - left <= 5 * capacity


@settings(max_examples=60)
@given(accesses, st.integers(1, 6), st.booleans())
def test_belady_loads_no_more_bytes_than_lru_or_fifo(items, capacity, uneven):
    tile = np.array([t for t, _ in items], dtype=np.int64)
    made = Stream(tile, np.array([w for _, w in items]), 1 + tile % 3 if uneven else np.ones(len(tile), dtype=np.int64))
    room = capacity * 3
    assert replay("belady", made, room).loaded_bytes <= replay("lru", made, room).loaded_bytes
    if not uneven:
        assert replay("belady", made, room).loaded_bytes <= replay("fifo", made, room).loaded_bytes


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: replay("clock", stream("a"), 1), "lru, fifo, belady"),
        (lambda: replay("lru", stream("a", nbytes=9), 8), "at least the largest tile, 9"),
        (lambda: panel_loads(3, 3, ROW, 1), "2 or more"),
        (lambda: panel_loads(3, 3, [(3, 0)], 2), "inside the 3 x 3 grid"),
        (lambda: panel_loads(3, 3, [(0, 0), (0, 0)], 2), "twice"),
        (lambda: panel_loads(0, 3, [], 2), "1 x 1 or more"),
    ],
)
def test_what_cannot_be_cached_is_refused_by_name(call, words):
    with pytest.raises(InvalidArgumentError, match=words):
        call()


@pytest.mark.parametrize("policy", ["lru", "fifo", "belady"])
def test_a_group_that_does_not_fit_at_once_is_refused_by_every_policy(policy):
    accesses = stream("abcab")
    groups = np.array([0, 0, 0, 1, 1], dtype=np.int64)
    assert replay(policy, dataclasses.replace(accesses, group=groups), 3).num_loads == 3
    with pytest.raises(InvalidArgumentError, match="all that one step touches"):
        replay(policy, dataclasses.replace(accesses, group=groups), 2)


def test_a_million_accesses_take_seconds_even_with_belady():
    rng = np.random.default_rng(0)
    made = Stream(rng.integers(0, 20_000, 10**6), np.zeros(10**6, dtype=np.bool_), np.ones(10**6, dtype=np.int64))
    began = time.process_time()
    replay("belady", made, 8000)
    assert time.process_time() - began < 40
