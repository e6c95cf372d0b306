"""After `onewave warm` the common kinds of prefill attention compile nothing any more, in any process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from onewave.wave.launch import runs_here

CARD = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not runs_here(CARD), reason="needs a card of compute capability 9.0"),
]
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


def compiled(cache: Path) -> list[str]:
    return sorted(path.parent.name for path in cache.rglob("*.cubin"))


def test_nothing_is_left_to_compile(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "onewave", "warm", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    before = compiled(tmp_path)
    assert len(before) >= len(report["calls"])
    subprocess.run([sys.executable, "-c", CALLS], env=environment, check=True)
    assert compiled(tmp_path) == before
