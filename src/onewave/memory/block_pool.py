"""Which KV blocks are free, shared or cached: numbers only, no torch.

A block is in one of three states:

in use   one or more sequences hold it; `references` counts them
cached   no sequence holds it, but its key is known: the next one with that prefix takes it back
fresh    no sequence holds it, and its content is void

`take` prefers fresh blocks and then evicts the cached one that was released longest ago. A full block gets its key by
`seal`. The key is a chained hash of all tokens up to the block's end, so one lookup decides whether a whole prefix is
the same. A block that others hold, or that is sealed, is copied before it is written.
Every operation takes constant time a block. Results depend on the calls alone.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from onewave.base.errors import InvalidArgumentError, shown

_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block got its key: vLLM's event. token_ids: those in the block. parent: the key of the block before it, None
    for a prompt's first one."""

    key: bytes
    parent: bytes | None
    token_ids: tuple[int, ...]
    block_size: int


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A cached block was evicted."""

    key: bytes


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Every key was forgotten."""


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared


@lru_cache
def root_key(*, model: str, weight_format: str, kv_dtype: str = "", cache_salt: str = "") -> bytes:
    """Return what a prefix's first key is chained to. The fields are kept apart: none can pass for another."""
    digest = blake2b(digest_size=_KEY_BYTES)
    for field in (model, weight_format, kv_dtype, cache_salt):
        text = field.encode("utf-8", "surrogatepass")
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.digest()


def next_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of a full block. parent: the key of the block before it, or the root's. token_ids: an array of
    int32 is hashed as it lies in memory."""
    words = token_ids if isinstance(token_ids, array) else array("i", token_ids)
    return blake2b(parent + words, digest_size=_KEY_BYTES).digest()


@dataclass(frozen=True)
class PrefixCaching:
    """How prompts use what others have left in the cache. model, weight_format, kv_dtype: part of every block's key.
    listener: is told what is stored and removed, in the calling thread."""

    enabled: bool = True
    model: str = ""
    weight_format: str = ""
    kv_dtype: str = ""
    listener: Callable[[BlockEvent], object] | None = None

    def root_key(self, cache_salt: str) -> bytes:
        """Return the key that a prefix's first key is chained to."""
        return root_key(
            model=self.model, weight_format=self.weight_format, kv_dtype=self.kv_dtype, cache_salt=cache_salt
        )


class BlockPool:
    """Blocks 0 to num_blocks - 1.

    listener: called with every event, in the calling thread.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, listener: Callable[[BlockEvent], object] | None = None
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise InvalidArgumentError(name, got=shown(value), allowed="a whole number from 1")
        self.num_blocks, self.block_size, self.listener = num_blocks, block_size, listener
        self._references = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        # The last is taken first: low numbers, and blocks that were used lately.
        self._fresh = list(range(num_blocks - 1, -1, -1))
        # The first is evicted first.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that `take` can give: fresh and cached ones."""
        return len(self._fresh) + len(self._cached)

    def take(self, count: int) -> list[int] | None:
        """Return free blocks, held once from now on. Where there are too few: None, and nothing changes."""
        fresh, cached, references = self._fresh, self._cached, self._references
        if count > len(fresh) + len(cached):
            return None
        split = max(0, len(fresh) - count)
        taken = fresh[split:]
        del fresh[split:]
        taken.reverse()
        while len(taken) < count:
            block, _ = cached.popitem(last=False)
            self._forget(block)
            taken.append(block)
        for block in taken:
            references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks once more each; each is in use or cached."""
        references, cached = self._references, self._cached
        for block in blocks:
            if references[block] == 0:
                del cached[block]
            references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks, in its order: its last block is evicted first, as a prefix outlives what
        follows it."""
        references, keys, cached, fresh = self._references, self._keys, self._cached, self._fresh
        for block in reversed(blocks):
            left = references[block] - 1
            assert left >= 0, "released twice"
            references[block] = left
            if left == 0:
                if keys[block] is None:
                    fresh.append(block)
                else:
                    cached[block] = None

    def seal(self, block: int, key: bytes, *, parent: bytes | None, token_ids: Sequence[int]) -> None:
        """Let a full block that is in use be found by its key. Where another block has that key this one stays as it
        is, and is fresh once it is released."""
        assert self._references[block] > 0, "only a block in use is sealed"
        assert self._keys[block] is None, "sealed twice"
        if key in self._block_of:
            return
        self._block_of[key], self._keys[block] = block, key
        if self.listener is not None:
            self.listener(BlockStored(key, parent, tuple(token_ids), self.block_size))

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest prefix of these keys that is known; nothing is held by that."""
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def clear(self) -> None:
        """Forget every key: what the blocks hold is void. Blocks in use stay in use."""
        self._block_of.clear()
        self._keys = [None] * self.num_blocks
        self._fresh += reversed(self._cached)
        self._cached.clear()
        if self.listener is not None:
            self.listener(AllBlocksCleared())

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None
        del self._block_of[key]
        self._keys[block] = None
        if self.listener is not None:
            self.listener(BlockRemoved(key))
