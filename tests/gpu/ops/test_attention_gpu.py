"""attention and attention_varlen on a GPU: graphs, streams, compilers, 64-bit offsets, and no hidden work."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from kit.operands.attention_on_gpu import check_repeats
from kit.operands.random import randn_on_gpu as randn
from onewave.base.errors import UnsupportedError
from onewave.ops.attention.op import attention, attention_varlen
from onewave.ops.attention.reference import attention as in_torch

pytestmark = pytest.mark.gpu
NAN = float("nan")


def with_lse(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
    function = attention_varlen if len(tensors) > 3 else attention
    return function(*tensors, return_lse=True, **options)


def starts(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


@pytest.mark.values
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_equal_each_alone_and_padded_bit_for_bit(
    causal: bool, head_dim: int, dtype: torch.dtype
) -> None:
    lengths = [1, 127, 640, 64, 0, 333]
    q = randn(sum(lengths), 8, head_dim, dtype=dtype)
    k, v = (randn(sum(lengths), 2, head_dim, seed=seed, dtype=dtype) for seed in (1, 2))
    cu = starts(*lengths)
    out, lse = with_lse(q, k, v, cu, cu, 640, 640, causal=causal)
    for first, n in zip(cu.tolist(), lengths, strict=False):
        part = slice(first, first + n)
        rows = [tensor[part].transpose(0, 1)[None] for tensor in (q, k, v)]
        alone, alone_lse = with_lse(*rows, causal=causal)
        assert torch.equal(out[part], alone[0].transpose(0, 1))
        assert torch.equal(lse[:, part], alone_lse[0])
        # With NaN beyond its end, hidden by a mask; top-left keeps the causal diagonal where it is.
        padded = [torch.full((1, tensor.shape[1], 700, head_dim), NAN, dtype=dtype, device="cuda") for tensor in rows]
        for frame, tensor in zip(padded, rows, strict=True):
            frame[:, :, :n] = tensor
        seen = torch.arange(700, device="cuda") < n
        # The portable kernel has biases; on Hopper auto may take another one for what has none.
        portable, portable_lse = with_lse(*rows, causal=causal, backend="triton")
        masked, masked_lse = with_lse(*padded, causal=causal, bias=seen, align="top-left")
        assert torch.equal(masked[:, :, :n], portable)
        assert torch.equal(masked_lse[:, :, :n], portable_lse)
        if causal:
            # Rows that follow see the padding, so it holds numbers.
            longer, longer_lse = with_lse(*(x.nan_to_num(7.0) for x in padded), causal=True, align="top-left")
            assert torch.equal(longer[:, :, :n], alone)
            assert torch.equal(longer_lse[:, :, :n], alone_lse)


def test_a_rows_bits_depend_neither_on_the_batch_nor_on_other_queries() -> None:
    for head_dim in (40, 64, 80, 96, 128, 192):
        q = randn(5, 16, 900, head_dim)
        k, v = (randn(5, 4, 900, head_dim, seed=seed) for seed in (1, 2))
        out, lse = with_lse(q, k, v, causal=True)
        for batch, queries in ((slice(2, 3), 900), (slice(0, 5), 130), (slice(1, 3), 31), (slice(4, 5), 1)):
            part, part_lse = with_lse(q[batch, :, 900 - queries :], k[batch], v[batch], causal=True)
            assert torch.equal(part, out[batch, :, 900 - queries :])
            assert torch.equal(part_lse, lse[batch, :, 900 - queries :])
        tokens_first = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (k, v)]
        # Rows that no descriptor can describe.
        odd = [torch.cat((tensor, tensor[..., :1]), -1)[..., :head_dim] for tensor in (k, v)]
        assert torch.equal(attention(q, *tokens_first, causal=True), out)
        portable = attention(q, k, v, causal=True, backend="triton")
        for keys, values in (tokens_first, odd):
            assert torch.equal(attention(q, keys, values, causal=True, backend="triton"), portable)


@pytest.mark.values
@pytest.mark.parametrize("head_dim", [136, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_bias_of_any_dtype_fits_every_width(head_dim: int, dtype: torch.dtype) -> None:
    """In float32 it once asked for more shared memory than there is, from 136 columns on."""
    q, (k, v) = randn(2, 8, 200, head_dim), (randn(2, 2, 304, head_dim, seed=seed) for seed in (1, 2))
    bias = randn(2, 8, 200, 304, seed=3)
    bias = bias > -1 if dtype is torch.bool else bias.to(dtype)
    # Rows that no descriptor can describe.
    odd = [torch.cat((tensor, tensor[..., :1]), -1)[..., :head_dim] for tensor in (k, v)]
    for queries in (q, q[:, :, :5]):
        shown = bias[:, :, : queries.shape[2]]
        exact, exact_lse = in_torch(queries, k, v, bias=shown, causal=True)
        for keys, values in ((k, v), odd):
            out, lse = with_lse(queries, keys, values, bias=shown, causal=True)
            torch.testing.assert_close(out.float(), exact.float(), atol=2e-2, rtol=2e-2)
            torch.testing.assert_close(lse, exact_lse, atol=1e-3, rtol=1e-3)


def test_a_thousand_runs_give_the_same_bits() -> None:
    q, (k, v) = randn(2, 8, 300, 64), (randn(2, 2, 300, 64, seed=seed) for seed in (1, 2))
    first = attention(q, k, v, causal=True)
    check_repeats("auto", q, k, v, first)


def test_more_than_two_to_the_31_elements() -> None:
    heads, keys, head_dim = 140, 120_000, 128
    assert heads * keys * head_dim > 2**31
    k = torch.zeros(1, heads, keys, head_dim, dtype=torch.bfloat16, device="cuda")
    q = randn(1, heads, 70, head_dim)
    k[:, -1], k[:, 0] = randn(keys, head_dim, seed=1), randn(keys, head_dim, seed=2)
    out, lse = with_lse(q, k, k)
    ends = [0, heads - 1]
    exact, exact_lse = in_torch(q[:, ends], k[:, ends], k[:, ends])
    torch.testing.assert_close(out[:, ends].float(), exact.float(), atol=2e-3, rtol=2e-2)
    torch.testing.assert_close(lse[:, ends], exact_lse, atol=1e-3, rtol=1e-4)
    assert not out[:, 1:-1].any()
    # Queries and output as long, and pointers instead of descriptors.
    wide = torch.zeros(1, heads, keys, head_dim + 1, dtype=torch.bfloat16, device="cuda")[..., :head_dim]
    few = randn(1, heads, 70, head_dim, seed=3)
    wide[:, :, -70:] = few
    del k
    long = attention(wide, few, few)
    assert torch.equal(long[:, :, -70:], attention(few, few, few, backend="triton"))


def test_a_call_neither_synchronises_nor_allocates_beside_its_results() -> None:
    q, (k, v) = randn(2, 8, 300, 64), (randn(2, 2, 300, 64, seed=seed) for seed in (1, 2))
    packed = [t.transpose(1, 2).flatten(0, 1).contiguous() for t in (q, k, v)]
    cu, out, flat = starts(300, 300), torch.empty_like(q), torch.empty_like(packed[0])
    calls = [
        lambda: attention(q, k, v, causal=True, out=out),
        lambda: attention_varlen(*packed, cu, cu, 300, 300, causal=True, out=flat),
    ]
    for call in calls:
        call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        torch.cuda.set_sync_debug_mode("error")
        try:
            for call in calls:
                call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        in_calls = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        torch.cuda.synchronize()
    assert in_calls == 0
    events = [event.key for event in seen.key_averages()]
    assert not [name for name in events if "memcpy" in name.lower() or "malloc" in name.lower()]
    assert sum("Synchronize" in name for name in events) <= 1  # our own, at the end


def test_a_captured_graph_serves_new_contents_on_a_side_stream() -> None:
    q, (k, v) = randn(2, 8, 300, 128), (randn(2, 2, 300, 128, seed=seed) for seed in (1, 2))
    attention(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, causal=True)
    q.copy_(randn(2, 8, 300, 128, seed=7))
    graph.replay()
    assert torch.equal(out, attention(q, k, v, causal=True))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        q.mul_(2)
        late = attention(q, k, v, causal=True)
    stream.synchronize()
    assert torch.equal(late, attention(q, k, v, causal=True))


def test_one_graph_under_torch_compile() -> None:
    q, (k, v) = randn(2, 8, 100, 64), (randn(2, 2, 100, 64, seed=seed) for seed in (1, 2))
    compiled = torch.compile(lambda *t: attention(*t, causal=True, window=50), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(q, k, v), attention(q, k, v, causal=True, window=50))
    torch.library.opcheck(
        torch.ops.onewave.attention.default, (q, k, v, None, None, None, 0.1, None, 0, False, None, "auto")
    )


def test_what_a_gpu_does_not_do_is_refused() -> None:
    q = randn(1, 2, 5, 64)
    with pytest.raises(UnsupportedError, match=r"float32 on cuda.*allowed: bfloat16, float16"):
        attention(q.float(), q.float(), q.float())
    with pytest.raises(UnsupportedError, match="devices: cuda:0 and cpu"):
        attention(q, q.cpu(), q)
