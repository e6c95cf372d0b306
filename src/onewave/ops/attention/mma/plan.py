"""Support and tiles of the m16n8k16 kernel, for each head_dim, from shapes and flags alone.

A row's bits depend on the keys of a tile, so these depend on head_dim alone; how many queries a tile has changes no
bit. The tiles are chosen by registers (`python tools/resources.py`). The operator never takes this kernel
by itself: on an H200 it is nowhere ahead of both others (docs/log/prefill-attention.md).
"""

from dataclasses import dataclass

from onewave.ops.attention.plan import AttentionChoice, Facts
from onewave.ops.choice import because

_OLDEST, _NEWEST = (8, 0), (9, 0)


@dataclass(frozen=True)
class MmaTile:
    """queries and keys of a tile; warps of a program; registers: the most that a thread may have."""

    width: int
    queries: int
    keys: int
    warps: int
    registers: int

    @property
    def shared_bytes(self) -> int:
        """One tile of K and one of V; the output leaves through the same memory."""
        return 2 * self.width * max(2 * self.keys, self.queries)


# At 168 registers 3 programs of 4 warps fit an SM, at 128 four, at 96 five, at 80 six. None spills where rows are whole
# pieces of 16 bytes. 64 queries read K and V half as often as 32; 256 columns leave room for 32 alone.
_WIDE = {16: (64, 64, 104), 32: (64, 64, 128), 64: (64, 64, 168), 128: (64, 32, 168)}
_NARROW = {16: (32, 64, 72), 32: (32, 64, 80), 64: (32, 64, 96), 128: (32, 32, 96), 256: (32, 32, 168)}
_WARPS = 4


def mma_tile(head_dim: int, *, narrow: bool = False) -> MmaTile:
    """The tile for heads of head_dim, which is computed as the next power of two. narrow: of few queries."""
    width = next(width for width in _NARROW if head_dim <= width)
    queries, keys, registers = _NARROW[width] if narrow else _WIDE.get(width, _NARROW[width])
    return MmaTile(width, queries, keys, _WARPS, registers)


def plan_mma(facts: Facts) -> AttentionChoice:
    """Plan the kernel for a call that `mma_refusal` lets pass."""
    head_dim, group = facts.head_dim, facts.group
    wide = mma_tile(head_dim)
    packed = group if facts.num_queries < wide.queries else 1
    rows, heads = facts.num_queries * packed, facts.batch * (facts.num_kv_heads if packed > 1 else facts.num_heads)
    # Wide tiles would leave SMs with less than two programs.
    narrow = -(-rows // wide.queries) * heads < 2 * facts.device.num_sms
    tile = mma_tile(head_dim, narrow=narrow)
    tiles = -(-rows // tile.queries)
    few = ", few registers and more programs" if narrow else ""
    reasons = [
        because("asked for"),
        because("head_dim {}" if tile.width == head_dim else "head_dim {} as {}", head_dim, tile.width),
        because("{} queries a tile{}", tile.queries, few),
        because(
            "at most {} registers a thread, {} KiB of shared memory for K and V", tile.registers,
            tile.shared_bytes >> 10,
        ),
    ]  # fmt: skip
    if packed > 1:
        why = "{} heads of a group share a tile, since {} queries don't fill one"
        reasons.append(because(why, group, facts.num_queries))
    if facts.options.hides_keys:
        reasons.append(because("tiles that no query sees are skipped"))
    return AttentionChoice(
        "mma", "mma.launch", "attention/mma/kernel.py: mma_kernel", tuple(reasons), tile.queries, tile.keys, tile.warps,
        num_stages=1, width=tile.width, packed_heads=packed, tiles=tiles, num_programs=tiles * heads,
        max_registers=tile.registers,
    )  # fmt: skip


def mma_refusal(facts: Facts) -> str | None:
    """Why the kernel does not take a call, None if it does."""
    major, minor = facts.capability
    if not _OLDEST <= (major, minor) <= _NEWEST:
        return f"the m16n8k16 kernel is for sm_80 to sm_90, and this is sm_{major}{minor}"
    if facts.missing is not None:
        return f"the m16n8k16 kernel needs Triton 3.6's Gluon: {facts.missing}"
    if facts.alibi or facts.bias is not None:
        return "the m16n8k16 kernel has neither ALiBi nor bias"
    return None
