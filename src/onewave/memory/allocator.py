"""A pooled allocator: large pieces of raw memory, cut into blocks that are used again and again.

Requests of up to SMALL_LIMIT bytes and larger ones have a pool each, so that a small block never holds a large piece
open. A request takes the smallest free block that holds it and splits it, unless so little would be left that it is
kept as slack. A freed block merges with free neighbours and may be used again at once: its owner frees it once the
device is past its last use. Pieces of small blocks that lie idle beyond a threshold go back; other idle pieces go back
when memory runs short, or with `trim`.

Nothing here touches the memory itself, or imports torch. One allocator a device; threads may share it.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from dataclasses import dataclass

from onewave.base.errors import CapacityError, InvalidArgumentError, shown
from onewave.memory.raw import RawMemory

ALIGNMENT = 256
"""Bytes. Addresses and sizes of blocks are multiples: what TMA and vector loads ask of an operand."""
SMALL_LIMIT = 1 << 20
"""Largest request of the small pool, in bytes."""
MAX_SLACK = 1 << 20
"""Bytes, and an eighth of the request: what a block may be larger than its request without being split."""
PIECE_BYTES = 2 << 20
"""Raw memory is reserved in multiples. Of the small pool a piece is as large as this."""
BIG_PIECE_BYTES = 16 << 20
"""A piece for requests of up to half of this, so that several share it."""
IDLE_SMALL_BYTES = 16 << 20
"""Idle pieces of the small pool beyond this go back. Less costs more raw calls, more keeps memory from others."""


@dataclass(frozen=True)
class Statistics:
    """The statistics of one allocator.

    requested: bytes that callers asked for; used: of their blocks; reserved: of raw memory.
    peak_*: the most so far. num_reserves, num_releases: raw calls. largest_free_bytes: of one free block.
    """

    requested_bytes: int = 0
    used_bytes: int = 0
    reserved_bytes: int = 0
    peak_used_bytes: int = 0
    peak_reserved_bytes: int = 0
    num_allocations: int = 0
    num_frees: int = 0
    num_reserves: int = 0
    num_releases: int = 0
    largest_free_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        """Reserved, and in no block that is used."""
        return self.reserved_bytes - self.used_bytes

    @property
    def fragmentation(self) -> float:
        """Share of the free bytes that lie outside the largest free block."""
        return 1 - self.largest_free_bytes / self.free_bytes if self.free_bytes else 0.0


class _Block:
    """Consecutive bytes of a piece. requested: what a caller asked for; None while it is free."""

    __slots__ = ("address", "next", "pool", "previous", "requested", "size")

    def __init__(self, address: int, size: int, pool: _Pool) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.requested: int | None = None
        self.previous: _Block | None = None
        self.next: _Block | None = None

    @property
    def is_piece(self) -> bool:
        return self.previous is None and self.next is None


class _Pool:
    """Free blocks, by size and then address. idle_bytes: of those that are whole pieces."""

    def __init__(self) -> None:
        self.blocks: dict[int, _Block] = {}
        self.order: list[tuple[int, int]] = []
        self.idle_bytes = 0

    def add(self, block: _Block) -> None:
        self.blocks[block.address] = block
        insort(self.order, (block.size, block.address))
        if block.is_piece:
            self.idle_bytes += block.size

    def remove(self, block: _Block) -> None:
        del self.blocks[block.address]
        del self.order[bisect_left(self.order, (block.size, block.address))]
        if block.is_piece:
            self.idle_bytes -= block.size

    def best_fit(self, size: int) -> _Block | None:
        """The smallest block of at least `size` bytes, the lowest of equals."""
        at = bisect_left(self.order, (size, 0))
        return self.blocks[self.order[at][1]] if at < len(self.order) else None


class Allocator:
    """Blocks of one device's memory, by address. idle_small_bytes: see IDLE_SMALL_BYTES."""

    def __init__(self, raw: RawMemory, *, idle_small_bytes: int = IDLE_SMALL_BYTES) -> None:
        self.raw, self._idle_small_bytes = raw, idle_small_bytes
        self._small, self._big = _Pool(), _Pool()
        self._used: dict[int, _Block] = {}
        self._pieces: dict[int, int] = {}
        self._requested = self._used_bytes = self._reserved = self._peak_used = self._peak_reserved = 0
        self._allocations = self._frees = self._reserves = self._releases = 0
        self._lock = threading.Lock()

    def allocate(self, num_bytes: int) -> int:
        """Return the address of at least num_bytes, aligned to ALIGNMENT; 0 bytes have an address of their own, too.

        Raises InvalidArgumentError for a negative size, CapacityError.
        """
        if num_bytes < 0:
            raise InvalidArgumentError("allocate", got=shown(num_bytes), allowed="0 bytes or more")
        size = max(1, -(-num_bytes // ALIGNMENT)) * ALIGNMENT
        with self._lock:
            pool = self._small if size <= SMALL_LIMIT else self._big
            block = pool.best_fit(size) or self._reserve(size, pool)
            pool.remove(block)
            if block.size - size > min(size // 8, MAX_SLACK):
                self._split(block, size)
            block.requested = num_bytes
            self._used[block.address] = block
            self._requested += num_bytes
            self._used_bytes += block.size
            self._peak_used = max(self._peak_used, self._used_bytes)
            self._allocations += 1
            return block.address

    def free(self, address: int) -> None:
        """Mark a block as free for the next request. Raises InvalidArgumentError for an address that `allocate` did not
        return, or that was freed already."""
        with self._lock:
            block = self._used.pop(address, None)
            if block is None:
                self._refuse(address)
            assert block is not None
            assert block.requested is not None
            self._requested -= block.requested
            self._used_bytes -= block.size
            self._frees += 1
            block.requested = None
            block = self._merged(block)
            block.pool.add(block)
            if block.is_piece and block.pool is self._small and self._small.idle_bytes > self._idle_small_bytes:
                self._release(block)

    def trim(self) -> int:
        """Hand back every idle piece. Returns how many bytes."""
        with self._lock:
            return self._trim()

    def statistics(self) -> Statistics:
        """Return the present and past use of memory."""
        with self._lock:
            largest = max((pool.order[-1][0] for pool in (self._small, self._big) if pool.order), default=0)
            return Statistics(
                requested_bytes=self._requested,
                used_bytes=self._used_bytes,
                reserved_bytes=self._reserved,
                peak_used_bytes=self._peak_used,
                peak_reserved_bytes=self._peak_reserved,
                num_allocations=self._allocations,
                num_frees=self._frees,
                num_reserves=self._reserves,
                num_releases=self._releases,
                largest_free_bytes=largest,
            )

    def _reserve(self, size: int, pool: _Pool) -> _Block:
        """A free block that is a new piece. Where there is no memory, idle pieces go back first."""
        least = -(-size // PIECE_BYTES) * PIECE_BYTES
        wanted = BIG_PIECE_BYTES if pool is self._big and size <= BIG_PIECE_BYTES // 2 else least
        for attempt in dict.fromkeys((wanted, least)):
            for _ in range(2):
                try:
                    address = self.raw.reserve(attempt)
                except MemoryError:
                    if not self._trim():
                        break
                    continue
                self._reserves += 1
                self._reserved += attempt
                self._peak_reserved = max(self._peak_reserved, self._reserved)
                self._pieces[address] = attempt
                block = _Block(address, attempt, pool)
                pool.add(block)
                return block
        raise CapacityError(
            f"memory of {self.raw.name}",
            got=f"no {size} bytes beside {self._used_bytes} in use",
            next="Lower max_model_len, max_num_seqs or max_num_batched_tokens.",
        )

    def _split(self, block: _Block, size: int) -> None:
        """Have the block keep its first `size` bytes; the others are a free block."""
        rest = _Block(block.address + size, block.size - size, block.pool)
        rest.previous, rest.next = block, block.next
        if rest.next is not None:
            rest.next.previous = rest
        block.next, block.size = rest, size
        block.pool.add(rest)

    def _merged(self, block: _Block) -> _Block:
        """One block in the place of this and its free neighbours, in no list yet."""
        after, before = block.next, block.previous
        if after is not None and after.requested is None:
            block.pool.remove(after)
            self._absorb(block, after)
        if before is not None and before.requested is None:
            block.pool.remove(before)
            self._absorb(before, block)
            return before
        return block

    @staticmethod
    def _absorb(block: _Block, after: _Block) -> None:
        block.size += after.size
        block.next = after.next
        if block.next is not None:
            block.next.previous = block

    def _trim(self) -> int:
        idle = [block for pool in (self._small, self._big) for block in pool.blocks.values() if block.is_piece]
        for block in idle:
            self._release(block)
        return sum(block.size for block in idle)

    def _release(self, block: _Block) -> None:
        block.pool.remove(block)
        del self._pieces[block.address]
        self._reserved -= block.size
        self._releases += 1
        self.raw.release(block.address)

    def _refuse(self, address: int) -> None:
        ours = any(begin <= address < begin + size for begin, size in self._pieces.items())
        why = "freed already, or within a block" if ours else "unknown"
        raise InvalidArgumentError(
            f"free on {self.raw.name}", got=f"{address:#x} ({why})", allowed="what allocate returned, once"
        )
