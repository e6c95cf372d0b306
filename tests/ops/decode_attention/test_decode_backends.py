"""Which calls decode attention's loops for a CPU take, and operands that lie in memory as few do."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.attention_oracle import within_rule
from kit.operands.decode_calls import attend
from kit.operands.random import randn
from onewave.base.errors import ShapeError, UnsupportedError
from onewave.ops.append_kv import append_kv
from onewave.ops.choice import Kept
from onewave.ops.decode_attention import choose, decode_attention
from onewave.ops.decode_attention.reference import decode_attention as reference
from onewave.ops.decode_attention.triton import launch as triton_impl
from onewave.ops.masked_multihead_attention import masked_multihead_attention


def case(queries: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    k, v = (randn(2, 2, 40, 32, seed=seed, dtype=dtype) for seed in (1, 2))
    return randn(2, 4, queries, 32, seed=0, dtype=dtype), k, v, torch.tensor([5, 33])


@pytest.mark.parametrize("queries", [1, 2, 3])
def test_a_call_that_was_seen_before_gets_the_same_result(queries: int) -> None:
    operands = case(queries)
    right, _ = reference(*operands)
    for _ in range(3):
        found = decode_attention(*operands)
        torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 0.5},
        {"sinks": torch.ones(4)},
        {"return_lse": True},
        {"k_scale": torch.ones(2), "v_scale": torch.ones(2)},
    ],
    ids=lambda given: next(iter(given)),
)
def test_the_loops_of_a_cpu_refuse_what_they_would_leave_out(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"backend=cpu.*allowed: one query a row"):
        decode_attention(*case(), backend="cpu", **options)


def test_the_loops_of_a_cpu_refuse_several_queries_a_row() -> None:
    with pytest.raises(UnsupportedError, match="2 queries a row"):
        decode_attention(*case(2), backend="cpu")
    out = decode_attention(*case(), backend="cpu", window=7, scale=0.3)
    torch.testing.assert_close(out, reference(*case(), window=7, scale=0.3)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_on_a_cpu_meet_the_error_rule(dtype: torch.dtype) -> None:
    for keys in (1, 17, 65, 300):
        q, k, v = (randn(2, h, n, 64, seed=keys + h + n).to(dtype) for h, n in ((8, 1), (2, keys), (2, keys)))
        lengths = torch.tensor([keys, keys])
        plain = torch.nn.functional.scaled_dot_product_attention
        exact, baseline = plain(q.double(), k.double(), v.double(), enable_gqa=True), plain(q, k, v, enable_gqa=True)
        out = decode_attention(q, k, v, lengths)
        assert out.dtype is dtype
        assert within_rule(out, exact, baseline)


def test_an_output_whose_rows_share_memory_is_refused() -> None:
    q, k, v, lengths = case()
    with pytest.raises(ShapeError, match="elements of their own"):
        decode_attention(q, k, v, lengths, out=torch.zeros_like(q[:1]).expand_as(q))
    with pytest.raises(ShapeError, match="elements of their own"):
        masked_multihead_attention(randn(2, 8, 32, seed=0), k, v, lengths, out=torch.zeros(1, 4, 32).expand(2, 4, 32))


def test_a_cache_without_heads_is_an_error_that_says_so() -> None:
    q, k, v, lengths = case()
    with pytest.raises(ShapeError, match="at least one KV head"):
        decode_attention(q, k[:, :0], v[:, :0], lengths)
    with pytest.raises(ShapeError, match="append_kv: qkv"):
        append_kv(randn(2, 64, seed=0), None, k[:, :0], v[:, :0], torch.tensor([0, 1]), lengths, num_heads=2)


def launched(
    *operands: Tensor, block_table: Tensor | None = None, backend: str = "triton", **given: Any
) -> tuple[Tensor, Tensor]:
    """The Triton kernel, interpreted."""
    return attend(*operands, block_table=block_table, backend=backend, **given)


def test_no_kernel_is_left_to_choose_where_it_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two kernels with the same bits must not fuse a sum with a product that the other rounds first."""
    fused: list[bool] = []

    def launch(*_: Any, enable_fp_fusion: bool = True, **__: Any) -> None:
        fused.append(enable_fp_fusion)

    stream = SimpleNamespace(launch_stream=lambda *given: launch(**given[-1]))
    monkeypatch.setattr(triton_impl, "launch_kernel", launch)
    monkeypatch.setattr(triton_impl, "load", lambda *_: stream)
    launched(*case(dtype=torch.float16))
    monkeypatch.setattr(choose, "load", lambda *_: stream)
    monkeypatch.setattr(choose, "refusal", lambda *_, **__: None)
    monkeypatch.setattr(choose, "_chosen", Kept())
    launched(*case(dtype=torch.float16), backend="gluon")
    assert fused == [False, False]


def apart(tensor: Tensor) -> Tensor:
    """The same numbers, with others between those of the last axis."""
    wide = torch.full((*tensor.shape, 3), 9).to(tensor.dtype)
    wide[..., 1] = tensor
    return wide[..., 1]


def test_lengths_sinks_scales_and_tables_may_lie_apart() -> None:
    q, k, v, lengths = case(dtype=torch.float16)
    sinks, scales = torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.tensor([0.7, 1.3])
    right = launched(q, k, v, lengths, sinks=sinks, k_scale=scales, v_scale=scales)
    there = apart(scales)
    found = launched(q, k, v, apart(lengths), sinks=apart(sinks), k_scale=there, v_scale=there)
    assert torch.equal(found[0], right[0])
    assert torch.equal(found[1], right[1])
    pages = [cache.view(2, 2, 5, 8, 32).transpose(1, 2).reshape(10, 2, 8, 32) for cache in (k, v)]
    table = torch.arange(10, dtype=torch.int32).view(2, 5)
    assert torch.equal(launched(q, *pages, lengths, block_table=apart(table))[0], launched(q, k, v, lengths)[0])
    same = torch.tensor(33).expand(2)
    assert torch.equal(launched(q, k, v, same)[0], launched(q, k, v, torch.tensor([33, 33]))[0])


def test_without_rows_heads_or_keys_there_is_nothing_to_launch_or_zeros() -> None:
    q, k, v, lengths = case(dtype=torch.float16)
    assert launched(q[:0], k[:0], v[:0], lengths[:0])[0].shape == (0, 4, 1, 32)
    assert launched(q[:, :0], k, v, lengths)[0].numel() == 0
    out, lse = launched(q, k[:, :, :0], v[:, :, :0], lengths * 0)
    assert not out.any()
    assert (lse == -torch.inf).all()
