"""An allocator beside a model of it: who owns each 256 bytes.

`python tests/kit/alone/allocator_model.py 10000000` runs so many random calls.
"""

import random
import sys
import time

import numpy as np

from onewave.memory.allocator import ALIGNMENT, PIECE_BYTES, Allocator


class CountedMemory:
    """Raw memory that is only addresses: `room` pieces of PIECE_BYTES, given out lowest first."""

    name = "nowhere"

    def __init__(self, room: int) -> None:
        self.taken = np.zeros(room, dtype=np.bool_)
        self.sizes: dict[int, int] = {}

    def reserve(self, num_bytes: int) -> int:
        assert num_bytes % PIECE_BYTES == 0
        wanted, run = num_bytes // PIECE_BYTES, 0
        for piece, taken in enumerate(self.taken.tolist()):
            run = 0 if taken else run + 1
            if run == wanted:
                begin = piece + 1 - wanted
                self.taken[begin : piece + 1] = True
                self.sizes[(begin + 1) * PIECE_BYTES] = num_bytes
                return (begin + 1) * PIECE_BYTES  # no piece lies at address 0
        raise MemoryError

    def release(self, address: int) -> None:
        begin = address // PIECE_BYTES - 1
        self.taken[begin : begin + self.sizes.pop(address) // PIECE_BYTES] = False


class Model:
    """An allocator whose every block is checked against what others own and what is reserved."""

    def __init__(self, room: int, **settings: int) -> None:
        self.raw = CountedMemory(room)
        self.allocator = Allocator(self.raw, **settings)
        self.owner = np.zeros((room + 1) * PIECE_BYTES // ALIGNMENT, dtype=np.int32)
        self.blocks: dict[int, tuple[int, int]] = {}
        self.count = self.bytes = 0

    def allocate(self, num_bytes: int) -> int:
        address = self.allocator.allocate(num_bytes)
        assert address % ALIGNMENT == 0
        begin, length = address // ALIGNMENT, max(1, -(-num_bytes // ALIGNMENT))
        owned = self.owner[begin : begin + length]
        assert not owned.any(), "a block within another"
        last = (address + max(num_bytes, 1) - 1) // PIECE_BYTES - 1
        assert self.raw.taken[address // PIECE_BYTES - 1 : last + 1].all(), "a block outside of what is reserved"
        self.count += 1
        self.bytes += num_bytes
        owned[:] = self.count
        self.blocks[address] = (num_bytes, self.count)
        return address

    def free(self, address: int) -> None:
        num_bytes, number = self.blocks.pop(address)
        begin, length = address // ALIGNMENT, max(1, -(-num_bytes // ALIGNMENT))
        owned = self.owner[begin : begin + length]
        assert (owned == number).all(), "a block that another one took"
        owned[:] = 0
        self.bytes -= num_bytes
        self.allocator.free(address)

    def check(self) -> None:
        found = self.allocator.statistics()
        assert found.requested_bytes == self.bytes
        assert found.num_allocations - found.num_frees == len(self.blocks)
        assert found.reserved_bytes == int(self.raw.taken.sum()) * PIECE_BYTES
        check_blocks(self.allocator)


def check_blocks(allocator: Allocator) -> None:
    """Assert that blocks fill their pieces without a gap, and that every list and sum agrees with them."""
    with allocator._lock:
        blocks = {**allocator._small.blocks, **allocator._big.blocks, **allocator._used}
        assert len(blocks) == len(allocator._small.blocks) + len(allocator._big.blocks) + len(allocator._used)
        left = set(blocks)
        for begin, size in allocator._pieces.items():
            block, at, before = blocks.get(begin), begin, None
            while block is not None:
                left.remove(block.address)
                assert (block.address, block.previous, block.size % ALIGNMENT) == (at, before, 0)
                is_free = block.requested is None
                assert is_free == (block.address in block.pool.blocks) == (block.address not in allocator._used)
                assert before is None or not is_free or before.requested is not None, "free neighbours"
                before, at, block = block, at + block.size, block.next
            assert at == begin + size
        assert not left
        for pool in (allocator._small, allocator._big):
            assert pool.order == sorted((block.size, block.address) for block in pool.blocks.values())
            assert pool.idle_bytes == sum(block.size for block in pool.blocks.values() if block.is_piece)
        assert allocator._reserved == sum(allocator._pieces.values())
        assert allocator._used_bytes == sum(block.size for block in allocator._used.values())
        assert allocator._requested == sum(block.requested or 0 for block in allocator._used.values())


def run_random(calls: int, *, seed: int = 0, most_live: int = 400) -> Model:
    """Allocate and free at random, sizes from one byte to 8 MiB in equal shares of each power of two."""
    draw = random.Random(seed)
    model, live = Model(2048), []
    for call in range(calls):
        if len(live) < most_live * draw.random() * 2:
            live.append(model.allocate(int(2 ** (draw.random() * 23))))
        elif live:
            at = draw.randrange(len(live))
            live[at], live[-1] = live[-1], live[at]
            model.free(live.pop())
        if call % 100_000 == 0:
            model.check()
    model.check()
    return model


if __name__ == "__main__":
    began = time.perf_counter()
    ran = run_random(int(sys.argv[1]))
    print(f"{time.perf_counter() - began:.0f} s, {ran.allocator.statistics()}")
