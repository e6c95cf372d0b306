"""The doors for other ecosystems on a GPU: bf16, every cache layout, graphs, and transformers' models."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kit.operands.random import randn_bf16
from onewave.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from onewave.ops.decode_attention.op import decode_attention
from onewave.ops.merge_attention.op import merge_attention
from onewave.ops.merge_attention.reference import merge_attention as merge_reference

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
randn = partial(randn_bf16, device=CUDA)


def close(out: Tensor, exact: Tensor, baseline: Tensor) -> bool:
    return bool((out.double() - exact).abs().max() <= 2 * (baseline.double() - exact).abs().max() + 1e-5)


def by_torch(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    """One sequence, [seq, heads, head_dim]."""
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)[0].transpose(0, 1)


def seen(num_queries: int, num_keys: int, left: int | None = None, right: int | None = 0) -> Tensor:
    place = torch.arange(num_queries, device=CUDA)[:, None] + num_keys - num_queries
    key = torch.arange(num_keys, device=CUDA)
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=CUDA)
    if right is not None:
        visible &= key <= place + right
    return visible if left is None else visible & (key >= place - left)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_queries", "num_keys", "head_dim"), [(200, 200, 128), (63, 190, 64), (1, 77, 80)])
@pytest.mark.parametrize("window", [(-1, -1), (50, 0), (20, 10)])
def test_flash_attn_func_keeps_the_error_rule(num_queries, num_keys, head_dim, window, dtype):
    q = randn(2, num_queries, 8, head_dim, dtype=dtype)
    k, v = (randn(2, num_keys, 2, head_dim, seed=i, dtype=dtype) for i in (1, 2))
    out = flash_attn_func(q, k, v, causal=window == (-1, -1), window_size=window)
    visible = seen(num_queries, num_keys, None if window[0] < 0 else window[0], max(window[1], 0))
    for row in range(2):
        exact = by_torch(q[row].double(), k[row].double(), v[row].double(), visible)
        assert close(out[row], exact, by_torch(q[row], k[row], v[row], visible))
    assert out.is_contiguous()


def test_varlen_with_pages_reads_no_page_that_is_not_its_own():
    lens_q, lens_k = [33, 1, 70], [133, 40, 70]
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0, dtype=torch.int32).to(CUDA) for n in (lens_q, lens_k))
    q, k, v = randn(sum(lens_q), 8, 128), randn(sum(lens_k), 2, 128, seed=1), randn(sum(lens_k), 2, 128, seed=2)
    pages = [torch.full((40, 16, 2, 128), float("nan"), dtype=torch.bfloat16, device=CUDA) for _ in "kv"]
    table = torch.full((3, 9), 2**30, dtype=torch.int32)
    free = iter(torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist())
    for row, n in enumerate(lens_k):
        for page in range(-(-n // 16)):
            table[row, page] = at = next(free)
            size, first = min(16, n - 16 * page), int(cu_k[row]) + 16 * page
            for target, source in zip(pages, (k, v), strict=True):
                target[at, :size] = source[first : first + size]
    paged = flash_attn_varlen_func(q, *pages, cu_q, cu_k, 70, 133, causal=True, block_table=table.to(CUDA))
    assert torch.equal(paged, flash_attn_varlen_func(q, k, v, cu_q, cu_k, 70, 133, causal=True))
    for row in range(3):
        mine, keys = slice(int(cu_q[row]), int(cu_q[row + 1])), slice(int(cu_k[row]), int(cu_k[row + 1]))
        visible = seen(lens_q[row], lens_k[row])
        exact = by_torch(q[mine].double(), k[keys].double(), v[keys].double(), visible)
        assert close(paged[mine], exact, by_torch(q[mine], k[keys], v[keys], visible))


@pytest.mark.parametrize("num_queries", [1, 4, 20])
@pytest.mark.parametrize("layout", ["plain", "indexed", "paged"])
def test_a_recorded_step_with_the_cache_serves_lengths_that_change(num_queries, layout):
    capacity, past = 256, torch.tensor([100, 0, 31], dtype=torch.int32, device=CUDA)
    arguments: dict[str, Tensor] = {}
    rows = 3
    if layout == "indexed":
        arguments["cache_batch_idx"], rows = torch.tensor([4, 1, 2], dtype=torch.int32, device=CUDA), 5
    caches = [randn(rows, capacity, 2, 128, seed=i) for i in (1, 2)]
    if layout == "paged":
        arguments["block_table"] = (
            torch.randperm(12, generator=torch.Generator().manual_seed(0)).view(3, 4).int().to(CUDA)
        )
        caches = [cache.view(12, 64, 2, 128) for cache in caches]
    q = randn(3, num_queries, 8, 128)
    new = [randn(3, num_queries, 2, 128, seed=i) for i in (5, 6)]
    angles = randn(capacity, 64, seed=7, dtype=torch.float32)

    def step() -> Tensor:
        return flash_attn_with_kvcache(
            q, *caches, *new, rotary_cos=angles.cos(), rotary_sin=angles.sin(), cache_seqlens=past, causal=True,
            **arguments,
        )  # fmt: skip

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for shift in (0, num_queries, 2 * num_queries):
        past += shift
        before = [cache.clone() for cache in caches]
        graph.replay()
        replayed, written = out.clone(), [cache.clone() for cache in caches]
        for cache, old in zip(caches, before, strict=True):
            cache.copy_(old)
        assert torch.equal(step(), replayed)
        assert all(torch.equal(a, b) for a, b in zip(caches, written, strict=True))


def test_parts_of_a_cache_merge_into_the_whole():
    q, k, v = randn(3, 8, 1, 128), randn(3, 2, 600, 128, seed=1), randn(3, 2, 600, 128, seed=2)
    lengths = torch.full((3,), 600, dtype=torch.int32, device=CUDA)
    whole, whole_lse = decode_attention(q, k, v, lengths, return_lse=True)
    parts = []
    for first, last in ((0, 1), (1, 300), (300, 600)):
        counts = torch.full((3,), last - first, dtype=torch.int32, device=CUDA)
        parts.append(decode_attention(q, k[:, :, first:last], v[:, :, first:last], counts, return_lse=True))
    outs, lses = [p[0] for p in parts], [p[1] for p in parts]
    out, lse = merge_attention(outs, lses)
    torch.testing.assert_close(out, whole, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)
    exact, _ = merge_reference(torch.stack(outs).double(), torch.stack(lses).double())
    baseline, _ = merge_reference(torch.stack(outs), torch.stack(lses))
    assert close(out, exact, baseline)
    assert close(merge_attention(torch.stack(outs), torch.stack(lses))[0], exact, baseline)


@contextmanager
def without_synchronisation() -> Iterator[None]:
    """PyTorch raises on whatever waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("num_queries", [1, 20])
def test_nothing_waits_for_the_device(num_queries):
    q, new = randn(3, num_queries, 8, 64), randn(3, num_queries, 2, 64, seed=1)
    cache = [randn(12, 64, 2, 64, seed=i) for i in (2, 3)]
    table = torch.arange(12, dtype=torch.int32, device=CUDA).view(3, 4)
    past = torch.tensor([100, 0, 31], dtype=torch.int32, device=CUDA)
    angles = randn(256, 32, seed=7, dtype=torch.float32)
    starts = torch.tensor([0, num_queries, 2 * num_queries, 3 * num_queries], dtype=torch.int32, device=CUDA)

    def calls() -> None:
        flash_attn_with_kvcache(
            q, *cache, new, new, rotary_cos=angles, rotary_sin=angles, cache_seqlens=past, causal=True,
            block_table=table,
        )  # fmt: skip
        flash_attn_with_kvcache(q, *cache, new, new, cache_seqlens=past, block_table=table)
        flash_attn_func(q, new, new, causal=True)
        flat, longest = q.flatten(0, 1), num_queries
        flash_attn_varlen_func(flat, *cache, starts, starts, longest, longest, causal=True, block_table=table)

    calls()
    with without_synchronisation():
        calls()


@pytest.mark.parametrize("stacked", [True, False])
def test_a_merge_allocates_its_two_results_and_waits_for_nothing(stacked):
    outs, lses = randn(4, 3, 8, 1, 128), randn(4, 3, 8, 1, seed=1, dtype=torch.float32)
    arguments = (outs, lses) if stacked else (list(outs), list(lses))
    merge_attention(*arguments)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with without_synchronisation():
        kept = merge_attention(*arguments)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == len(kept)


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral, sliding": ("Mistral", {"sliding_window": 40}),
    "gemma2, softcap": ("Gemma2", {"sliding_window": 40, "attn_logit_softcapping": 5.0}),
}


@pytest.mark.parametrize(("family", "options"), MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_transformers_logits_keep_the_error_rule(family, options, side):
    import transformers

    import onewave.compat.transformers  # noqa: F401  (registers the implementation)

    config = getattr(transformers, f"{family}Config")(
        vocab_size=97, hidden_size=256, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, pad_token_id=0, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    eager = getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in eager.parameters():
            if parameter.ndim > 1:
                parameter.copy_((parameter * 4).bfloat16())
    eager = eager.to(CUDA)
    low = copy.deepcopy(eager).bfloat16()
    ours = copy.deepcopy(low)
    ours.set_attn_implementation("onewave")
    ids = torch.randint(3, 97, (2, 150), generator=torch.Generator().manual_seed(1)).to(CUDA)
    mask = torch.ones_like(ids)
    if side != "none":
        mask[0, slice(0, 37) if side == "left" else slice(113, 150)] = 0
    with torch.no_grad():
        exact, baseline, out = (model(ids, attention_mask=mask).logits[mask.bool()] for model in (eager, low, ours))
    assert ours.config._attn_implementation == "onewave"
    assert close(out, exact.double(), baseline)


@pytest.mark.parametrize("side", ["none", "left"])
def test_transformers_generates_with_the_kernels(side):
    import transformers

    import onewave.compat.transformers  # noqa: F401

    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="onewave").eval().bfloat16().to(CUDA)
    ids = torch.randint(3, 97, (2, 30), generator=torch.Generator().manual_seed(1)).to(CUDA)
    mask = torch.ones_like(ids)
    if side == "left":
        mask[0, :11] = 0
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    # A step's choice is the token that the whole prefix, taken at once, finds most likely or ties with.
    whole = torch.cat((mask, torch.ones(2, 12, dtype=mask.dtype, device=CUDA)), 1)
    with torch.no_grad():
        logits = model(tokens, attention_mask=whole).logits[:, 29:-1].float()
    chosen = logits.gather(-1, tokens[:, 30:, None])[..., 0]
    assert (logits.amax(-1) - chosen).max() < 0.02


@pytest.mark.pairs
@pytest.mark.parametrize("num_queries", [1, 8, 33])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_padding_at_the_beginning_of_a_cache_is_left_out(num_queries: int, head_dim: int, causal: bool) -> None:
    pads, past = [0, 7, 130], [200, 65, 170]
    q = randn(3, num_queries, 8, head_dim)
    k_cache, v_cache = (randn(3, 256, 2, head_dim, seed=i) for i in (1, 2))
    k, v = (randn(3, num_queries, 2, head_dim, seed=i) for i in (3, 4))
    expected = [
        [torch.cat((cache[row, pad:n], new[row])) for cache, new in ((k_cache, k), (v_cache, v))]
        for row, (pad, n) in enumerate(zip(pads, past, strict=True))
    ]
    for row, pad in enumerate(pads):
        k_cache[row, :pad] = v_cache[row, :pad] = torch.nan
    lengths, leftpad = (torch.tensor(given, dtype=torch.int32, device=CUDA) for given in (past, pads))
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, cache_leftpad=leftpad, causal=causal
    )
    for row, (keys, values) in enumerate(expected):
        visible = seen(num_queries, len(keys)) if causal else None
        exact = by_torch(q[row].double(), keys.double(), values.double(), visible)
        assert close(out[row], exact, by_torch(q[row], keys, values, visible))
