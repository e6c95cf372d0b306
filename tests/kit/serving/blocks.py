"""The states of a pool of KV blocks, read from inside."""

from onewave.memory.block_pool import BlockPool


def check_pool(pool: BlockPool) -> None:
    """Assert that every block is in exactly one state and every key leads to its block."""
    free = [*pool._fresh, *pool._cached]
    in_use = [block for block, count in enumerate(pool._references) if count > 0]
    assert min(pool._references) >= 0
    assert sorted([*free, *in_use]) == list(range(pool.num_blocks)), "a block in no state, or in two"
    assert {key: block for block, key in enumerate(pool._keys) if key is not None} == pool._block_of
    assert all(pool._keys[block] is None for block in pool._fresh), "a fresh block with a key"
    assert all(pool._keys[block] is not None for block in pool._cached), "a cached block without a key"


def references(pool: BlockPool, block: int) -> int:
    """How many sequences hold a block."""
    return pool._references[block]


def is_shared(pool: BlockPool, block: int) -> bool:
    """Whether a block must be copied before it is written: others hold it too, or can find it by its key."""
    return references(pool, block) > 1 or pool._keys[block] is not None
