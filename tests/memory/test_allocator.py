"""The pooled allocator beside a model, and what it promises one by one."""

import ctypes
import re

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kit.alone.allocator_model import CountedMemory, Model, check_blocks, run_random
from onewave.base.errors import CapacityError, InvalidArgumentError
from onewave.memory.allocator import (
    ALIGNMENT,
    BIG_PIECE_BYTES,
    PIECE_BYTES,
    SMALL_LIMIT,
    Allocator,
)
from onewave.memory.raw import MappedMemory

EDGES = [SMALL_LIMIT, SMALL_LIMIT + 1, 9 << 20]
SIZES = st.one_of(
    st.integers(0, 4 * ALIGNMENT),
    st.integers(0, 2 * SMALL_LIMIT),
    st.sampled_from(EDGES),
)


class AllocatorMachine(RuleBasedStateMachine):
    """Blocks come and go; after each call everything is where the model has it. Memory is short on purpose."""

    blocks = Bundle("blocks")

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(16, idle_small_bytes=PIECE_BYTES)

    @rule(target=blocks, num_bytes=SIZES)
    def allocate(self, num_bytes):
        try:
            return self.model.allocate(num_bytes)
        except CapacityError:
            # Only where no run of free pieces would do.
            with pytest.raises(MemoryError):
                self.model.raw.reserve(-(-max(num_bytes, 1) // PIECE_BYTES) * PIECE_BYTES)
            return None

    @rule(address=consumes(blocks))
    def free(self, address):
        if address is not None:
            self.model.free(address)
            with pytest.raises(InvalidArgumentError):
                self.model.allocator.free(address)

    @rule()
    def trim(self):
        self.model.allocator.trim()
        if not self.model.blocks:
            assert not self.model.raw.taken.any()

    @invariant()
    def everything_agrees(self):
        self.model.check()


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=40, stateful_step_count=40)


@pytest.mark.parametrize("calls", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_random_calls_agree_with_the_model(calls):
    run_random(calls)


def test_small_and_big_requests_never_share_a_piece():
    allocator = Allocator(CountedMemory(64))
    small, big = allocator.allocate(SMALL_LIMIT), allocator.allocate(SMALL_LIMIT + 1)
    assert allocator.statistics().reserved_bytes == PIECE_BYTES + BIG_PIECE_BYTES
    assert abs(small - big) >= PIECE_BYTES


def test_a_request_takes_the_smallest_block_that_holds_it():
    allocator = Allocator(CountedMemory(64))
    wide, _, narrow, _ = (allocator.allocate(size) for size in (4096, 256, 2048, 256))
    allocator.free(wide)
    allocator.free(narrow)
    assert allocator.allocate(2048) == narrow


@pytest.mark.parametrize(("size", "used"), [(9 << 20, 10 << 20), (8 << 20, 8 << 20)])
def test_a_block_is_used_whole_only_where_little_is_left(size, used):
    allocator = Allocator(CountedMemory(64))
    block = allocator.allocate(10 << 20)  # a whole piece
    allocator.free(block)
    assert allocator.allocate(size) == block
    assert allocator.statistics().used_bytes == used


def test_freed_neighbours_are_one_block_again():
    allocator = Allocator(CountedMemory(64))
    blocks = [allocator.allocate(PIECE_BYTES // 4) for _ in range(4)]
    for block in (blocks[1], blocks[3], blocks[2]):
        allocator.free(block)
    assert allocator.statistics().largest_free_bytes == 3 * PIECE_BYTES // 4
    assert allocator.allocate(SMALL_LIMIT) == blocks[1]
    assert allocator.statistics().num_reserves == 1


def test_idle_small_pieces_beyond_the_threshold_go_back_and_big_ones_when_memory_is_short():
    allocator = Allocator(CountedMemory(16), idle_small_bytes=PIECE_BYTES)
    for block in [allocator.allocate(SMALL_LIMIT) for _ in range(8)]:
        allocator.free(block)
    assert allocator.statistics().reserved_bytes == PIECE_BYTES
    allocator.free(allocator.allocate(20 << 20))
    assert allocator.statistics().reserved_bytes == PIECE_BYTES + (20 << 20)
    allocator.allocate(30 << 20)
    assert allocator.statistics().reserved_bytes == 30 << 20


def test_what_was_not_handed_out_or_is_freed_twice_is_refused():
    allocator = Allocator(CountedMemory(4))
    address, beside = allocator.allocate(1000), allocator.allocate(1000)
    allocator.free(address)
    for wrong, why in ((address, "freed already"), (beside + ALIGNMENT, "within a block"), (12345, "unknown")):
        with pytest.raises(InvalidArgumentError, match=re.escape(hex(wrong)) + f".*{why}"):
            allocator.free(wrong)
    with pytest.raises(InvalidArgumentError, match="-1"):
        allocator.allocate(-1)
    check_blocks(allocator)


def test_mapped_memory_is_memory_and_an_impossible_size_is_a_capacity_error():
    allocator = Allocator(MappedMemory())
    blocks = [allocator.allocate(size) for size in (100, 3 << 20)]
    for block, size in zip(blocks, (100, 3 << 20), strict=True):
        ctypes.memset(block, block % 251, size)
    assert ctypes.string_at(blocks[0], 100) == bytes([blocks[0] % 251]) * 100
    for size in (1 << 60, 1 << 70):
        with pytest.raises(CapacityError, match="memory of cpu"):
            allocator.allocate(size)
    for block in blocks:
        allocator.free(block)
    assert allocator.trim() == PIECE_BYTES + BIG_PIECE_BYTES
