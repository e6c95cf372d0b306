"""Hopper's decode kernel on a GPU: the same bits as the Triton kernel, for any call, and again at every launch."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.operands.random import randn_on_gpu as randn
from onewave.base.errors import UnsupportedError
from onewave.ops.decode_attention import decode_attention
from onewave.ops.masked_multihead_attention import masked_multihead_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="a kernel of sm_90"
    ),
]
DRAW = random.Random(1)
RAGGED = [DRAW.randint(0, 4096) for _ in range(16)]
ODD = [1, 63, 64, 65, 127, 128, 129, 0, -1, 4095, 2049, 5]


def operands(
    lengths: list[int],
    heads: int = 32,
    dim: int = 128,
    queries: int = 1,
    capacity: int = 4096,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, lengths; NaN behind every row's keys."""
    q = randn(len(lengths), heads, queries, dim, seed=0, dtype=dtype)
    k, v = (randn(len(lengths), 8, capacity, dim, seed=seed, dtype=dtype) for seed in (1, 2))
    for row, length in enumerate(lengths):
        k[row, :, max(0, length) :] = v[row, :, max(0, length) :] = float("nan")
    return q, k, v, torch.tensor(lengths, device="cuda")


def run(backend: str, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out = torch.full_like(q, 7.0)
    found = decode_attention(q, k, v, lengths, out=out, return_lse=True, backend=backend, **options)
    kept = lengths >= 0
    return out, found[1][kept]


def check(*given: Any, **options: Any) -> None:
    right, right_lse = run("triton", *given, **options)
    for backend in ("gluon", "auto"):
        out, lse = run(backend, *given, **options)
        assert torch.equal(out, right)
        assert torch.equal(lse, right_lse)
    assert not right.isnan().any()


@pytest.mark.values
@pytest.mark.parametrize("lengths", [[0], [1], [3000], [4096], [4096] * 16, RAGGED, ODD, [4096] * 100], ids=len)
@pytest.mark.parametrize("dim", [128, 64, 80])
def test_any_lengths_have_the_triton_kernels_bits(lengths: list[int], dim: int) -> None:
    check(*operands(lengths, dim=dim))


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({}, {"window": 100}),
        ({"heads": 8, "queries": 5}, {"window": 200}),
        ({"heads": 8, "queries": 8, "dim": 64}, {}),
        ({"dtype": torch.float16}, {"softcap": 5.0}),
        ({}, {"split_size": 256, "scale": 0.2}),
        ({}, {"sinks": torch.linspace(-2, 2, 32)}),
    ],
)
def test_masks_queries_and_splits_have_the_triton_kernels_bits(shape: dict[str, Any], options: dict[str, Any]) -> None:
    options = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in options.items()}
    check(*operands(RAGGED, **shape), **options)


@pytest.mark.parametrize(
    ("cache", "dtype", "shape", "lengths"),
    [
        (torch.int8, torch.bfloat16, {"dim": 128}, RAGGED),
        (torch.int8, torch.float16, {"dim": 80}, [3000]),
        (torch.float8_e4m3fn, torch.bfloat16, {"dim": 128}, ODD),
        (torch.float8_e4m3fn, torch.float16, {"dim": 128}, [4096] * 100),
        (torch.float8_e4m3fn, torch.bfloat16, {"dim": 96}, [4096]),
        (torch.int8, torch.bfloat16, {"dim": 64}, ODD),
        (torch.int8, torch.float16, {"dim": 48}, [4096]),
        (torch.float8_e4m3fn, torch.bfloat16, {"dim": 64}, RAGGED),
        (torch.float8_e4m3fn, torch.float16, {"dim": 64}, [4096] * 100),
        (torch.float8_e4m3fn, torch.bfloat16, {"dim": 64, "heads": 112}, RAGGED),
        (torch.int8, torch.bfloat16, {"dim": 64, "heads": 80}, [3000]),
    ],
)
def test_a_cache_in_8_bits_has_the_triton_kernels_bits(
    cache: torch.dtype, dtype: torch.dtype, shape: dict[str, int], lengths: list[int]
) -> None:
    q, k, v, seq_lens = operands(lengths, dtype=dtype, **shape)
    k, v = ((each.float() * 40).nan_to_num(127).clamp(-128, 127).to(cache) for each in (k, v))
    k_scale, v_scale = (torch.linspace(0.01, 0.03, 8, device="cuda") for _ in "kv")
    check(q, k, v, seq_lens, k_scale=k_scale, v_scale=v_scale)
    check(q, k, v, seq_lens, scale=0.001, window=300)


@pytest.mark.parametrize("dim", [128, 64])
def test_a_nan_in_8_bits_stays_one(dim: int) -> None:
    q, k, v, lengths = operands([130], dim=dim)
    k, v = (torch.zeros(each.shape, device="cuda").to(torch.float8_e4m3fn) for each in (k, v))
    v.view(torch.uint8)[0, 3, 129, 5] = 0x7F
    for backend in ("triton", "gluon"):
        out, _ = run(backend, q, k, v, lengths)
        assert out.isnan().nonzero()[:, [1, 3]].tolist() == [[head, 5] for head in range(12, 16)]


@pytest.mark.parametrize(("length", "window", "queries"), [(104, 40, 2), (65, 1, 2), (3000, 70, 4), (4096, 2000, 8)])
def test_of_a_rows_splits_all_but_the_last_may_be_empty(length: int, window: int, queries: int) -> None:
    """One query of several sees keys that another does not."""
    check(*operands([length], heads=8, queries=queries), window=window)


@pytest.mark.values
@pytest.mark.parametrize(("dim", "cache"), [(128, None), (64, None), (64, torch.float8_e4m3fn)])
@pytest.mark.parametrize("size", [8, 16, 64, 256, 512])
def test_pages_have_the_bits_of_rows_in_one_piece(size: int, dim: int, cache: torch.dtype | None) -> None:
    lengths = [300, 400, 1, 77, 0, 255, 256, 257]
    q, k, v, seq_lens = operands(lengths, dim=dim, capacity=512)
    blocks = 512 // size
    table = torch.randperm(len(lengths) * blocks, device="cuda").view(len(lengths), blocks).to(torch.int32)
    paged = [torch.full((table.numel() + 1, 8, size, dim), float("nan"), dtype=k.dtype, device="cuda") for _ in "kv"]
    for pages, whole in zip(paged, (k, v), strict=True):
        pages[table.flatten().long()] = whole.unflatten(2, (blocks, size)).transpose(1, 2).flatten(0, 1)
    if cache is not None:
        k, v, paged = k.to(cache), v.to(cache), [pages.to(cache) for pages in paged]
    for row, length in enumerate(lengths):
        table[row, max(1, -(-length // size)) :] = -7  # names no block at all
    for window in (None, 90):
        right, _ = run("triton", q, k, v, seq_lens, window=window)
        out, _ = run("gluon", q, *paged, seq_lens, block_table=table, window=window)
        assert torch.equal(out, right)


def test_tokens_outside_heads_are_only_strides() -> None:
    q, k, v, lengths = operands([300, 400, 1, 77], capacity=512)
    turned = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in (k, v)]
    assert torch.equal(run("gluon", q, *turned, lengths)[0], run("triton", q, k, v, lengths)[0])


@pytest.mark.parametrize("rows", [1, 16])
def test_a_thousand_launches_give_the_same_bits(rows: int) -> None:
    given = operands([4096] * rows)
    right, _ = run("gluon", *given)
    for _ in range(1000):
        assert torch.equal(decode_attention(*given, backend="gluon"), right)


def test_a_graph_follows_lengths_that_change_on_the_device() -> None:
    q, k, v, lengths = operands([4096] * 16)
    out = torch.empty_like(q)
    decode_attention(q, k, v, lengths, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_attention(q, k, v, lengths, out=out)
    for new in ([4096] * 16, RAGGED, [1] * 16, [0] * 15 + [4096]):
        lengths.copy_(torch.tensor(new))
        graph.replay()
        assert torch.equal(out, decode_attention(q, k, v, lengths, backend="triton"))


@pytest.mark.values
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("extras", ["none", "rotary, bias", "mask", "bfloat16 mask", "hidden keys", "shift", "int8"])
def test_masked_attention_has_the_triton_kernels_bits_and_cache(rows: int, extras: str) -> None:
    lengths = [4000] if rows == 1 else [0, 127, 128, 129, 1, -1, 64, 4095, *RAGGED[:8]]
    lengths = [min(length, 4095) for length in lengths]
    _, k, v, seq_lens = operands(lengths)
    qkv = randn(rows, 48, 128, seed=4)
    hidden = torch.where(torch.arange(4096, device="cuda") < 3900, float("-inf"), 0.0)
    options: dict[str, Any] = {
        "none": {},
        "rotary, bias": {"rotary": randn(rows, 128, seed=5).float(), "bias": randn(48, 128, seed=6)},
        "mask": {"src_mask": randn(rows, 32, 1, 4096, seed=7).float()},
        "bfloat16 mask": {"src_mask": randn(rows, 32, 1, 4096, seed=7)},
        "hidden keys": {"src_mask": hidden[None, None, None].expand(rows, 1, 1, 4096)},
        "shift": {"out_shift": randn(32, 128, seed=8), "bias": randn(48, 128, seed=6)},
        "int8": {"out_scale": 0.5, "out_shift": randn(32, 128, seed=8), "out_smooth": randn(32, 128, seed=9)},
    }[extras]
    found: list[tuple[Tensor, ...]] = []
    for backend in ("triton", "gluon"):
        caches = k.clone(), v.clone()
        # In float32 no rounding hides another order of sums.
        kinds = {"int8": torch.int8, "bfloat16 mask": torch.float32}
        out = torch.zeros(rows, 32, 128, dtype=kinds.get(extras, qkv.dtype), device="cuda")
        masked_multihead_attention(qkv, *caches, seq_lens, out=out, backend=backend, **options)
        found.append((out, *(cache.nan_to_num(9.0) for cache in caches)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_keys_more_than_two_to_the_31_elements_apart() -> None:
    dim, capacity, far = 128, 256, 2**31
    flat = torch.zeros(far + 2 * capacity * dim, dtype=torch.float16, device="cuda")
    k, v = (flat.as_strided((2, 1, capacity, dim), (far, dim, dim, 1), start) for start in (0, capacity * dim))
    near = [randn(2, 1, capacity, dim, seed=seed, dtype=flat.dtype) for seed in (1, 2)]
    k.copy_(near[0])
    v.copy_(near[1])
    q, lengths = randn(2, 4, 1, dim, seed=3, dtype=flat.dtype), torch.tensor([200, 190], device="cuda")
    right = decode_attention(q, *near, lengths, backend="triton")
    assert torch.equal(decode_attention(q, k, v, lengths, backend="gluon"), right)


def test_what_it_does_not_take_is_refused_by_name_and_goes_elsewhere_by_default() -> None:
    q, k, v, lengths = operands([5, 70], heads=8, dim=128, capacity=512)
    for heads, words in ((128, "16 query rows a KV head"),):
        wide = randn(2, heads, 1, 128, seed=5)
        with pytest.raises(UnsupportedError, match=words):
            decode_attention(wide, k, v, lengths, backend="gluon")
        assert decode_attention(wide, k, v, lengths).shape == wide.shape
    odd = torch.zeros(2, 8, 512, 129, dtype=k.dtype, device="cuda")[..., :128]
    with pytest.raises(UnsupportedError, match="multiples of 16 bytes"):
        decode_attention(q, odd, odd, lengths, backend="gluon")
