"""The scheduler alone: its order, its blocks, and a random run in which nothing may be lost, doubled or starved."""

from array import array
from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.serving.blocks import check_pool, is_shared
from onewave.base.errors import InvalidArgumentError
from onewave.engine.scheduler.scheduler import Scheduler
from onewave.engine.scheduler.sequence import PassLimits, Scheduled, StepPlan
from onewave.memory import block_pool
from onewave.memory.block_pool import BlockPool

SIZE = 4


def scheduler(
    *, slots: int = 2, blocks: int = 100, tokens: int = 64, prompts: int = 4, reuse: bool = True, whole: bool = False
) -> Scheduler:
    return Scheduler(slots, BlockPool(blocks, SIZE), PassLimits(tokens, prompts, whole), reuse=reuse)


def of(owner: str, length: int, limit: int = 4, **given: object) -> Scheduled:
    """A prompt of its own, or with `base` of that."""
    base = given.pop("base", sum(map(ord, owner)))
    return Scheduled(owner, [base * 1000 + i for i in range(length)], limit, **given)


def step(made: Scheduler) -> StepPlan:
    plan = made.plan()
    made.ran(plan)
    for row in [*plan.rows, *(each for each, _ in plan.chunks)]:
        if row.launched >= row.limit:
            made.remove(row.owner)
    check_pool(made.pool)
    return plan


def shape(plan: StepPlan) -> object:
    """Owners and tokens of a pass, or owners of rows."""
    return [(each.owner, tokens) for each, tokens in plan.chunks] or [row.owner for row in plan.rows]


def test_zero_slots_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="num_slots: 0; allowed: a whole number from 1"):
        scheduler(slots=0)


def test_sequences_start_in_turn_in_the_lowest_free_slot_and_the_lowest_priority_goes_first() -> None:
    made = scheduler()
    for owner, priority in zip("abcd", (1, 1, 0, 1), strict=True):
        made.add(of(owner, 3, 1, priority=priority))
    first, second = step(made), step(made)
    assert [shape(first), shape(second)] == [[("c", 3), ("a", 3)], [("b", 3), ("d", 3)]]
    assert [each[0] for each in first.entries] == [0, 1]
    assert not made.has_work


def test_passes_and_decode_steps_take_turns_and_passes_that_rows_wait_for_are_half_as_large() -> None:
    made = scheduler(slots=3, tokens=8)
    made.add(of("a", 3, 9))
    assert shape(step(made)) == [("a", 3)]
    made.add(of("b", 10))
    made.add(of("c", 5))
    found = [shape(step(made)) for _ in range(8)]
    # fmt: off
    assert found == [["a"], [("b", 4)], ["a"], [("b", 4)], ["a"], [("b", 2), ("c", 2)], ["a", "b"], [("c", 3)]]
    # fmt: on


def test_what_is_removed_runs_no_more_and_its_slot_and_blocks_are_free_at_once() -> None:
    made = scheduler(slots=1, blocks=4)
    for owner in "abc":
        made.add(of(owner, 9))
    step(made)
    for owner in ("b", "a", "a", "nobody"):
        made.remove(owner)
    assert (made.num_running, made.num_waiting) == (0, 1)
    assert shape(step(made)) == [("c", 9)]


def test_a_prompt_takes_cached_blocks_and_runs_its_last_token_itself() -> None:
    made = scheduler(slots=4)
    made.add(of("a", 9, 1, base=1))
    step(made)
    cached = [of("longer", 11, base=1), of("shorter", 8, base=1), of("salted", 9, base=1, root=b"salt")]
    for sequence in cached:
        made.add(sequence)
    plan = step(made)
    assert shape(plan) == [("longer", 3), ("shorter", 1), ("salted", 9)]
    assert [each.num_cached for each in cached] == [8, 7, 0]
    longer, shorter, _ = cached
    assert shorter.blocks[0] == longer.blocks[0]
    # The last token's block is another sequence's too: it writes to a copy.
    assert plan.copies == ((longer.blocks[1], shorter.blocks[1]),)


def test_a_prompts_blocks_are_hashed_once_and_those_behind_the_cached_ones_after_the_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed, real = list[int](), block_pool.next_key

    def counted(parent: bytes, token_ids: Sequence[int]) -> bytes:
        hashed.append(token_ids[0])
        return real(parent, token_ids)

    monkeypatch.setattr("onewave.engine.scheduler.scheduler.next_key", counted)
    made = scheduler()
    made.add(of("a", 17, 1, base=0))
    plan = made.plan()
    assert hashed == [0]  # which is not cached
    made.ran(plan)
    assert hashed == [0, 4, 8, 12]
    made.remove("a")
    made.add(Scheduled("b", array("i", range(22)), 1))
    assert [tokens for _, tokens in step(made).chunks] == [6]
    assert hashed[4:] == [0, 4, 8, 12, 16]


def test_a_sequence_whose_tokens_logits_are_wanted_runs_alone_and_takes_nothing_from_the_cache() -> None:
    made = scheduler(slots=3)
    for owner, alone in (("a", False), ("b", True), ("c", False)):
        made.add(of(owner, 8, base=1, alone=alone))
    assert [shape(step(made)) for _ in range(4)] == [[("a", 8)], ["a"], [("b", 8)], ["a", "b"]]


def test_samples_of_a_request_run_its_prompt_once_and_share_what_they_do_not_write() -> None:
    made = scheduler(slots=3, tokens=6, reuse=False)
    samples = [of(f"s{i}", 10, 9, base=1, group="r") for i in range(3)]
    for sample in samples:
        made.add(sample)
    assert [shape(step(made)) for _ in range(2)] == [[("s0", 6)], [("s0", 4)]]
    step(made)
    plan = step(made)
    assert shape(plan) == [("s1", 1), ("s2", 1)]
    first, *others = samples
    for other in others:
        assert other.blocks[:2] == first.blocks[:2]
        assert (first.blocks[2], other.blocks[2]) in plan.copies
    assert len({each.blocks[2] for each in samples}) == 3


def test_the_last_in_turn_is_preempted_and_comes_back_in_its_old_turn() -> None:
    made = scheduler(slots=3, blocks=5)
    made.add(of("a", 7, 9))
    made.add(of("b", 7, 9))
    step(made)
    made.add(of("c", 3, 2))
    found = [step(made) for _ in range(3)]
    # Both rows need a third block and there is one; c, which waits, finds none.
    assert [shape(plan) for plan in found] == [["a", "b"], ["a"], ["a"]]
    assert [each.owner for each in found[1].preempted] == ["b"]
    rest = [shape(step(made)) for _ in range(6)]
    assert rest[5] == [("b", 3), ("c", 3)], rest  # its first block is cached


def test_a_prompt_that_finds_no_blocks_does_not_hold_up_what_has_begun() -> None:
    made = scheduler(blocks=6, tokens=7)
    made.add(of("a", 9, 1, priority=1))
    assert shape(step(made)) == [("a", 7)]
    made.add(of("b", 13, 1))
    assert [shape(step(made)) for _ in range(3)] == [[("a", 2)], [("b", 7)], [("b", 6)]]


def test_prompts_that_are_run_whole_share_nothing() -> None:
    made = scheduler(tokens=4, whole=True)
    for owner in "ab":
        made.add(of(owner, 8, 2, base=1, group="r"))
    assert [shape(step(made)) for _ in range(3)] == [[("a", 8)], ["a"], [("b", 8)]]


requests = st.tuples(
    st.integers(1, 13), st.integers(1, 9), st.integers(0, 1), st.integers(0, 2), st.sampled_from([None, "g"])
)


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 4), requests), min_size=1, max_size=14), st.data())
def test_nothing_is_lost_doubled_or_starved_and_blocks_hold_what_their_sequence_wrote(
    arrivals: list[tuple[int, tuple[int, int, int, int, str | None]]], data: st.DataObject
) -> None:
    made = scheduler(slots=3, blocks=6, tokens=7, prompts=2)
    coming, numbers = list(arrivals), count()
    written: dict[int, list[object]] = {}  # a block's tokens, and which sequence generated those that are no prompt's
    live: dict[str, Scheduled] = {}
    launched: dict[str, int] = {}
    idle = 0
    while coming or made.has_work:
        while coming and (coming[0][0] == 0 or not made.has_work):
            length, limit, priority, base, group = coming.pop(0)[1]
            owner = f"r{next(numbers)}"
            group = None if group is None else (base, length)
            live[owner] = of(owner, length, limit, priority=priority, base=base, group=group)
            made.add(live[owner])
        coming = [(max(0, wait - 1), request) for wait, request in coming]
        plan = made.plan()
        idle = 0 if plan.chunks or plan.rows else idle + 1
        assert idle == 0, "a step without work"
        assert not (plan.chunks and plan.rows)
        assert sum(tokens for _, tokens in plan.chunks) <= 7
        for source, target in plan.copies:
            written[target] = list(written[source])
        for slot, at, block in plan.entries:
            assert live_in(made, slot).blocks[at] == block
        for sequence, tokens in plan.chunks:
            write(made, written, sequence, sequence.done, tokens)
        for row in plan.rows:
            write(made, written, row, len(row.prompt) + row.launched - 1, 1)
        made.ran(plan)
        for row in plan.rows:
            launched[str(row.owner)] = max(launched.get(str(row.owner), 1), row.launched)
        for each in [*plan.rows, *(each for each, _ in plan.chunks)]:
            if each.launched >= each.limit:
                made.remove(each.owner)
                del live[str(each.owner)]
        if live and data.draw(st.integers(0, 9)) == 0:
            made.remove(victim := data.draw(st.sampled_from(sorted(live))))
            del live[victim]
        check_pool(made.pool)
    assert not live
    assert made.pool.num_free == made.pool.num_blocks


def live_in(made: Scheduler, slot: int) -> Scheduled:
    return next(each for each in made.running if each.slot == slot)


def write(made: Scheduler, written: dict[int, list[object]], sequence: Scheduled, begin: int, tokens: int) -> None:
    """Write as a pass or a step does, and check that all before it is there."""
    for position in range(begin + tokens):
        block, at = sequence.blocks[position // SIZE], position % SIZE
        prompt = position < len(sequence.prompt)
        token: object = sequence.prompt[position] if prompt else (sequence.owner, position)
        held = written.setdefault(block, [None] * SIZE)
        if position < begin:
            assert held[at] == token
        else:
            assert not is_shared(made.pool, block), "a write to a block that others read"
            held[at] = token
