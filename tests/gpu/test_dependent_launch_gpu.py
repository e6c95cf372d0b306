"""Kernels launched before their predecessors have ended give what they give one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from onewave.ops import dependent_launch_impl
from onewave.ops.append_kv import append_kv
from onewave.ops.backends import load
from onewave.ops.decode_attention import decode_attention
from onewave.ops.linear import linear
from onewave.ops.rms_norm import add_rms_norm
from onewave.ops.sampling import greedy
from onewave.ops.swiglu import swiglu

pytestmark = pytest.mark.gpu

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB = 1024, 16, 4, 64, 4096, 32064


def chain(tokens: int, seed: int = 0) -> Callable[[], list[Tensor]]:
    """Two layers and a greedy token, whose every kernel reads what the one before it wrote."""
    made = torch.Generator("cuda").manual_seed(seed)

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=made, device="cuda", dtype=dtype) * shape[-1] ** -0.5

    x, residual, gain = randn(tokens, HIDDEN), randn(tokens, HIDDEN, dtype=torch.float32), randn(HIDDEN)
    qkv, o = randn((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), randn(HIDDEN, HEADS * DIM)
    up, down, head = randn(2 * INNER, HIDDEN), randn(HIDDEN, INNER), randn(VOCAB, HIDDEN)
    k, v = randn(tokens, KV_HEADS, 600, DIM), randn(tokens, KV_HEADS, 600, DIM)
    slots = torch.arange(tokens, device="cuda")
    positions = torch.full_like(slots, 512)
    lengths = (positions + 1).int()

    def run() -> list[Tensor]:
        update, stream = x, residual
        seen: list[Tensor] = []
        for _ in range(2):
            normed, stream = add_rms_norm(update, stream, gain, 1e-5)
            q = append_kv(linear(normed, qkv), None, k, v, slots, positions, num_heads=HEADS, eps=1e-5)
            attended = decode_attention(q, k, v, lengths)
            assert isinstance(attended, Tensor)
            update = linear(attended.flatten(1), o)
            normed, stream = add_rms_norm(update, stream, gain, 1e-5)
            update = linear(swiglu(linear(normed, up)), down)
            seen += [stream, update]
        logits = linear(update, head, out_dtype=torch.float32)
        return [*seen, logits, greedy(logits)]

    return run


def one_by_one(run: Callable[[], list[Tensor]], monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """As on a card without dependent launches."""

    def never(tensor: Tensor) -> bool:
        return False

    with monkeypatch.context() as patch:
        # By their full names the operators are what their packages export, not the modules.
        for module in (dependent_launch_impl, load("linear", "triton_impl")):
            patch.setattr(module, "has_dependent_launch", never)
        return [found.clone() for found in run()]


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_a_chain_of_dependent_launches_has_the_bits_of_single_ones(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = chain(tokens)
    expected = one_by_one(run, monkeypatch)
    for _ in range(200):
        for found, wanted in zip(run(), expected, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("tokens", [1, 8])
def test_a_graph_of_dependent_launches_repeats_its_bits(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = chain(tokens, seed=1)
    expected = one_by_one(run, monkeypatch)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(1000):
        for tensor in found:
            tensor.zero_()
        # Two in a row: the second begins while the first one ends.
        graph.replay()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
