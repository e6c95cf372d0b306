"""Random operands of attention on a GPU amid NaN, and what each kernel's results are held against."""

import math
import random
from typing import Any

import torch
from torch import Tensor

from onewave.ops.attention.masks import options, visible_keys
from onewave.ops.attention.op import attention, attention_varlen
from onewave.ops.attention.reference import attention as in_torch

NAN = float("nan")
LENGTHS = [
    (1, 1), (1, 17), (63, 64), (64, 63), (113, 203), (239, 1), (799, 3), (1023, 1024), (1024, 1023), (640, 128),
    (5, 0), (300, 300), (129, 1000), (1000, 129), (2048, 2048),
]  # fmt: skip
MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "align": "top-left"},
    {"window": (37, 11)},
    {"causal": True, "window": 200},
    {"causal": True, "window": 64, "align": "top-left"},
    {"causal": True, "softcap": 20.0},
    {"sinks": True},
    {"causal": True, "sinks": True, "window": 100, "softcap": 5.0},
    {"window": (300, -1)},
]


def framed(shape: tuple[int, ...], dtype: torch.dtype, seed: int, *, tokens_first: bool, scale: float = 1.0) -> Tensor:
    """A random [batch, heads, seq, head_dim] tensor with NaN on all sides, heads inside tokens or outside."""
    batch, heads, length, head_dim = shape
    values = torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda") * scale
    if tokens_first:
        frame = torch.full((batch, length + 9, heads + 1, head_dim + 8), NAN, dtype=dtype, device="cuda")
        view = frame[:, 4 : 4 + length, :heads, :head_dim].transpose(1, 2)
    else:
        frame = torch.full((batch, heads, length + 9, head_dim + 8), NAN, dtype=dtype, device="cuda")
        view = frame[:, :, 4 : 4 + length, :head_dim]
    return view.copy_(values)


def rounded(q: Tensor, k: Tensor, v: Tensor, mask: dict[str, Any]) -> Tensor:
    """Attention in the dtype itself, step by step: what low precision costs."""
    group = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = (q @ keys.transpose(-1, -2)).float() * q.shape[3] ** -0.5
    if mask.get("softcap"):
        scores = mask["softcap"] * torch.tanh(scores / mask["softcap"])
    wanted = options(
        "attention", head_dim=q.shape[3], causal=mask.get("causal", False), scale=None, window=mask.get("window"),
        softcap=None, align=mask.get("align", "bottom-right"),
    )  # fmt: skip
    seen = visible_keys(wanted, q.shape[2], k.shape[2], q.device)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    if mask.get("sinks") is not None:
        sink = mask["sinks"].float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), -1)
    weights = scores.softmax(-1)[..., : k.shape[2]].nan_to_num(0)
    if seen is not None:
        weights = weights.masked_fill(~seen.any(-1)[:, None], 0)
    return weights.to(q.dtype) @ values


def check(backend: str, q: Tensor, k: Tensor, v: Tensor, mask: dict[str, Any], what: object) -> None:
    """Error at most twice the low-precision one; log-sums too; exact zeros and -inf; nothing written around."""
    given = dict(mask)
    if given.get("sinks"):
        given["sinks"] = torch.randn(q.shape[1], generator=torch.Generator("cuda").manual_seed(9), device="cuda")
    batch, heads, length, head_dim = q.shape
    frame = torch.full((batch, heads, length + 9, head_dim + 8), 7.0, dtype=q.dtype, device="cuda")
    out = frame[:, :, 4 : 4 + length, :head_dim]
    _, lse = attention(q, k, v, out=out, return_lse=True, backend=backend, **given)
    sinks = {"sinks": given["sinks"].double()} if given.get("sinks") is not None else {}
    exact, exact_lse = in_torch(q.double(), k.double(), v.double(), **given | sinks)
    if k.shape[2]:
        allowed = 2 * (rounded(q, k, v, given).double() - exact).abs().max() + 1e-5
        assert (out.double() - exact).abs().max() <= allowed, what
    else:
        assert not out.any(), what
    assert torch.equal(lse == -math.inf, exact_lse == -math.inf), what
    finite = torch.isfinite(exact_lse)
    torch.testing.assert_close(lse[finite].double(), exact_lse[finite], atol=2e-3, rtol=4e-5)
    out.fill_(7.0)
    assert (frame == 7.0).all(), what


def check_packed(backend: str, head_dim: int, cases: list[tuple[tuple[int, int], dict[str, Any]]]) -> None:
    """Packed sequences have the bits of each alone, for every heads and KV heads with their mask."""
    ragged = [random.Random(3).randint(1, 700) for _ in range(40)]
    pairs = [([1, 127, 640, 64, 0, 333],) * 2, ([0, 0, 5, 1000, 2],) * 2, ([300, 17, 1, 200], [1, 500, 0, 333])]
    for lengths, key_lengths in (*pairs, (ragged, ragged)):
        for (heads, kv_heads), mask in cases:
            q = torch.randn(sum(lengths) + 7, heads, head_dim, device="cuda").bfloat16()
            k, v = (torch.randn(sum(key_lengths) + 300, kv_heads, head_dim, device="cuda").bfloat16() for _ in "kv")
            k[sum(key_lengths) :], v[sum(key_lengths) :] = NAN, NAN
            starts, key_starts = (torch.tensor([0, *n], device="cuda").cumsum(0).int() for n in (lengths, key_lengths))
            out = torch.full_like(q, 7.0)
            given = {"return_lse": True, "backend": backend, **mask}
            _, lse = attention_varlen(q, k, v, starts, key_starts, max(lengths), max(key_lengths), out=out, **given)
            assert (out[sum(lengths) :] == 7.0).all()
            for row, (num_queries, num_keys) in enumerate(zip(lengths, key_lengths, strict=True)):
                at, key_at = int(starts[row]), int(key_starts[row])
                queries, keys = slice(at, at + num_queries), slice(key_at, key_at + num_keys)
                alone = [t.transpose(0, 1)[None] for t in (q[queries], k[keys], v[keys])]
                one, one_lse = attention(*alone, **given)
                assert torch.equal(one[0].transpose(0, 1), out[queries]), (row, mask)
                assert torch.equal(one_lse[0], lse[:, queries]), (row, mask)


def check_hard_logits(
    backend: str, head_dim: int, dtype: torch.dtype, masks: list[dict[str, Any]], scales: list[float], rise: Tensor
) -> None:
    """Logits of these scales, one key 30 times as large, and keys that `rise`, a factor a key."""
    for mask in masks:
        v = framed((2, 2, 1500, head_dim), dtype, 3, tokens_first=False)
        for scale in scales:
            q = framed((2, 4, 700, head_dim), dtype, 1, tokens_first=False, scale=scale)
            k = framed((2, 2, 1500, head_dim), dtype, 2, tokens_first=False, scale=scale)
            check(backend, q, k, v, mask, scale)
        for huge in (0, 700, -1):
            k = framed((2, 2, 1500, head_dim), dtype, 2, tokens_first=False)
            k[:, :, huge] *= 30
            check(backend, q / 4, k, v, mask, huge)
        check(backend, q.abs() / 4, k.abs() * rise.to(dtype)[:, None], v, mask, "rising")


def check_repeats(backend: str, q: Tensor, k: Tensor, v: Tensor, expected: Tensor) -> None:
    """A thousand runs give the same bits."""
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        differ += (attention(q, k, v, causal=True, backend=backend) != expected).sum()
    assert differ.item() == 0
