"""Attention of packed sequences on the CPU in float32: what cpu/kernel_impl.py is given."""

from typing import NamedTuple

import torch
from torch import Tensor

from onewave.ops.attention.call import AttentionCall, Packed, like
from onewave.ops.attention.cpu.kernel_impl import FIELDS, PAIRS, items
from onewave.ops.attention.masks import Options
from onewave.ops.attention.plan import AttentionChoice
from onewave.ops.cpu.team_impl import Job

_NO_LIMIT = 1 << 40


def run(call: AttentionCall, choice: AttentionChoice) -> Tensor:
    """Return the output, and write call.lse; rows beyond max_seqlen_q and tokens outside every sequence stay."""
    packed, wanted = call.packed, call.options
    assert packed is not None
    first, last = int(packed.cu_seqlens_q[0]), int(packed.cu_seqlens_q[-1])
    # PyTorch's threads, once they have filled a tensor, spin for milliseconds beside ours: no zeros without need.
    covered = call.out is None and first == 0 and last == len(call.q) <= packed.max_seqlen_q
    out = like(call.q) if covered else call.output()
    q, target = call.q.contiguous(), out.contiguous()
    lse = None if call.lse is None else call.lse.T.contiguous()
    sequences = Sequences.of(packed, q.shape[1], call.k.shape[-2], top_left=wanted.top_left)
    job(target, q, call.k, call.v, sequences, wanted, lse).run()
    if call.lse is not None and lse is not None:
        call.lse.copy_(lse.T)
    return out if target is out else out.copy_(target)


class Sequences(NamedTuple):
    """Sequences as the loops read them, int64 [sequences, FIELDS], their pages, int64, and the number of items."""

    rows: Tensor
    pages: Tensor
    items: int

    @classmethod
    def of(cls, packed: Packed, num_heads: int, num_kv_heads: int, *, top_left: bool) -> "Sequences":
        starts_q: list[int] = packed.cu_seqlens_q.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        starts_k: list[int] = packed.cu_seqlens_k.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        rows: list[tuple[int, ...]] = []
        table, end = packed.block_table, 0
        for nth in range(packed.num_sequences):
            queries = min(starts_q[nth + 1] - starts_q[nth], packed.max_seqlen_q)
            keys = starts_k[nth + 1] - starts_k[nth]
            end += -(-queries * (num_heads // num_kv_heads) // PAIRS) * num_kv_heads
            first = 0 if table is not None else starts_k[nth]
            place = 0 if top_left else keys - (starts_q[nth + 1] - starts_q[nth])
            rows.append((starts_q[nth], queries, first, keys, place, end))
        words = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, FIELDS)
        if table is None:
            table = torch.zeros((len(rows), 1), dtype=torch.int64, device="cpu")
        return cls(words, table.long().contiguous(), end)


def job(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, wanted: Options, lse: Tensor | None = None
) -> Job:
    """Attention of contiguous q [tokens, heads, head_dim] to out, and to lse [tokens, heads]. k, v: as op's, of equal
    strides."""
    if k.ndim == 3:
        k = k[None]
    addresses = (t.data_ptr() for t in (q, k, v, out, sequences.pages, sequences.rows))
    sizes = (len(sequences.rows), q.shape[1], *k.shape[2:], *(4 * step for step in k.stride()[:3]), k.shape[1])
    sides = (_NO_LIMIT if side is None else side for side in (wanted.left, wanted.right))
    lse_at = 0 if lse is None else lse.data_ptr()
    return Job(items, sequences.items, (*addresses, *sizes, sequences.pages.shape[1], *sides, lse_at), wanted.scale)
