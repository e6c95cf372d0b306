"""The scheduler alone, as a model-based machine."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onewave.base.errors import InvalidArgumentError
from onewave.engine.scheduler import Scheduler


def test_zero_slots_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="num_slots: 0; allowed: a whole number from 1"):
        Scheduler(0)


def test_items_start_in_the_order_they_came_in_the_lowest_free_slot() -> None:
    scheduler: Scheduler[str] = Scheduler(2)
    for item in "abcd":
        scheduler.add(item)
    assert [scheduler.admit(), scheduler.admit(), scheduler.admit()] == [(0, "a"), (1, "b"), None]
    assert scheduler.remove("a") == 0
    assert scheduler.admit() == (0, "c")
    assert scheduler.waiting == ("d",)
    assert dict(scheduler.running) == {1: "b", 0: "c"}


def test_removing_a_waiting_item_takes_no_slot_and_removing_twice_is_harmless() -> None:
    scheduler: Scheduler[str] = Scheduler(1)
    scheduler.add("a")
    scheduler.add("b")
    scheduler.admit()
    assert scheduler.remove("b") is None
    assert scheduler.remove("a") == 0
    assert scheduler.remove("a") is None
    assert not scheduler.has_work


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from(["add", "admit", "finish", "abort"]), st.integers(0, 9))))
def test_no_slot_leaks_order_is_kept_and_nobody_starves(num_slots: int, actions: list[tuple[str, int]]) -> None:
    scheduler: Scheduler[int] = Scheduler(num_slots)
    queue: list[int] = []
    running: dict[int, int] = {}
    count = 0
    for action, choice in actions:
        if action == "add":
            scheduler.add(count)
            queue.append(count)
            count += 1
        elif action == "admit":
            admitted = scheduler.admit()
            if queue and len(running) < num_slots:
                slot = min(set(range(num_slots)) - running.keys())
                assert admitted == (slot, queue[0])
                running[slot] = queue.pop(0)
            else:
                assert admitted is None
        elif action == "finish" and running:
            slot = sorted(running)[choice % len(running)]
            assert scheduler.remove(running.pop(slot)) == slot
        elif action == "abort" and queue:
            assert scheduler.remove(queue.pop(choice % len(queue))) is None
        assert dict(scheduler.running) == running
        assert scheduler.waiting == tuple(queue)
        assert scheduler.has_work == bool(queue or running)
    # Whatever happened, everything left gets its turn, in order, when the running ones end.
    started: list[int] = []
    left = list(queue)
    while scheduler.has_work:
        while (admitted := scheduler.admit()) is not None:
            started.append(admitted[1])
        scheduler.remove(next(iter(scheduler.running.values())))
    assert started == left
    assert sorted(slot for slot, _ in (scheduler.add(i) or scheduler.admit() or (-1, 0) for i in range(num_slots))) == (
        list(range(num_slots))
    )
