"""The portable kernel's tile and grid, from shapes and flags alone.

What a row's bits may depend on is decided here: the keys of a tile (block_n), where tiles begin (multiples of block_n
from the row's own first key) and the width depend on head_dim and the capability alone. block_m and the packing of
heads change with the shape, and change no bit: rows of a tile never meet.
"""

import torch

from onewave.base.errors import UnsupportedError
from onewave.ops.attention.plan import AttentionChoice, Facts
from onewave.ops.choice import because

_FIRST, _FIRST_WITH_DESCRIPTORS = (8, 0), (9, 0)
# Bytes of shared memory that a program may hold; other GPUs from sm_80 on have 99 KiB.
_LARGE_SHARED = {(8, 0): 163 << 10, (8, 7): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10, (10, 3): 227 << 10}
_SMALL_SHARED = 99 << 10
_ITEM_BYTES = 2


def plan_portable(facts: Facts, *, not_hopper: str | None = None) -> AttentionChoice:
    """Plan the portable kernel. not_hopper: why the Hopper kernel does not run. Raises UnsupportedError."""
    capability, head_dim, group = facts.capability, facts.head_dim, facts.group
    if capability < _FIRST:
        got = f"sm_{capability[0]}{capability[1]}"
        raise UnsupportedError("attention: GPU", got=got, allowed="sm_80 and newer", next='Use backend="torch".')
    width = 1 << (head_dim - 1).bit_length()
    max_rows, block_n, warps, stages = _tile(width, capability)
    limit = _LARGE_SHARED.get(capability, _SMALL_SHARED)
    if _shared_bytes(max_rows, block_n, width, 1) > limit:
        max_rows = 64
    packed = group if facts.num_queries < max_rows else 1
    rows = facts.num_queries * packed
    block_m = 64 if rows <= 64 else max_rows
    if block_m == 64:
        warps = 4
    # Numbers of 4 bytes are copied ahead one by one, whatever their strides, each stage but the one in use. Narrower
    # ones could only be copied several together, which the kernel's number of keys, that is not compiled in, forbids.
    bias_bytes = 4 * block_m * block_n if facts.bias is torch.float32 else 0
    while stages > 1 and _shared_bytes(block_m, block_n, width, stages) + (stages - 1) * bias_bytes > limit:
        stages -= 1
    tiles = -(-rows // block_m)
    descriptors = facts.keys_by_tma and capability >= _FIRST_WITH_DESCRIPTORS
    reasons = [
        because("head_dim {}" if width == head_dim else "head_dim {} as {}", head_dim, width),
        because("{} heads of a group share a tile, since {} queries don't fill one", group, facts.num_queries)
        if packed > 1
        else because("{} queries of one head a tile", block_m),
    ]
    if descriptors:
        reasons.append(because("K and V through tensor descriptors"))
    elif capability < _FIRST_WITH_DESCRIPTORS:
        reasons.append(because("K and V through pointers: sm_{}{} has no descriptors", *capability))
    else:
        reasons.append(because("K and V through pointers: their strides forbid descriptors"))
    if facts.options.hides_keys:
        reasons.append(because("tiles that no query sees are skipped, longest rows first"))
    if not_hopper is not None and capability == (9, 0):
        reasons.append(because("{}", not_hopper))
    return AttentionChoice(
        "triton", "triton.launch", "attention/triton/kernel.py: attention_kernel", tuple(reasons), block_m, block_n,
        warps, stages, width, packed, tiles,
        num_programs=tiles * facts.batch * (facts.num_kv_heads if packed > 1 else facts.num_heads),
        descriptors=descriptors,
    )  # fmt: skip


def _tile(width: int, capability: tuple[int, int]) -> tuple[int, int, int, int]:
    """(rows, keys, warps, stages) of a tile."""
    if capability >= _FIRST_WITH_DESCRIPTORS:
        # Four warps and 64 rows where two or three such programs fit an SM: one's softmax runs beside another's
        # products. Chosen by measurement on an H200; a third stage is worth a program less except at 64 columns. Never
        # eight warps: in Triton 3.6 one half doesn't wait for the other's products before it reloads their operands.
        if width <= 64:
            return (64, 128, 4, 2) if width == 64 else (64, 128, 4, 3)
        return (64, 64, 4, 3)
    return (128, 64, 4, 3) if width <= 64 else (128, 64, 8, 2) if width <= 128 else (128, 32, 8, 2)


def _shared_bytes(block_m: int, block_n: int, width: int, stages: int) -> int:
    """Q once, K and V once a stage, and a little for barriers."""
    return (block_m + 2 * stages * block_n) * width * _ITEM_BYTES + 1024
