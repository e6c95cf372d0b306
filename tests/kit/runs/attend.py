"""The wave's attention as it is compiled: its PTX run thread by thread against plain numbers, without a device.

What the source in NumPy can't show is shown here: layouts, operands of the tensor cores, barriers inside a partition,
and that nothing outside the tensors is read or written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kit.build import Built
from kit.calls.call import Call
from kit.calls.wave_alone import attend_call, combine_call, merge_call
from kit.ptx.ptx_in_numpy import Block, Program, plain
from kit.ptx.ptx_memories import Global
from kit.recorder import Recorded
from onewave.tiles.graph.builders import cuts
from onewave.wave.plan.layout import MAX_SPLITS, POINTERS, POLLED_KEYS, POLLED_SPLITS, STEP_WORDS
from onewave.wave.plan.steps import Place, Word

# D, heads a task has room for, norms of q and k, keys of a page (or 0), MERGE_WORDS; heads there are, keys, split,
# splits, window.
CASES: dict[str, tuple[tuple[int, int, bool, int, int], tuple[int, int, int, int, int]]] = {
    "the last of three splits": ((64, 4, False, 0, 0), (4, 300, 2, 16, 0)),
    "head_dim 128, three heads, three blocks of keys": ((128, 4, False, 0, 0), (3, 300, 0, 1, 0)),
    "head_dim 128, two whole blocks of keys and the new one": ((128, 4, False, 0, 0), (4, 257, 0, 4, 0)),
    "the first of three splits": ((64, 4, False, 0, 0), (4, 258, 0, 16, 0)),
    "head_dim 32, norms, one key": ((32, 4, True, 0, 0), (4, 1, 0, 16, 0)),
    "one head, whole blocks of keys and the new one": ((64, 1, False, 0, 0), (1, 257, 0, 4, 0)),
    "two heads, a window of the new key alone": ((128, 2, False, 0, 0), (2, 300, 0, 4, 1)),
    "head_dim 128, eight heads": ((128, 8, False, 0, 0), (8, 140, 0, 1, 0)),
    "seven heads, one window": ((64, 8, False, 0, 0), (7, 400, 1, 4, 350)),
    "seven heads, a window that one split holds": ((64, 8, False, 0, 0), (7, 400, 0, 4, 150)),
    "pages of 16, a window from the middle of one": ((64, 4, False, 16, 0), (4, 301, 0, 1, 203)),
    "pages of 64, head_dim 128, the last of three splits": ((128, 4, False, 64, 0), (3, 300, 2, 16, 0)),
    "pages of 16, head_dim 32, the first key": ((32, 4, True, 16, 0), (4, 1, 0, 16, 0)),
    "the last of three splits, merged elsewhere": ((64, 4, False, 0, 4), (4, 300, 2, 16, 0)),
    "head_dim 128, the last of eight splits, merged elsewhere": ((128, 4, False, 0, 8), (3, 1020, 7, 16, 0)),
    "head_dim 32, the tenth of sixteen splits, merged elsewhere": ((32, 4, True, 0, 4), (4, 8194, 9, 16, 0)),
    "the first of two splits, merged elsewhere": ((64, 4, False, 0, 4), (4, 258, 0, 2, 0)),
    "one split where others are merged elsewhere": ((64, 4, False, 0, 4), (3, 257, 0, 16, 0)),
}
# D, heads a task has room for, splits; heads there are, keys.
MERGED: dict[str, tuple[tuple[int, int, int], tuple[int, int]]] = {
    "one head, three of sixteen splits": ((64, 1, 16), (1, 300)),
    "head_dim 128, all of four splits": ((128, 1, 4), (1, 3000)),
    "three of four heads": ((32, 4, 8), (3, 258)),
    "one split, of many keys": ((64, 2, 1), (2, 500)),
    "a sequence that one split holds": ((64, 2, 4), (2, 257)),
}
FEWS = ((32, 4), (64, 8), (128, 4))
TARGET, WHOLE, MERGEABLE = 2048, 4096, 6144


def rotated(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    cos, sin, a, b = np.cos(angles), np.sin(angles), x[..., :half], x[..., half:]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


def normed(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gain


def shared_out(cached: int, splits: int, *, few: bool) -> tuple[int, int]:
    """Splits that so many cached keys use, and keys a split; the last one has the new key besides."""
    used = 1 if cached <= 256 else min(splits, cuts(cached, 128))
    if few and cached <= POLLED_KEYS:
        used = min(used, POLLED_SPLITS)
    share = max(128, cuts(cuts(cached, used), 128) * 128)
    return max(1, cuts(cached, share)), share


def paged(cache: np.ndarray, table: np.ndarray, page: int) -> np.ndarray:
    """Rows of keys laid out in pages in the table's order, two pages more than it has; page 0: as they are."""
    if not page:
        return cache
    pool = np.full((len(table) + 2, page, cache.shape[1]), np.nan, dtype=cache.dtype)
    for number, place in enumerate(table):
        rows = cache[number * page : (number + 1) * page]
        pool[place, : len(rows)] = rows
    return pool.reshape(-1, cache.shape[1])


def run(built: Built, memory: Global, given: list[int]) -> None:
    """Run a kernel of one block."""
    program = Program(plain(built.ptx))
    given = given + [0] * (len(program.parameters) - len(given))
    arguments = {name: value for (_, name), value in zip(program.parameters, given, strict=True)}
    Block(program, memory, arguments, 0, built.shared).run()


def attends(case: str, built: Built) -> None:
    """A split's weighted values, and the new row in the cache."""
    constants, (heads, length, split, splits, window) = CASES[case]
    dim, room, norms, page, merges = constants
    memory, dice = Global(1 << 22), np.random.default_rng(0)
    position, half = length - 1, dim // 2
    new = dice.standard_normal((heads + 2, dim)).astype(np.float16)
    keys, values = dice.standard_normal((2, length + 3, dim)).astype(np.float16)
    keys[position:], values[position:] = np.nan, np.nan
    angles = dice.uniform(0, 6, half)
    rotary = np.full((length, dim), np.nan, dtype=np.float32)
    rotary[position] = np.concatenate((np.cos(angles), np.sin(angles)))
    q_gain, k_gain = (1 + 0.3 * dice.standard_normal((2, dim))).astype(np.float32)

    def put(array: np.ndarray, *, read: bool = True, written: bool = False) -> int:
        at = memory.put(array, writable=written)
        memory.readable[at : at + array.nbytes] = read
        return at

    words = np.full(5 * TARGET, -1, dtype=np.int32)
    words[: new.size // 2] = new.reshape(-1).view(np.int32)
    places = np.zeros(POINTERS, dtype=np.int64)
    table = dice.permutation(cuts(length, page) + 2)[: cuts(length, page)] if page else np.zeros(1, dtype=int)
    kept = [put(paged(cache, table, page).view(np.int32), written=True) for cache in (keys, values)]
    places[[Place.ROTARY, Place.KEYS, Place.VALUES]] = (put(rotary), *kept)
    places[[Place.Q_NORM, Place.K_NORM]] = put(q_gain), put(k_gain)
    if page:
        places[[Place.SLOT_STRIDE, Place.TABLE, Place.TABLE_STRIDE]] = (
            page * half,
            put(table.astype(np.int32)),
            len(table),
        )
    record = np.zeros(STEP_WORDS, dtype=np.int32)
    record[[Word.TARGET, Word.WHOLE, Word.SLICE, Word.SPLITS, Word.WINDOW]] = (TARGET, WHOLE, split, splits, window)
    record[Word.MERGEABLE] = MERGEABLE
    record[[Word.APPENDS, Word.HEADS, Word.K, Word.V]] = (1, heads, heads * half, (heads + 1) * half)
    ours, theirs = put(words, written=True), put(np.zeros_like(words), read=False, written=True)
    given = [put(record), ours, theirs]
    given += [put(np.array([position])), put(np.array([0])), put(places), put(np.zeros(64, dtype=np.int32)), 1]
    run(built, memory, given)

    q, key, value = new[:heads].astype(np.float64), new[heads].astype(np.float64), new[heads + 1].astype(np.float64)
    if norms:
        q, key = normed(q, q_gain), normed(key, k_gain)
    q, key = (rotated(x, angles).astype(np.float16).astype(np.float64) for x in (q, key))
    all_keys, all_values = keys[:length].astype(np.float64), values[:length].astype(np.float64)
    all_keys[position], all_values[position] = key, value
    first = max(0, length - window) if window else 0
    used, share = shared_out(position - first, splits, few=merges > 0)
    newest = split == used - 1
    span = slice(first + split * share, length if newest else first + (split + 1) * share)
    scores = q @ all_keys[span].T * dim**-0.5
    weights = np.exp(scores - scores.max(1, keepdims=True))
    expected = weights @ all_values[span] / weights.sum(1, keepdims=True)
    lse = (scores.max(1) + np.log(weights.sum(1))) * np.log2(np.e)
    after, cleared = memory.get(ours, words), memory.get(theirs, words)
    if used == 1:  # finished attention, and nothing to combine
        found = after[WHOLE:][: heads * half].view(np.float16).reshape(heads, dim).astype(np.float64)
        assert np.abs(found - expected).max() < 1e-3 * max(1.0, np.abs(expected).max())
        assert (after[TARGET:WHOLE] == -1).all()
        assert (cleared[WHOLE:][: heads * half] == -1).all()
    elif merges:
        rows = [after[MERGEABLE:][: heads * MAX_SPLITS * (half + 1)].reshape(heads, -1)]
        own, lses = np.arange(half) + split * half, MAX_SPLITS * half + split
        found = np.ascontiguousarray(rows[0][:, own]).view(np.float16).astype(np.float64)
        assert np.abs(found - expected).max() < 1e-3 * max(1.0, np.abs(expected).max())
        assert np.abs(rows[0][:, lses].view(np.float32) - lse).max() < 1e-5
        assert (np.delete(rows[0], [*own, lses], axis=1) == -1).all()
        assert (after[TARGET:MERGEABLE] == -1).all()
    else:
        found = after[TARGET:][: room * (dim + 4)].view(np.float32).reshape(room, dim + 4)[:heads]
        assert np.abs(found[:, :dim] - expected).max() < 5e-4 * max(1.0, np.abs(expected).max())
        assert np.abs(found[:, dim:] - lse[:, None]).max() < 1e-5
        assert (after[WHOLE:] == -1).all()
    if merges:  # whichever way it was published, the other one's words too
        rows = cleared[MERGEABLE:][: heads * MAX_SPLITS * (half + 1)].reshape(heads, -1)
        mine = [*(np.arange(half) + split * half), MAX_SPLITS * half + split]
        assert (rows[:, mine] == -1).all()
        assert not np.delete(rows, mine, axis=1).any()
        assert (cleared[WHOLE:][: heads * half] == (-1 if split == 0 else 0)).all()
    else:
        assert (cleared[TARGET:][: (heads if used > 1 else room) * (dim + 4)] == -1).all()
    for at, cache, row in ((kept[0], keys, key), (kept[1], values, value)):
        after = memory.get(at, paged(cache, table, page))
        if page:
            spare = np.setdiff1d(np.arange(len(table) + 2), table)
            assert np.isnan(after.reshape(-1, page, dim)[spare]).all()
            after = after.reshape(-1, page, dim)[table].reshape(-1, dim)
        assert np.isnan(after[position + 1 :]).all()
        assert np.abs(after[position] - row).max() < 1e-3 if newest else np.isnan(after[position]).all()


def combines(case: str, built: Built) -> None:
    """The splits that a sequence uses, merged if there are several."""
    constants, (heads, length) = MERGED[case]
    dim, room, splits = constants
    memory, dice = Global(1 << 22), np.random.default_rng(1)
    used, _ = shared_out(length - 1, splits, few=False)
    parts = np.full((splits, room, dim + 4), np.nan, dtype=np.float32)
    parts[:used, :heads] = dice.standard_normal((used, heads, dim + 4))
    parts[:, :, dim:] = parts[:, :, dim : dim + 1] * 5
    words = np.full(parts.size + room * dim, -1, dtype=np.int32)
    words[: parts.size] = parts.reshape(-1).view(np.int32)
    record = np.zeros(STEP_WORDS, dtype=np.int32)
    record[[Word.SOURCE_STRIDE, Word.TARGET, Word.SPLITS, Word.HEADS]] = (room * (dim + 4), parts.size, splits, heads)
    ours = memory.put(words, writable=True)
    memory.readable[ours : ours + words.nbytes] = True
    theirs = memory.put(np.zeros_like(words), writable=True)
    given = [
        memory.put(record),
        ours,
        theirs,
        memory.put(np.array([length - 1])),
        memory.put(np.zeros(64, np.int32)),
        1,
    ]
    run(built, memory, given)
    if used == 1:  # who attends has done all there is to do
        assert (memory.get(ours, words) == words).all()
        assert not memory.get(theirs, words).any()
        return
    weights = np.exp2(parts[:used, :heads, dim:][:, :, :1].astype(np.float64))
    expected = (weights * parts[:used, :heads, :dim]).sum(0) / weights.sum(0)
    found = memory.get(ours, words)[parts.size :].view(np.float16).reshape(-1)[: heads * dim].reshape(heads, dim)
    assert np.abs(found - expected).max() < 2e-3 * max(1.0, np.abs(expected).max())
    cleared = memory.get(theirs, words)
    assert (cleared[parts.size :][: heads * dim // 2] == -1).all()
    assert not cleared[: parts.size].any()


def merges(variant: tuple[int, int], splits: int, built: Built) -> None:
    """Splits weighed by their sums."""
    dim, words = variant
    memory, dice = Global(1 << 22), np.random.default_rng(2)
    heads = words * 256 // (dim // 2)
    places = np.full((heads, MAX_SPLITS * (dim // 2 + 1)), -1, dtype=np.int32)
    values = dice.standard_normal((heads, splits, dim)).astype(np.float16)
    lses = 4 * dice.standard_normal((heads, splits)).astype(np.float32)
    places[:, : splits * dim // 2] = values.reshape(heads, -1).view(np.int32)
    places[:, MAX_SPLITS * dim // 2 :][:, :splits] = lses.view(np.int32)
    first, out = memory.put(places), np.full(words * 256, -1, dtype=np.int32)
    made = memory.put(out, writable=True)
    given = [first, first + MAX_SPLITS * dim * 2, memory.put(np.zeros(64, np.int32)), made, splits]
    run(built, memory, given)
    weights = np.exp2(lses.astype(np.float64))
    expected = (weights[:, :, None] * values).sum(1) / weights.sum(1)[:, None]
    found = memory.get(made, out).view(np.float16).reshape(heads, dim)
    assert np.abs(found[:-1] - expected[:-1]).max() < 2e-3 * np.abs(expected).max()
    assert not found[-1].any()
    if splits == 1:
        assert (found[:-1] == values[:-1, 0]).all()


def _checked(check: Callable[[Built], None], _: Recorded, built: Built) -> dict[str, Any]:
    """Report whether a run agrees; if not, the statement that fails."""
    try:
        check(built)
    except (AssertionError, RuntimeError) as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = "" if trace is None else f"{trace.tb_frame.f_code.co_name}, line {trace.tb_lineno}"
        return {"agrees": f"{where}: {type(error).__name__} {error}"}
    return {"agrees": True}


def _all_merges(variant: tuple[int, int], built: Built) -> None:
    for splits in (1, 2, POLLED_SPLITS, POLLED_SPLITS + 1, 13, MAX_SPLITS):
        merges(variant, splits, built)


ATTEND_RUNS = (
    {
        f"run of attend {name}": Call(partial(attend_call, *constants), check=partial(_checked, partial(attends, name)))
        for name, (constants, _) in CASES.items()
    }
    | {
        f"run of combine {name}": Call(
            partial(combine_call, *constants), check=partial(_checked, partial(combines, name))
        )
        for name, (constants, _) in MERGED.items()
    }
    | {
        f"run of merge D{variant[0]}": Call(
            partial(merge_call, *variant), check=partial(_checked, partial(_all_merges, variant))
        )
        for variant in FEWS
    }
)
