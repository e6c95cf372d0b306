"""Common kinds of prefill attention are prebuilt, and after `onewave warm` have all they need, in any process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit.operands.on_gpu import ON_WAVE

pytestmark = ON_WAVE
CALLS = """
import torch
from onewave.ops import attention, attention_varlen
for head_dim in (64, 128):
    for batch, heads, kv_heads, tokens in ((4, 16, 16, 1024), (1, 32, 8, 3000), (2, 7, 1, 77)):
        q = torch.randn(batch, heads, tokens, head_dim, device="cuda").bfloat16()
        k = torch.randn(batch, kv_heads, tokens, head_dim, device="cuda").bfloat16()
        for causal in (False, True):
            attention(q, k, k, causal=causal)
    for lengths in ([5, 700], [300] * 40):
        starts = torch.tensor([0, *lengths], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)
        q = torch.randn(sum(lengths), 32, head_dim, device="cuda").bfloat16()
        k = torch.randn(sum(lengths), 8, head_dim, device="cuda").bfloat16()
        attention_varlen(q, k, k, starts, starts, max(lengths), max(lengths), causal=True)
torch.cuda.synchronize()
"""

# Prints what Triton was asked for, as (kernel, whether it found it), and a digest of each call's result.
FIRST = """
import hashlib, json, sys, torch
from triton import knobs
from onewave.ops import attention, attention_fp8, attention_varlen
asked, digests = [], []
knobs.compilation.listener = lambda *, src, cache_hit, **others: asked.append((src.fn.__name__, cache_hit))
def keep(made):
    for out in made if isinstance(made, tuple) else [made]:
        digests.append(hashlib.sha256(out.float().cpu().numpy().tobytes()).hexdigest())
torch.manual_seed(0)
kinds, *head_dims = sys.argv[1:]
every = [dict(causal=c, window=w, return_lse=l) for c, w in ((0, None), (1, None), (1, (100, 0))) for l in (0, 1)]
some = [dict(causal=0), dict(causal=1), dict(causal=1, window=(100, 0), return_lse=1)]
starts_of = lambda lengths: torch.tensor([0, *lengths], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)
for dtype in (torch.bfloat16, torch.float16):
    for head_dim in map(int, head_dims):
        options = every if kinds == "every" else some if dtype == torch.bfloat16 else some[:2]
        options = [{name: bool(o) if isinstance(o, int) else o for name, o in each.items()} for each in options]
        for batch, heads, kv_heads, tokens in ((12, 16, 16, 1024), (1, 8, 2, 300)):
            q = torch.randn(batch, heads, tokens, head_dim, device="cuda").to(dtype)
            k, v = (torch.randn(batch, kv_heads, tokens, head_dim, device="cuda").to(dtype) for _ in range(2))
            for each in options:
                keep(attention(q, k, v, **each))
                if head_dim == 128 and dtype == torch.bfloat16:
                    keep(attention_fp8(*(t.to(torch.float8_e4m3fn) for t in (q, k, v)), **each))
            for window in (None, (100, 0)) if kinds == "every" else ():
                keep(attention(q, k, v, causal=True, window=window, softcap=20.0))
                keep(attention(q, k, v, causal=True, window=window, sinks=torch.randn(heads, device="cuda")))
        for lengths in ([5, 700], [300] * 40):
            starts = starts_of(lengths)
            sizes = (starts, starts, max(lengths), max(lengths))
            q = torch.randn(sum(lengths), 32, head_dim, device="cuda").to(dtype)
            k = torch.randn(sum(lengths), 8, head_dim, device="cuda").to(dtype)
            for each in options if kinds == "every" else options[1:]:
                keep(attention_varlen(q, k, k, *sizes, **each))
            for window in (None, (100, 0)) if kinds == "every" else ():
                keep(attention_varlen(q, k, k, *sizes, causal=True, window=window, softcap=20.0))
                sinks = torch.randn(32, device="cuda")
                keep(attention_varlen(q, k, k, *sizes, causal=True, window=window, sinks=sinks))
            for page_size in (16, 32, 64, 128, 256) if kinds == "every" else ():
                pages = -(-max(lengths) // page_size)
                table = torch.arange(len(lengths) * pages, device="cuda").int().reshape(-1, pages)
                k = torch.randn(table.numel(), page_size, 8, head_dim, device="cuda").to(dtype)
                keep(attention_varlen(q, k, k, *sizes, causal=True, block_table=table))
print(json.dumps([asked, digests]))
"""


def first_calls(cache: Path, kinds: str, *head_dims: str, prebuilt: str) -> tuple[dict[str, set[bool]], list[str]]:
    """The compiled kernels that Triton found in a process with empty caches, and the results' digests."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "ONEWAVE_PREBUILT": prebuilt}
    command = [sys.executable, "-c", FIRST, kinds, *head_dims]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    asked, digests = json.loads(done.stdout)
    return {name: {hit for other, hit in asked if other == name} for name, _ in asked}, digests


def test_no_prebuilt_kernel_is_compiled(tmp_path: Path) -> None:
    found, _ = first_calls(tmp_path, "every", "64", "96", "128", "256", prebuilt="1")
    kernels = ("attention_kernel", "sort_slots", "fp8_kernel", "turn_values")
    assert {name: found[name] for name in kernels} == {name: {True} for name in kernels}


def test_prebuilt_kernels_compute_the_bits_of_what_is_compiled_here(tmp_path: Path) -> None:
    found, digests = first_calls(tmp_path / "prebuilt", "some", "128", prebuilt="1")
    made, others = first_calls(tmp_path / "made", "some", "128", prebuilt="0")
    assert found["attention_kernel"] == {True}
    assert made["attention_kernel"] == {False}
    assert digests == others


def compiled(cache: Path) -> list[str]:
    return sorted(path.parent.name for path in cache.rglob("*.cubin"))


@pytest.mark.parametrize("prebuilt", ["0", "1"])
def test_nothing_is_left_to_compile(tmp_path: Path, prebuilt: str) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "ONEWAVE_PREBUILT": prebuilt}
    command = [sys.executable, "-m", "onewave", "warm", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    before = compiled(tmp_path)
    assert len(before) >= len(report["calls"])
    subprocess.run([sys.executable, "-c", CALLS], env=environment, check=True)
    assert compiled(tmp_path) == before
