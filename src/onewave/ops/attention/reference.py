"""The reference of `attention`: softmax(q k^T * scale + bias) v over the keys that a query sees, written out."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onewave.ops.attention.call import AttentionCall, Extras
from onewave.ops.attention.masks import Options, options, rows_of_sequences, visible_keys
from onewave.ops.attention.plan import AttentionChoice
from onewave.ops.library import outside_autocast


def run(call: AttentionCall, choice: AttentionChoice) -> Tensor:
    """Write and return the output, and call.lse."""
    out, lse, packed = call.output(), call.lse, call.packed
    if packed is None:
        result, result_lse = attend(call.q, call.k, call.v, call.extras, call.options)
    else:
        starts = packed.cu_seqlens_q, packed.cu_seqlens_k
        result, result_lse = attend_packed((call.q, call.k, call.v), starts, call.extras, call.options)
        # Tokens outside every sequence stay as they are.
        written = rows_of_sequences(starts[0], len(call.q), packed.max_seqlen_q)
        result = torch.where(written[:, None, None], result, out)
        result_lse = result_lse if lse is None else torch.where(written, result_lse, lse)
    if lse is not None:
        lse.copy_(result_lse)
    return out.copy_(result)


def attention(q: Tensor, k: Tensor, v: Tensor, *starts: Tensor, **keywords: Any) -> tuple[Tensor, Tensor]:
    """Return (out, lse) for op.attention's keywords. starts: cu_seqlens_q and cu_seqlens_k of packed sequences."""
    extras = Extras(*(keywords.pop(name, None) for name in Extras._fields))
    wanted = options("attention", head_dim=q.shape[-1], **keywords)
    return attend_packed((q, k, v), starts, extras, wanted) if starts else attend(q, k, v, extras, wanted)


@outside_autocast
def attend(q: Tensor, k: Tensor, v: Tensor, extras: Extras, wanted: Options) -> tuple[Tensor, Tensor]:
    """See op.attention for shapes. Returns (out, lse), computed in float32 (float64 inputs: in float64).

    Keys and values that no query sees may hold NaN.
    """
    sinks, alibi_slopes, bias = extras
    batch, num_heads, num_queries, head_dim = q.shape
    num_kv_heads, num_keys = k.shape[1:3]
    exact = torch.promote_types(q.dtype, torch.float32)
    if q.numel() == 0 or num_keys == 0:
        lse = torch.full((batch, num_heads, num_queries), float("-inf"), dtype=exact, device=q.device)
        return torch.zeros_like(q), lse
    # The query heads of a group are rows of one product: nothing is repeated.
    grouped = q.to(exact).reshape(batch, num_kv_heads, -1, head_dim)
    scores = (grouped @ k.to(exact).transpose(-1, -2)).view(batch, num_heads, num_queries, num_keys) * wanted.scale
    if wanted.softcap is not None:
        scores = wanted.softcap * torch.tanh(scores / wanted.softcap)
    if alibi_slopes is not None:
        place = torch.arange(num_queries, device=q.device)[:, None] + wanted.shift(num_queries, num_keys)
        distance = (place - torch.arange(num_keys, device=q.device)).abs()
        scores = scores - alibi_slopes.to(exact).reshape(-1, num_heads, 1, 1) * distance
    visible = visible_keys(wanted, num_queries, num_keys, q.device)
    if bias is not None:
        seen = bias if bias.dtype is torch.bool else bias != float("-inf")
        visible = seen if visible is None else seen & visible
        if bias.dtype is not torch.bool:
            scores = scores + bias.to(exact)
    if visible is not None:
        scores = torch.where(visible, scores, float("-inf"))
    empty = (scores == float("-inf")).all(-1)
    with_sinks = scores
    if sinks is not None:
        column = sinks.to(exact)[None, :, None, None].expand(batch, -1, num_queries, 1)
        with_sinks = torch.cat((scores, column), -1)
    lse = with_sinks.logsumexp(-1).masked_fill(empty, float("-inf"))
    weights = with_sinks.softmax(-1)[..., :num_keys].masked_fill(empty[..., None], 0.0)
    unseen = (scores == float("-inf")).reshape(batch, num_kv_heads, -1, num_keys).all(2)
    values = v.to(exact).masked_fill(unseen[..., None], 0.0)
    out = weights.reshape(batch, num_kv_heads, -1, num_keys) @ values
    result = torch.empty_like(q).copy_(out.view(q.shape))
    return result, lse


def attend_packed(
    operands: tuple[Tensor, Tensor, Tensor], starts: Sequence[Tensor], extras: Extras, wanted: Options
) -> tuple[Tensor, Tensor]:
    """One sequence after another; reads the lengths on the host. See op.attention_varlen.

    operands: q, k, v. starts: cu_seqlens_q, cu_seqlens_k.
    """
    q, k, v = operands
    exact = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q)
    lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), dtype=exact, device=q.device)
    starts_q, starts_k = ([int(n) for n in each] for each in starts)
    for row in range(len(starts_q) - 1):
        queries, keys = slice(starts_q[row], starts_q[row + 1]), slice(starts_k[row], starts_k[row + 1])
        num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
        of_row = extras._replace(bias=_bias_of(extras.bias, row, num_queries, num_keys))
        if of_row.alibi_slopes is not None and of_row.alibi_slopes.ndim == 2:
            of_row = of_row._replace(alibi_slopes=of_row.alibi_slopes[row : row + 1])
        row_q, row_k, row_v = (tensor[None].transpose(1, 2) for tensor in (q[queries], k[keys], v[keys]))
        part, part_lse = attend(row_q, row_k, row_v, of_row, wanted)
        out[queries] = part[0].transpose(0, 1)
        lse[:, queries] = part_lse[0]
    return out, lse


def _bias_of(bias: Tensor | None, row: int, num_queries: int, num_keys: int) -> Tensor | None:
    """A sequence's part of a bias; axes of size 1 stay broadcast."""
    if bias is None:
        return None
    # As many leading axes as [sequences, heads, Sq, Sk] has.
    full = bias.view((1,) * (4 - bias.ndim) + bias.shape)
    full = full[row : row + 1] if full.shape[0] > 1 else full
    full = full[:, :, :num_queries] if full.shape[2] > 1 else full
    if full.shape[2] != 1 and full.shape[2] < num_queries:  # of rows beyond max_seqlen_q, which are not kept
        full = F.pad(full, (0, 0, 0, num_queries - full.shape[2]))
    return full[..., :num_keys] if full.shape[3] > 1 else full
