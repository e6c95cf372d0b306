"""Calls of Hopper's prefill attention, one of each kind that its kernels know, and of what comes behind it:
`python racecheck_calls.py NAME..`.

For compute-sanitizer, which makes them ten to a hundred times slower: small, but with several tiles a program where a
name says "tiles".
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onewave.ops import PostAttentionWeights, attention, attention_fp8, attention_varlen, post_attention

UNLIKE = [5, 700, 64, 333]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def dense(
    head_dim: int = 128, batch: int = 2, heads: int = 4, kv_heads: int = 2, tokens: int = 640,
    dtype: torch.dtype = torch.bfloat16, *, sinks: bool = False, **options: Any,
) -> None:  # fmt: skip
    q = randn(batch, heads, tokens, head_dim, dtype=dtype)
    k, v = (randn(batch, kv_heads, tokens, head_dim, dtype=dtype) for _ in range(2))
    attention(q, k, v, backend="gluon", sinks=randn(heads, dtype=torch.float32) if sinks else None, **options)


def starts_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)


def packed(lengths: list[int], head_dim: int = 128, **options: Any) -> None:
    q, k, v = (randn(sum(lengths), heads, head_dim) for heads in (8, 2, 2))
    starts = starts_of(lengths)
    attention_varlen(q, k, v, starts, starts, max(lengths), max(lengths), backend="gluon", **options)


def pages() -> None:
    queries, keys = [5, 300, 64], [70, 300, 200]
    table = torch.randperm(30, device="cuda").int().reshape(3, 10)
    attention_varlen(
        randn(sum(queries), 8, 128), randn(30, 32, 2, 128), randn(30, 32, 2, 128), starts_of(queries), starts_of(keys),
        max(queries), max(keys), causal=True, block_table=table, backend="gluon",
    )  # fmt: skip


def float8(**options: Any) -> None:
    attention_fp8(*(randn(2, 4, 640, 128).to(torch.float8_e4m3fn) for _ in range(3)), backend="gluon", **options)


def behind(rows: int, hidden: int, **options: Any) -> None:
    gains = [randn(hidden) for _ in range(2)]
    weights = PostAttentionWeights(randn(hidden, 128), gains[0], randn(512, hidden), randn(hidden, 256), gains[1])
    residual = randn(rows, hidden, dtype=torch.float32)
    post_attention(randn(rows, 128), residual, weights, 1e-5, backend="chain", **options)


MANY: dict[str, Any] = {"heads": 16, "kv_heads": 4}
CALLS: dict[str, Callable[[], None]] = {
    "64": partial(dense, 64),
    "64 causal": partial(dense, 64, causal=True),
    "64 causal tiles": partial(dense, 64, 8, tokens=1024, causal=True, **MANY),
    "128": dense,
    "128 tiles": partial(dense, 128, 6, **MANY),
    "128 causal": partial(dense, causal=True),
    "128 causal tiles": partial(dense, 128, 6, tokens=512, causal=True, **MANY),
    "128 causal tiles from a table": partial(dense, 128, 8, tokens=1024, causal=True, **MANY),
    "256": partial(dense, 256),
    "256 causal": partial(dense, 256, causal=True),
    "256 causal tiles": partial(dense, 256, 8, tokens=512, causal=True, **MANY),
    "96 float16": partial(dense, 96, dtype=torch.float16, causal=True),
    "192 float16": partial(dense, 192, dtype=torch.float16),
    "lse": partial(dense, causal=True, return_lse=True),
    "window": partial(dense, causal=True, window=(100, 0)),
    "softcap": partial(dense, softcap=20.0),
    "softcap causal tiles": partial(dense, 128, 8, softcap=20.0, causal=True, **MANY),
    "64 softcap": partial(dense, 64, softcap=20.0, causal=True),
    "sinks": partial(dense, 64, causal=True, window=(128, 0), sinks=True),
    "packed": partial(packed, UNLIKE, causal=True),
    "packed tiles": partial(packed, [300] * 40, causal=True),
    "packed full": partial(packed, UNLIKE),
    "packed window": partial(packed, UNLIKE, causal=True, window=(100, 0)),
    "packed 64 tiles": partial(packed, UNLIKE * 8, 64, causal=True),
    "pages": pages,
    "float8": float8,
    "float8 causal": partial(float8, causal=True),
    "behind attention": partial(behind, 300, 1024),
    "behind attention, 60 rows": partial(behind, 60, 640, order="row"),
    "behind attention, 200 rows": partial(behind, 200, 2048, policy="tile"),
}

if __name__ == "__main__":
    torch.manual_seed(0)
    for name in sys.argv[1:]:
        CALLS[name]()
        torch.cuda.synchronize()
