"""Which calls split/kernel.py takes, and in how many splits: whatever it takes, bits are hopper/kernel.py's."""

import torch

from onewave.ops.attention.plan import AttentionChoice, Facts
from onewave.ops.choice import because

MAX_TOKENS, MIN_KEYS = 64, 1024
"""More rows fill the SMs by themselves; before as many keys a second launch costs more than it saves."""
ROWS, KEYS, COLUMNS = 64, 128, 32
"""Rows of a tile, keys of a key tile, columns of the output that a program sums."""
WEIGH_STAGES, COMBINE_STAGES = 2, 8
HEADROOM = 40
"""hopper/launch.py's for bfloat16."""
_HEAD_DIM, _PAGE_SIZE = 128, 128
# Scratch that all layers share. More takes longer prefixes, and memory from the KV cache.
_MAX_WEIGHT_BYTES = 64 << 20
_PROGRAMS_AN_SM = 2


def tiles_of(num_tokens: int, group: int, num_keys: int) -> tuple[int, int]:
    """Return tiles of ROWS rows of a KV head, and key tiles."""
    return -(-num_tokens * group // ROWS), -(-num_keys // KEYS)


def suits_split(facts: Facts) -> bool:
    """Whether a call that hopper/kernel.py takes is one short chunk over many keys in pages."""
    wanted = facts.options
    if facts.tokens is None or facts.tokens > min(MAX_TOKENS, facts.num_queries) or facts.num_keys < MIN_KEYS:
        return False
    if not facts.keys_by_tma:  # no pages: nothing to describe
        return False
    causal = wanted.right == 0 and wanted.left is None and not wanted.top_left and wanted.softcap is None
    row_tiles, key_tiles = tiles_of(facts.tokens, facts.group, facts.num_keys)
    weight_bytes = 2 * ROWS * KEYS * row_tiles * key_tiles * facts.num_kv_heads
    shape = facts.batch, facts.head_dim, facts.page_size, facts.dtype
    fits = weight_bytes <= _MAX_WEIGHT_BYTES and shape == (1, _HEAD_DIM, _PAGE_SIZE, torch.bfloat16)
    return causal and facts.plain and fits


def plan_split(facts: Facts) -> AttentionChoice:
    """Plan the kernels for a call that suits_split lets pass."""
    assert facts.tokens is not None
    row_tiles, key_tiles = tiles_of(facts.tokens, facts.group, facts.num_keys)
    row_tiles *= facts.num_kv_heads
    splits = min(key_tiles, max(1, _PROGRAMS_AN_SM * facts.device.num_sms // row_tiles))
    rows = "{} queries over up to {} keys are {} tiles of rows, too few for {} SMs"
    dealt = "one kernel has {} programs a tile for scores and weights, one {} for the sums"
    reasons = (
        because(rows, facts.tokens, facts.num_keys, row_tiles, facts.device.num_sms),
        because(dealt, splits, _HEAD_DIM // COLUMNS),
    )
    return AttentionChoice(
        "gluon", "split.launch", "attention/split/kernel.py: weigh_kernel, combine_kernel", reasons, ROWS, KEYS, 4,
        WEIGH_STAGES, _HEAD_DIM, facts.group, row_tiles, row_tiles * splits, descriptors=True, splits=splits,
    )  # fmt: skip
