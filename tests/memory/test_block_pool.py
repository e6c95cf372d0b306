"""The block pool alone: against a model that is too simple to be wrong, and its rate."""

import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kit.serving.blocks import check_pool, is_shared, references
from onewave.base.errors import InvalidArgumentError
from onewave.memory.block_pool import (
    AllBlocksCleared,
    BlockEvent,
    BlockPool,
    BlockRemoved,
    BlockStored,
    next_key,
    root_key,
)

BLOCKS, SIZE = 7, 2
ROOT = root_key(model="m", weight_format="bf16")


class Machine(RuleBasedStateMachine):
    """Sequences of one-token keys that take, share, seal and release blocks; beside them a model of which holds what,
    of what is known, and of the order in which cached blocks were released. What the events say is compared too."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[bytes, int] = {}
        self.pool = BlockPool(BLOCKS, SIZE, listener=self.hear)
        self.held: list[list[int]] = []
        self.known: dict[bytes, int] = {}
        self.released: list[int] = []

    def hear(self, event: BlockEvent) -> None:
        if isinstance(event, BlockStored):
            assert event.key not in self.told
            self.told[event.key] = event.token_ids[0]
        elif isinstance(event, BlockRemoved):
            del self.told[event.key]
        else:
            self.told.clear()

    def count(self, block: int) -> int:
        return sum(blocks.count(block) for blocks in self.held)

    @rule(count=st.integers(0, BLOCKS))
    def take(self, count: int) -> None:
        free = {block for block in range(BLOCKS) if self.count(block) == 0}
        cached = [block for block in self.released if block in free and block in self.known.values()]
        taken = self.pool.take(count)
        if count > len(free):
            assert taken is None
            return
        assert len(set(taken)) == count
        assert set(taken) <= free
        evicted = cached[: max(0, count - (len(free) - len(cached)))]
        assert {block for block in taken if block in cached} == set(evicted)
        self.known = {key: block for key, block in self.known.items() if block not in evicted}
        self.held.append(taken)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.known:
            keys = data.draw(st.lists(st.sampled_from(sorted(self.known)), unique=True, max_size=3))
            found = self.pool.find(keys)
            assert found == [self.known[key] for key in keys]
            self.pool.share(found)
            self.held.append(found)

    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        open_blocks = sorted({b for blocks in self.held for b in blocks if b not in self.known.values()})
        if open_blocks:
            block = data.draw(st.sampled_from(open_blocks))
            number = data.draw(st.integers(0, 3))
            key = next_key(ROOT, [number])
            self.pool.seal(block, key, parent=None, token_ids=[block])
            self.known.setdefault(key, block)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.pool.release(blocks)
            for block in reversed(blocks):
                if self.count(block) == 0:
                    self.released = [other for other in self.released if other != block] + [block]

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        self.known.clear()

    @invariant()
    def agrees(self) -> None:
        check_pool(self.pool)
        assert self.told == self.known
        for block in range(BLOCKS):
            assert references(self.pool, block) == self.count(block)
            assert is_shared(self.pool, block) == (self.count(block) > 1 or block in self.known.values())
        assert self.pool.num_free == sum(self.count(block) == 0 for block in range(BLOCKS))


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestPool = Machine.TestCase


def test_keys_depend_on_every_token_before_them_and_on_each_field_of_the_root() -> None:
    roots = [
        root_key(model=model, weight_format=weights, kv_dtype=kv_dtype, cache_salt=salt)
        for model, weights, kv_dtype, salt in [
            ("ab", "c", "", ""), ("a", "bc", "", ""), ("a", "b", "", "c"), ("a", "b", "c", ""), ("a", "", "", "bc"),
            ("", "abc", "", ""), ("abc", "", "", ""), ("", "", "", "abc"), ("", "", "abc", ""),
        ]
    ]  # fmt: skip
    chains = [next_key(next_key(root, [1, 2]), [3, 4]) for root in roots]
    chains += [next_key(next_key(roots[0], first), [3, 4]) for first in ([2, 1], [1], [1, 2, 3], [258])]
    assert len(set(chains)) == len(chains)
    assert next_key(next_key(root_key(model="ab", weight_format="c"), (1, 2)), (3, 4)) == chains[0]


def test_events_name_the_parent_and_the_tokens() -> None:
    events: list[BlockEvent] = []
    pool = BlockPool(1, SIZE, listener=events.append)
    blocks = pool.take(1)
    key = next_key(ROOT, [5, 6])
    pool.seal(blocks[0], key, parent=None, token_ids=[5, 6])
    pool.release(blocks)
    pool.take(1)
    pool.clear()
    assert events == [BlockStored(key, None, (5, 6), SIZE), BlockRemoved(key), AllBlocksCleared()]


@pytest.mark.parametrize(("sizes", "named"), [((0, 1), "num_blocks: 0"), ((1, 0), "block_size: 0")])
def test_a_pool_of_nothing_is_refused(sizes: tuple[int, int], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{named}; allowed: a whole number from 1"):
        BlockPool(*sizes)


def test_an_operation_on_a_large_pool_costs_what_it_costs_on_a_small_one() -> None:
    """3.5 million operations a second were counted, and 1.1 million one block at a time; here only that none grows."""
    rates = [max(operations_per_second(size) for _ in range(3)) for size in (64, 64_000)]
    assert rates[1] > rates[0] / 8, rates


def operations_per_second(num_blocks: int, count: int = 64) -> float:
    """Take, seal, share, and release twice, `count` blocks at a time, until all are cached and evicted."""
    pool, keys = BlockPool(num_blocks, SIZE), [number.to_bytes(8, "little") for number in range(40_000)]
    begin, operations = time.process_time(), 0
    for first in range(0, len(keys) - count + 1, count):
        blocks = pool.take(count)
        for block, key in zip(blocks, keys[first : first + count], strict=True):
            pool.seal(block, key, parent=None, token_ids=())
        pool.share(pool.find(keys[first : first + count]))
        pool.release(blocks)
        pool.release(blocks)
        operations += 5 * count
    return operations / (time.process_time() - begin)
