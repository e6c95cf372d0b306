"""The m16n8k16 attention kernel on a GPU: every mask and length against float64, hard logits, packed sequences."""

import random
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch

from kit.device import pretend
from kit.operands.attention_on_gpu import LENGTHS, MASKS, check_hard_logits, check_packed, check_repeats, framed
from kit.operands.attention_on_gpu import check as check_on
from onewave.base.errors import UnsupportedError
from onewave.ops.attention.op import attention

SUITS = torch.cuda.is_available() and (8, 0) <= torch.cuda.get_device_capability() <= (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not SUITS, reason="needs sm_80 to sm_90")]
BF16, FP16 = torch.bfloat16, torch.float16
MANY, FEW = 1_000_000, 1
"""Processors for which all tiles are narrow, and wide."""

# A kernel compiles in seconds, and every combination of head_dim, dtype, flags, tile and heads of a group is one of its
# own: every mask once, head_dims and dtypes with a plain and a full mask, the narrow tile and groups with three.
PLAIN, FULL = MASKS[1], MASKS[8]
SWEEP: list[tuple[int, torch.dtype, dict[str, Any], int]] = [(128, BF16, mask, FEW) for mask in MASKS]
SWEEP += [(d, t, PLAIN, FEW) for d, t in ((64, FP16), (256, BF16), (96, FP16), (80, BF16), (16, BF16))]
SWEEP += [(d, t, FULL, FEW) for d, t in ((64, BF16), (128, FP16), (40, FP16))]
SWEEP += [(d, BF16, mask, MANY) for d, mask in ((128, MASKS[0]), (128, FULL), (64, PLAIN))]
GROUPED = [(128, MASKS[0], FEW, (32, 8)), (64, FULL, FEW, (7, 1)), (128, PLAIN, MANY, (9, 3))]


check = partial(check_on, "mma")


def sweep(head_dim: int, dtype: torch.dtype, mask: dict[str, Any], heads: tuple[int, int]) -> None:
    draw = random.Random(head_dim)
    for seed, (num_queries, num_keys) in enumerate(LENGTHS):
        first = draw.random() < 0.5
        q = framed((2, heads[0], num_queries, head_dim), dtype, seed, tokens_first=first)
        k = framed((2, heads[1], num_keys, head_dim), dtype, seed + 1, tokens_first=first)
        v = framed((2, heads[1], num_keys, head_dim), dtype, seed + 2, tokens_first=first)
        check(q, k, v, mask, (num_queries, num_keys, heads, first))


@pytest.mark.parametrize(("head_dim", "dtype", "mask", "processors"), SWEEP)
def test_every_length_and_mask_agrees_with_float64(
    head_dim: int, dtype: torch.dtype, mask: dict[str, Any], processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, torch.cuda.get_device_capability(), num_sms=processors)
    sweep(head_dim, dtype, mask, (4, 4))


@pytest.mark.parametrize(("head_dim", "mask", "processors", "heads"), GROUPED)
def test_heads_of_a_group_share_a_tile_at_every_length(
    head_dim: int, mask: dict[str, Any], processors: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, torch.cuda.get_device_capability(), num_sms=processors)
    sweep(head_dim, BF16, mask, heads)


@pytest.mark.parametrize("head_dim", [40, 128])
def test_rows_at_any_element_expanded_axes_and_scales_of_any_sign(head_dim: int) -> None:
    for mask in ({"causal": True}, {"causal": True, "scale": -0.2}, {"causal": True, "scale": 0.0}):
        q, k, v = (torch.randn(2, n, 4, head_dim + 3, device="cuda").to(BF16).transpose(1, 2) for n in (200, 333, 333))
        check(q[..., 1:-2], k[:, :2, :, 2:-1], v[:, 1:3, :, :-3], mask, mask)
        one = torch.randn(1, 1, 333, head_dim, device="cuda").to(BF16).expand(2, 2, -1, -1)
        check(q[..., :head_dim].contiguous(), one, one, mask, mask)


@pytest.mark.parametrize(("head_dim", "dtype"), [(128, BF16), (64, FP16)])
def test_hard_logits_stay_exact(head_dim: int, dtype: torch.dtype) -> None:
    rise = torch.linspace(0.1, 12, 1500, device="cuda")
    check_hard_logits("mma", head_dim, dtype, [{}, {"causal": True}], [1.0, 2.0, 4.0], rise)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_sequences_equal_each_alone_bit_for_bit(head_dim: int) -> None:
    check_packed("mma", head_dim, [((8, 2), MASKS[1]), ((3, 3), MASKS[5])])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_rows_bits_depend_on_no_other_row_no_tile_and_no_run(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q = framed((3, 16, 900, head_dim), BF16, 0, tokens_first=True)
    k, v = (framed((3, 4, 900, head_dim), BF16, seed, tokens_first=True) for seed in (1, 2))
    given = {"causal": True, "return_lse": True, "backend": "mma"}
    whole, whole_lse = attention(q, k, v, **given)
    for processors in (FEW, MANY):
        pretend(monkeypatch, torch.cuda.get_device_capability(), num_sms=processors)
        for batch, last in ((slice(0, 3), 900), (slice(1, 2), 900), (slice(0, 3), 130), (slice(1, 3), 31)):
            part, lse = attention(q[batch, :, 900 - last :], k[batch], v[batch], **given)
            assert torch.equal(part, whole[batch, :, 900 - last :])
            assert torch.equal(lse, whole_lse[batch, :, 900 - last :])
    check_repeats("mma", q, k, v, whole)


def test_a_captured_call_replays_and_follows_its_inputs() -> None:
    q, k, v = (torch.randn(2, n, 300, 128, device="cuda").to(BF16) for n in (8, 2, 2))
    attention(q, k, v, causal=True, backend="mma")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, causal=True, backend="mma")
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(out, attention(q, k, v, causal=True, backend="mma"))


RANDOM_SHAPES = """
import random, torch
from onewave.ops.attention.op import attention
draw = random.Random({seed})
for _ in range(250):
    group, head_dim = draw.choice([1, 4]), 64
    b, h, n, m = draw.randint(1, 5), draw.randint(1, 5), draw.randint(1, 3000), draw.randint(1, 3000)
    q = torch.randn(b, h * group, n, head_dim, device="cuda", dtype=torch.bfloat16) * draw.choice([1, 1, 8])
    k, v = (torch.randn(b, h, m, head_dim, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    causal = draw.random() < 0.5
    out = attention(q, k, v, causal=causal, backend="mma")
    assert (out.float() - attention(q, k, v, causal=causal, backend="triton").float()).abs().max() < 0.1
"""


@pytest.mark.parametrize("seed", [0, 1])
def test_random_shapes_agree_with_the_portable_kernel(seed: int) -> None:
    # In a process of its own: a kernel that does not end can't be stopped otherwise.
    subprocess.run([sys.executable, "-c", RANDOM_SHAPES.format(seed=seed)], check=True, timeout=200)


def test_what_it_does_not_take_is_refused() -> None:
    q, k, v = (torch.randn(1, 2, 30, 64, device="cuda").to(BF16) for _ in "qkv")
    with pytest.raises(UnsupportedError, match="neither ALiBi nor bias"):
        attention(q, k, v, bias=torch.zeros(30, device="cuda"), backend="mma")
