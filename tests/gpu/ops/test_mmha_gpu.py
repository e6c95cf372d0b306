"""masked_multihead_attention and append_kv on a GPU: long histories, streams, graphs, 64-bit offsets, float8."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.operands.decode_calls import masked_in_torch
from kit.operands.random import randn_on_gpu
from onewave.ops.append_kv import append_kv
from onewave.ops.decode_attention import decode_attention
from onewave.ops.decode_attention.reference import decode_attention as decode_attention_in_torch
from onewave.ops.kv_layout import pack_k, unpack_k
from onewave.ops.masked_multihead_attention import masked_multihead_attention

pytestmark = pytest.mark.gpu
HISTORIES = [0, 1, 127, 128, 129, 4096, 2047]
NAN = float("nan")
randn = partial(randn_on_gpu, dtype=torch.float32)


class Case:
    """Rows with the histories that decide how many blocks a head has; NaN beyond them."""

    def __init__(self, heads: int = 32, kv_heads: int = 8, dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> None:
        rows, width, capacity = len(HISTORIES), heads + 2 * kv_heads, 4100
        self.heads, self.kv_heads = heads, kv_heads
        self.qkv = randn(rows, width, dim, seed=0, dtype=dtype)
        self.k, self.v = (randn(rows, kv_heads, capacity, dim, seed=seed, dtype=dtype) for seed in (1, 2))
        self.seq_lens = torch.tensor(HISTORIES, device="cuda")
        beyond = (torch.arange(capacity, device="cuda") >= self.seq_lens[:, None])[:, None, :, None]
        self.k.masked_fill_(beyond, NAN)
        self.v.masked_fill_(beyond, NAN)
        angles = randn(rows, dim // 4, seed=3) * 9
        self.options: dict[str, Any] = {
            "bias": randn(width, dim, seed=4, dtype=dtype),
            "rotary": torch.cat((angles.cos(), angles.sin()), 1),
            "src_mask": randn(rows, heads, 1, capacity, seed=5),
            "out_shift": randn(heads, dim, seed=6),
            "out_smooth": randn(heads, dim, seed=7),
        }

    def run(self, **changes: Any) -> Tensor:
        k = changes.pop("cache_k", None)
        options = self.options | changes
        return masked_multihead_attention(
            self.qkv, self.k.clone() if k is None else k, self.v.clone(), self.seq_lens, **options
        )

    def in_torch(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The reference computing with everything in `dtype`: (out, k, v)."""
        out = torch.zeros(len(HISTORIES), self.heads, self.qkv.shape[2], dtype=dtype, device="cuda")
        k, v = self.k.to(dtype), self.v.to(dtype)
        masked_in_torch(out, self.qkv.to(dtype), k, v, self.seq_lens, **self.options)
        return out, k, v

    def in_low_precision(self) -> Tensor:
        """PyTorch's own attention in the case's dtype, a row at a time."""
        _, k, v = self.in_torch(self.qkv.dtype)
        from onewave.ops.append_kv.reference import rotate

        q = rotate(self.qkv.float() + self.options["bias"].float(), self.options["rotary"])[:, : self.heads].to(k.dtype)
        rows = []
        for row, history in enumerate(HISTORIES):
            keys, values = (c[row, :, : history + 1].repeat_interleave(self.heads // self.kv_heads, 0) for c in (k, v))
            mask = self.options["src_mask"][row, :, :, : history + 1].to(k.dtype)
            o = torch.nn.functional.scaled_dot_product_attention(q[row, :, None], keys, values, attn_mask=mask)[:, 0]
            rows.append((o + self.options["out_shift"].to(k.dtype)) * self.options["out_smooth"].to(k.dtype))
        return torch.stack(rows)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (7, 1, 96), (4, 4, 256)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("steps", [64, 128, 4097])
def test_histories_around_a_block_and_long_ones(dtype, heads, kv_heads, dim, packed, steps):
    case = Case(heads, kv_heads, dim, dtype)
    exact, _, _ = case.in_torch(torch.float64)
    k = pack_k(case.k) if packed else case.k.clone()
    out = case.run(cache_k=k, steps_per_block=steps)
    assert (out.double() - exact).abs().max() <= 2 * (case.in_low_precision().double() - exact).abs().max() + 1e-5
    _, right_k, _ = case.in_torch(dtype)
    stored = unpack_k(k) if packed else k
    assert torch.equal(stored.isnan(), right_k.isnan())
    torch.testing.assert_close(stored.nan_to_num(), right_k.nan_to_num(), atol=1e-6, rtol=2 * torch.finfo(dtype).eps)


def test_decode_attention_of_a_ragged_batch_repeats_a_thousand_times_and_row_by_row():
    lengths = [1, 4096, 0, 63, 64, 65, 700, 2047, 2048, 2049, 4095, 3000, 128, 5, 999, 1024]
    q, k, v = (
        randn(len(lengths), n, s, 128, seed=n + s, dtype=torch.bfloat16) for n, s in ((32, 1), (8, 4096), (8, 4096))
    )
    seq_lens = torch.tensor(lengths, device="cuda")
    first = decode_attention(q, k, v, seq_lens)
    for row in range(len(lengths)):
        pick = slice(row, row + 1)
        assert torch.equal(decode_attention(q[pick], k[pick], v[pick], seq_lens[pick]), first[pick])
    # Programs race to be the one that merges, differently each time.
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        different += (decode_attention(q, k, v, seq_lens) != first).sum()
    assert different == 0


@pytest.mark.parametrize("rows", [2, 40, 300])
def test_rows_that_follow_one_another_in_a_program_are_right(rows):
    lengths = torch.randint(0, 1500, (rows,), generator=torch.Generator().manual_seed(rows)).cuda()
    q, k, v = (randn(rows, n, s, 64, seed=n + s, dtype=torch.bfloat16) for n, s in ((8, 1), (2, 1500), (2, 1500)))
    out = decode_attention(q, k, v, lengths)
    exact, plain = (
        decode_attention_in_torch(q.to(dtype), k.to(dtype), v.to(dtype), lengths)[0]
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert (out.double() - exact).abs().max() <= 2 * (plain.double() - exact).abs().max() + 1e-5


@pytest.mark.parametrize("operator", ["masked_multihead_attention", "decode_attention"])
def test_a_call_neither_synchronises_nor_allocates_beyond_its_output(operator):
    case = Case()
    out = torch.empty(len(HISTORIES), case.heads, 128, dtype=torch.bfloat16, device="cuda")
    k, v = case.k.clone(), case.v.clone()
    case.options["finished"] = case.seq_lens == 1

    def call() -> None:
        if operator == "decode_attention":
            decode_attention(case.qkv[:, : case.heads], k, v, case.seq_lens, out=out)
        else:
            masked_multihead_attention(case.qkv, k, v, case.seq_lens, out=out, **case.options)

    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_one_graph_serves_lengths_that_change_on_the_device():
    case = Case()
    case.k.nan_to_num_()
    case.v.nan_to_num_()
    out = torch.empty(len(HISTORIES), case.heads, 128, dtype=torch.bfloat16, device="cuda")
    k, v, lengths = case.k.clone(), case.v.clone(), case.seq_lens.clone()

    def call() -> None:
        masked_multihead_attention(case.qkv, k, v, lengths, out=out, **case.options)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for histories in (HISTORIES, [5, -1, 4099, 0, 300, 2, 128]):
        k.copy_(case.k)
        v.copy_(case.v)
        lengths.copy_(torch.tensor(histories))
        out.fill_(7)
        graph.replay()
        case.seq_lens = lengths.clone()
        right = case.run(out=torch.full_like(out, 7))
        assert torch.equal(out, right)


def test_it_runs_on_the_callers_stream():
    case = Case()
    right = case.run()
    late, stream = torch.zeros_like(case.qkv), torch.cuda.Stream()
    k, v, ready = case.k.clone(), case.v.clone(), case.qkv.clone()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(ready)
        out = masked_multihead_attention(late, k, v, case.seq_lens, **case.options)
    stream.synchronize()
    assert torch.equal(out, right)


def test_rows_more_than_two_to_the_31_elements_apart():
    dim, capacity, far = 128, 256, 2**31
    flat = torch.zeros(far + capacity * dim, dtype=torch.float16, device="cuda")
    k, v = (
        flat.as_strided((2, 1, capacity // 2, dim), (far, dim, dim, 1), start) for start in (0, capacity // 2 * dim)
    )
    k.copy_(randn(*k.shape, seed=1, dtype=k.dtype))
    v.copy_(randn(*v.shape, seed=2, dtype=v.dtype))
    qkv, lengths = randn(2, 4, dim, seed=3, dtype=k.dtype), torch.tensor([100, 90], device="cuda")
    near_k, near_v = k.contiguous(), v.contiguous()
    right = masked_multihead_attention(qkv, near_k, near_v, lengths)
    assert torch.equal(masked_multihead_attention(qkv, k, v, lengths), right)
    assert torch.equal(k, near_k)
    assert torch.equal(v, near_v)
    k.zero_()
    v.zero_()
    slots = torch.arange(2, device="cuda")
    append_kv(qkv.flatten(1), None, k, v, slots, lengths, num_heads=2)
    assert torch.equal(k[slots, 0, lengths], qkv[:, 2])
    assert torch.equal(v[slots, 0, lengths], qkv[:, 3])
