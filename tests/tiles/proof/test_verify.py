"""Schedules that verify accepts and rejects, case by case."""

import dataclasses
import itertools
import json
import time
import tracemalloc

import numpy as np
import pytest

from kit.task_tables.interpret_all import explore
from kit.task_tables.verify_table import verify_table
from onewave.base.errors import InvalidArgumentError, VerificationError
from onewave.tiles.graph.builders import gemm_chain
from onewave.tiles.graph.graph import Task, Tensor, TileGraph
from onewave.tiles.order.policies import POLICIES, plan
from onewave.tiles.order.schedule import Csr, Mode, Ring, Schedule, Syncs
from onewave.tiles.proof import happens_before as verify_order
from onewave.tiles.proof.happens_before import Places, unordered_pairs
from onewave.tiles.proof.interpret import interpret
from onewave.tiles.proof.schedule_file import parse_schedule
from onewave.tiles.proof.table import lower
from onewave.tiles.proof.verify import VerifiedSchedule, verify


def graph_of(*tasks: tuple[str, str, str]) -> TileGraph:
    """Tasks as (name, tiles read, tiles written), one letter a tile."""
    letters = sorted({letter for _, reads, writes in tasks for letter in reads + writes})
    tensors = {letter: Tensor(letter, (1,), (1,), 1) for letter in letters}

    def tiles(text):
        return tuple((letter, (0,)) for letter in text)

    made = tuple(Task(i, name, tiles(reads), tiles(writes), 1) for i, (name, reads, writes) in enumerate(tasks))
    return TileGraph(tensors, made)


def rejection(schedule: Schedule) -> VerificationError:
    with pytest.raises(VerificationError) as caught:
        verify(schedule)
    assert "\n" not in str(caught.value)
    return caught.value


def test_an_order_that_runs_against_the_dependencies_is_a_deadlock_under_every_policy():
    graph = gemm_chain(4, 2, 4, 4, tile=(2, 2, 2))
    for policy in POLICIES:
        for mode in Mode:
            backwards = plan(graph, range(len(graph.tasks))[::-1], policy, workers=2, mode=mode)
            assert rejection(backwards).kind == "deadlock"


def test_a_dropped_post_is_a_wrong_count():
    graph = gemm_chain(256, 64, 256, 256, tile=(128, 64, 64))
    schedule = plan(graph, range(len(graph.tasks)), "row", workers=3)
    posts = schedule.syncs.posts
    kept = np.arange(1, len(posts.first))
    fewer = Csr.build(len(graph.tasks), posts.row[kept], posts.first[kept], posts.second[kept])
    syncs = Syncs(schedule.syncs.waits, fewer, schedule.syncs.num_counters)
    assert rejection(dataclasses.replace(schedule, syncs=syncs)).kind == "count"


@pytest.mark.parametrize(
    ("queues", "task", "times"), [([[0], []], "b#1", 0), ([[0, 1], [1]], "b#1", 2), ([[1, 1, 0]], "b#1", 2)]
)
def test_a_task_that_is_not_planned_once_is_named(queues, task, times):
    graph = graph_of(("a", "", "x"), ("b", "x", "y"))
    schedule = dataclasses.replace(
        plan(graph, [0, 1], "tile", workers=2), queues=tuple(np.array(q, dtype=np.int64) for q in queues)
    )
    error = rejection(schedule)
    assert error.kind == "once"
    assert error.witness == {"task": task, "expected": 1, "got": times}


def layers() -> TileGraph:
    """Two layers; both write their activation, read by two tasks a layer."""
    return graph_of(("up0", "x", "a"), ("down0", "a", "y"), ("side0", "a", "s"), ("up1", "y", "b"), ("down1", "b", "z"))


def test_a_token_that_overtakes_the_one_before_is_a_race():
    graph = graph_of(("write", "", "a"), ("read", "a", "y"))
    schedule = plan(graph, [0, 1], "tile", workers=2)
    twice = schedule.program.repeated(2)
    waits, posts = np.array([1, 3]), np.array([0, 2])
    ones = np.ones(2, dtype=np.int64)
    syncs = Syncs(Csr.build(4, waits, np.array([0, 1]), ones), Csr.build(4, posts, np.array([0, 1]), ones), 2)
    queues = (np.array([0, 2]), np.array([1, 3]))
    error = rejection(dataclasses.replace(schedule, program=twice, queues=queues, syncs=syncs))
    assert (error.kind, error.witness["pair"]) == ("race", ["read#1@0", "write#0@1"])


@pytest.mark.parametrize(("tasks", "accesses"), [(6, 100), (100, 6)])
def test_a_program_is_repeated_up_to_the_size_of_a_graph(monkeypatch, tasks, accesses):
    monkeypatch.setattr("onewave.tiles.order.schedule.MAX_TASKS", tasks)
    monkeypatch.setattr("onewave.tiles.order.schedule.MAX_ACCESSES", accesses)
    once = plan(graph_of(("write", "", "a"), ("write", "", "b")), [0, 1]).program
    assert once.repeated(3).num_tasks == 6
    with pytest.raises(InvalidArgumentError, match=r"4 times 2 tasks and 2 tile accesses.*Run it up to 3 times"):
        once.repeated(4)


@pytest.mark.parametrize("mode", list(Mode))
def test_tokens_that_follow_each_other_in_one_launch_wait_for_the_buffers_of_the_token_before(mode):
    graph = layers()
    both = {"a": "act", "b": "act"}
    schedule = plan(graph, range(5), "tile", workers=3, mode=mode, buffers=both, tokens=3)
    assert verify(schedule).num_pairs > 3 * verify(plan(graph, range(5), workers=3, buffers=both)).num_pairs
    single = plan(graph, range(5), "tile", workers=3, mode=mode, buffers=both)
    waits = len(schedule.syncs.waits.first)
    assert waits > 3 * len(single.syncs.waits.first)


def test_a_ring_goes_round_on_through_the_tokens():
    graph = graph_of(("load0", "", "a"), ("use0", "a", "x"), ("load1", "", "b"), ("use1", "b", "y"))
    ring = Ring("weights", 1, (0, 2), (1, 3))
    schedule = plan(graph, range(4), "tile", queues=[[0, 2], [1, 3]], rings=[ring], tokens=2)
    assert verify(schedule)
    early = plan(graph, range(4), "tile", queues=[[0, 2], [1, 3]], rings=[Ring("weights", 1, (0, 2), (1, 2))], tokens=2)
    assert rejection(early).witness["pair"] == ["use1#3@0", "load0#0@1"]


def test_two_tiles_in_one_slot_may_live_in_either_order():
    graph = graph_of(("wa", "", "a"), ("wb", "", "b"), ("ra", "a", "x"), ("rb", "b", "y"))
    place = np.array([0, 0, 1, 2])
    # Program order starts both lives before either ends; one worker may still live them one after the other.
    for queue, good in (([0, 2, 1, 3], True), ([1, 3, 0, 2], True), ([0, 1, 2, 3], False), ([1, 0, 2, 3], False)):
        schedule = dataclasses.replace(plan(graph, range(4), workers=1, queues=[queue]), place=place)
        if good:
            assert verify(schedule)
        else:
            assert rejection(schedule).kind == "race"


@pytest.mark.parametrize("written", ["ab", "ba"])
def test_one_task_that_writes_two_tiles_of_one_slot_is_a_race_whatever_their_order(written):
    graph = graph_of(("w", "", written), ("r", "a", "o"))
    schedule = plan(graph, [0, 1], workers=1, buffers={"a": "s", "b": "s"})
    error = rejection(schedule)
    assert (error.kind, error.witness["pair"], error.witness["hazard"]) == ("race", ["w#0", "w#0"], "WAW")
    # The interpreters find it without verify: the reader finds the other tile.
    table = dataclasses.replace(lower(verify(plan(graph, [0, 1], workers=1))), slot=np.array([0, 0, 0, 1]), num_slots=2)
    assert not interpret(table, runs=1).ok
    harm = explore(table)
    assert harm.kind == "race"
    with pytest.raises(VerificationError, match="share a slot"):
        verify_table(table)


def test_a_tile_written_twice_by_one_task_is_one_result():
    assert verify(plan(graph_of(("w", "", "aa"), ("r", "a", "o")), [0, 1]))


def test_a_tile_written_twice_keeps_program_order_even_when_nobody_reads_between():
    schedule = plan(graph_of(("a", "", "x"), ("b", "", "x")), [0, 1], workers=1)
    none = np.zeros(0, dtype=np.int64)
    bare = dataclasses.replace(schedule, syncs=Syncs(Csr.build(2, none, none, none), Csr.build(2, none, none, none), 0))
    assert verify(bare)
    swapped = rejection(dataclasses.replace(bare, queues=(np.array([1, 0]),)))
    assert (swapped.kind, swapped.witness["hazard"]) == ("race", "WAW")


def test_only_verify_makes_a_verified_schedule():
    schedule = plan(graph_of(("a", "", "x")), [0])
    with pytest.raises(InvalidArgumentError, match="verify"):
        VerifiedSchedule(schedule, np.zeros(1, dtype=np.int64), 0, object())
    proved = verify(schedule)
    with pytest.raises(ValueError, match="read-only"):
        proved.schedule.queues[0][:] = 0
    schedule.queues[0][:] = 5
    assert proved.schedule.queues[0].tolist() == [0]


def reachable(schedule: Schedule, n: int) -> np.ndarray:
    """Happens-before by closing the relation over all triples, the slow and certain way."""
    before = np.zeros((n, n), dtype=bool)
    if schedule.mode is Mode.STATIC:
        for queue in schedule.queues:
            for first, second in itertools.combinations(queue.tolist(), 2):
                before[first, second] = True
    syncs = schedule.syncs
    for waiter, counter in zip(syncs.waits.row, syncs.waits.first, strict=True):
        before[syncs.posts.row[syncs.posts.first == counter], waiter] = True
    for middle in range(n):
        before |= np.outer(before[:, middle], before[middle])
    return before


@pytest.mark.parametrize(("mode", "few"), [(Mode.STATIC, 6), (Mode.STATIC, 0), (Mode.TICKET, 6)])
def test_happens_before_equals_the_transitive_closure_on_random_schedules(mode, few, monkeypatch):
    # Every way of following it: counters one by one or all at once, direct waits in small portions.
    monkeypatch.setattr(verify_order, "MAX_LOOPED", few)
    monkeypatch.setattr(verify_order, "MAX_ENTRIES", 50)
    rng = np.random.default_rng(7)
    for _ in range(30):
        n, workers, counters = int(rng.integers(2, 90)), int(rng.integers(1, 6)), int(rng.integers(1, 40))
        owner = rng.integers(0, workers, n)
        queues = [np.flatnonzero(owner == w) for w in range(workers)]
        # Posts from the first part of the order, waits in the last: no cycle is possible.
        cut = rng.integers(1, n, counters)
        post = [(int(rng.integers(0, c)), k) for k, c in enumerate(cut) for _ in range(2)]
        wait = [(int(rng.integers(c, n)), k) for k, c in enumerate(cut)]
        post_row, post_counter = np.array(sorted(set(post))).T
        wait_row, wait_counter = np.array(wait).T
        totals = np.bincount(post_counter, minlength=counters)
        syncs = Syncs(
            Csr.build(n, wait_row, wait_counter, totals[wait_counter]),
            Csr.build(n, post_row, post_counter, np.ones(len(post_row), dtype=np.int64)),
            counters,
        )
        graph = graph_of(*((f"t{i}", "", "x") for i in range(n)))
        base = plan(graph, range(n), workers=1)
        lines = tuple(queues) if mode is Mode.STATIC else (np.arange(n),)
        schedule = dataclasses.replace(base, queues=lines, mode=mode, syncs=syncs)
        position = np.array([int(np.flatnonzero(queues[owner[i]] == i)[0]) for i in range(n)])
        first, second = np.divmod(np.arange(n * n), n)
        keep = first != second
        first, second = first[keep], second[keep]
        loose = unordered_pairs(schedule, Places(owner, position), np.arange(n), first, second)
        expected = np.flatnonzero(~reachable(schedule, n)[first, second])
        assert np.array_equal(loose, expected)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_hundred_thousand_tasks_whose_overwrites_nobody_waits_for_directly_take_seconds(mode):
    # A long pipeline through 500 buffers: each write must come after the readers of 500 tasks ago, which only the chain
    # of reads orders. One core, far below the ten seconds promised.
    n, slots = 100_000, 500
    graph_start = np.arange(n + 1, dtype=np.int64) * 2
    tile = np.stack(((np.arange(n) - 1) % slots, np.arange(n) % slots), axis=1).reshape(-1)
    base = plan(graph_of(("a", "", "x")), [0])
    program = dataclasses.replace(
        base.program,
        ids=tuple(range(n)),
        start=graph_start,
        tile=tile,
        is_write=np.tile([False, True], n),
        num_tiles=slots,
        tile_name=lambda k: k,
    )
    later = np.arange(1, n, dtype=np.int64)
    ones = np.ones(n - 1, dtype=np.int64)
    syncs = Syncs(Csr.build(n, later, later - 1, ones), Csr.build(n, later - 1, later - 1, ones), n - 1)
    lines = tuple(np.arange(w, n, 132) for w in range(132)) if mode is Mode.STATIC else (np.arange(n),)
    schedule = Schedule(program, lines, mode, 132, syncs, np.arange(slots))
    began = time.process_time()
    assert verify(schedule).num_pairs > 2 * n
    assert time.process_time() - began < 10


@pytest.mark.parametrize("mode", list(Mode))
def test_a_barrier_that_posts_to_thousands_of_counters_takes_memory_in_proportion(mode):
    # 4,000 readers, one task after all of them, and 4,000 writers after that one, each with a counter of its own.
    n = 4000
    tasks = [{"id": i, "reads": [i]} for i in range(n)] + [{"id": n, "after": list(range(n))}]
    tasks += [{"id": n + 1 + i, "writes": [n - 1 - i], "after": [n]} for i in range(n)]
    queues = [list(range(w, 2 * n + 1, 13)) for w in range(13)] if mode is Mode.STATIC else [list(range(2 * n + 1))]
    document = {"tasks": tasks, "workers": queues, "co_resident": 13, "mode": mode.value}
    schedule = parse_schedule(json.dumps(document).encode())
    tracemalloc.start()
    try:
        assert verify(schedule).num_pairs == 3 * n
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()


def document_of(*tasks: dict[str, object], workers: list[list[str]], **more: object) -> bytes:
    return json.dumps({"tasks": tasks, "workers": workers, "co_resident": len(workers)} | more).encode()


@pytest.mark.parametrize("key", ["waits", "posts"])
def test_counters_that_are_all_gone_are_no_counters_left_out(key):
    tasks = {"id": "w", "writes": ["x"]}, {"id": "r", "reads": ["x"]}
    assert verify(parse_schedule(document_of(*tasks, workers=[["w"], ["r"]]))).schedule.syncs.waits.first.size == 1
    emptied = document_of(*({**task, key: []} for task in tasks), workers=[["w"], ["r"]])
    assert rejection(parse_schedule(emptied)).kind == "race"


def test_a_ring_takes_no_tile_out_of_its_buffer():
    tasks = {"id": "f", "writes": ["t"]}, {"id": "g", "writes": ["u"]}, {"id": "d", "reads": ["t"]}
    shared = {"workers": [["f", "d"], ["g"]], "buffers": {"B": ["t", "u"]}}
    assert rejection(parse_schedule(document_of(*tasks, **shared))).kind == "race"
    ring = {"name": "R", "slots": 1, "fills": ["f"], "releases": ["d"]}
    with pytest.raises(InvalidArgumentError, match=r"buffer B: t; allowed: tiles that no ring's fill writes"):
        parse_schedule(document_of(*tasks, **shared, rings=[ring]))
