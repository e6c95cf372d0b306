"""What `attention` means: softmax(q k^T * scale + bias) v over the keys that a query sees, written out."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onewave.ops.attention.call import AttentionCall
from onewave.ops.attention.masks import Window, options, rows_of_sequences, visible_keys
from onewave.ops.attention.plan import AttentionChoice
from onewave.ops.library import outside_autocast


def run(call: AttentionCall, choice: AttentionChoice) -> Tensor:
    """Write and return the output, and call.lse."""
    out, lse, wanted, packed = call.output(), call.lse, call.options, call.packed
    given: dict[str, Any] = {
        "scale": wanted.scale, "window": (wanted.left, wanted.right), "softcap": wanted.softcap, "align": wanted.align,
    }  # fmt: skip
    given |= call.extras._asdict()
    if packed is None:
        result, result_lse = attention(call.q, call.k, call.v, **given)
    else:
        starts = packed.cu_seqlens_q, packed.cu_seqlens_k
        result, result_lse = attention_varlen(call.q, call.k, call.v, *starts, **given)
        # Tokens outside every sequence stay as they are.
        written = rows_of_sequences(starts[0], len(call.q), packed.max_seqlen_q)
        result = torch.where(written[:, None, None], result, out)
        result_lse = result_lse if lse is None else torch.where(written, result_lse, lse)
    if lse is not None:
        lse.copy_(result_lse)
    return out.copy_(result)


@outside_autocast
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    align: str = "bottom-right",
) -> tuple[Tensor, Tensor]:
    """See op.attention for shapes. Returns (out, lse), computed in float32 (float64 inputs: in float64).

    Keys and values that no query sees may hold NaN.
    """
    batch, num_heads, num_queries, head_dim = q.shape
    num_kv_heads, num_keys = k.shape[1:3]
    exact = torch.promote_types(q.dtype, torch.float32)
    wanted = options(
        "attention", head_dim=head_dim, causal=causal, scale=scale, window=window, softcap=softcap, align=align
    )
    if q.numel() == 0 or num_keys == 0:
        lse = torch.full((batch, num_heads, num_queries), float("-inf"), dtype=exact, device=q.device)
        return torch.zeros_like(q), lse
    # The query heads of a group are rows of one product: nothing is repeated.
    grouped = q.to(exact).reshape(batch, num_kv_heads, -1, head_dim)
    scores = (grouped @ k.to(exact).transpose(-1, -2)).view(batch, num_heads, num_queries, num_keys) * wanted.scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
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


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    align: str = "bottom-right",
) -> tuple[Tensor, Tensor]:
    """One sequence after another; reads the lengths on the host. See op.attention_varlen."""
    exact = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q)
    lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), dtype=exact, device=q.device)
    starts_q, starts_k = [int(n) for n in cu_seqlens_q], [int(n) for n in cu_seqlens_k]
    for row in range(len(starts_q) - 1):
        queries, keys = slice(starts_q[row], starts_q[row + 1]), slice(starts_k[row], starts_k[row + 1])
        num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
        part_bias = None
        if bias is not None:
            # As many leading axes as [sequences, heads, Sq, Sk] has; axes of size 1 stay broadcast.
            full = bias.view((1,) * (4 - bias.ndim) + bias.shape)
            full = full[row : row + 1] if full.shape[0] > 1 else full
            full = full[:, :, :num_queries] if full.shape[2] > 1 else full
            if full.shape[2] != 1 and full.shape[2] < num_queries:  # of rows beyond max_seqlen_q, which are not kept
                full = F.pad(full, (0, 0, 0, num_queries - full.shape[2]))
            part_bias = full[..., :num_keys] if full.shape[3] > 1 else full
        slopes = alibi_slopes[row : row + 1] if alibi_slopes is not None and alibi_slopes.ndim == 2 else alibi_slopes
        part, part_lse = attention(
            *(tensor[None].transpose(1, 2) for tensor in (q[queries], k[keys], v[keys])),
            causal=causal, scale=scale, window=window, softcap=softcap, sinks=sinks, alibi_slopes=slopes,
            bias=part_bias, align=align,
        )  # fmt: skip
        out[queries] = part[0].transpose(0, 1)
        lse[:, queries] = part_lse[0]
    return out, lse
