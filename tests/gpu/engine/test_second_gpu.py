"""Operators on tensors of a GPU that is not the current one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from onewave import ops
from onewave.ops.stream_read.op import stream_read

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def heads(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    return randn(*shape), randn(*shape) + 1, randn(*shape) - 1


STARTS = torch.tensor([0, 100, 300], dtype=torch.int32)
LENGTHS = torch.tensor([7, 300])
FFN = (randn(4, 256), randn(512, 256) / 16, randn(256, 512) / 16)
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "attention": (partial(ops.attention, causal=True), heads(2, 4, 300, 64)),
    "attention, portable": (partial(ops.attention, causal=True, backend="triton"), heads(2, 4, 300, 64)),
    "attention, mma": (partial(ops.attention, backend="mma"), heads(2, 4, 300, 64)),
    "attention_varlen": (
        partial(ops.attention_varlen, max_seqlen_q=200, max_seqlen_k=200, causal=True),
        (*heads(300, 4, 64), STARTS, STARTS),
    ),
    "attention_fp8": (ops.attention_fp8, tuple(each.to(torch.float8_e4m3fn) for each in heads(1, 4, 300, 128))),
    "decode_attention": (ops.decode_attention, (randn(2, 8, 64), randn(2, 2, 300, 64), randn(2, 2, 300, 64), LENGTHS)),
    "decode_attention, portable": (
        partial(ops.decode_attention, backend="triton"),
        (randn(2, 8, 64), randn(2, 2, 300, 64), randn(2, 2, 300, 64), LENGTHS),
    ),
    "append_kv": (
        partial(ops.append_kv, num_heads=4),
        (randn(2, 512), randn(2, 64, dtype=torch.float32), *heads(2, 2, 9, 64)[:2], torch.arange(2), LENGTHS // 60),
    ),
    "masked_multihead_attention": (
        ops.masked_multihead_attention,
        (randn(2, 12 * 64), randn(2, 2, 300, 64), randn(2, 2, 300, 64), LENGTHS - 1),
    ),
    "merge_attention": (
        ops.merge_attention,
        (randn(3, 2, 4, 5, 64), randn(3, 2, 4, 5, dtype=torch.float32)),
    ),
    "rms_norm": (partial(ops.rms_norm, eps=1e-5), (randn(3, 512), randn(512))),
    "swiglu": (ops.swiglu, (randn(3, 512),)),
    "linear": (ops.linear, (randn(1, 512), randn(300, 512))),
    "linear to float32": (partial(ops.linear, out_dtype=torch.float32), (randn(3, 512), randn(300, 512))),
    "greedy": (ops.greedy, (randn(3, 20_000, dtype=torch.float32),)),
    "stream_read": (stream_read, (torch.arange(1 << 22, dtype=torch.int32),)),
    **{f"ffn, {name}": (partial(ops.ffn, backend=name), FFN) for name in ("wave", "chain", "streams", "auto")},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_runs_where_its_tensors_lie(name: str) -> None:
    call, tensors = CALLS[name]
    found: list[list[Tensor]] = []
    for gpu in (0, 1):
        there = [tensor.to(f"cuda:{gpu}") for tensor in tensors]
        for _ in range(2):  # the second launch goes another way
            result = call(*there)
        results = [result] if isinstance(result, Tensor) else list(result)
        torch.cuda.synchronize(gpu)
        assert torch.cuda.current_device() == 0
        assert all(each.device == torch.device("cuda", gpu) for each in results)
        # With what was written to, such as a cache.
        found.append([each.cpu() for each in (*results, *there)])
    for here, elsewhere in zip(*found, strict=True):
        assert torch.equal(here.flatten().view(torch.uint8), elsewhere.flatten().view(torch.uint8))
