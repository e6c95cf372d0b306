"""Kernels launched before their predecessors have ended give what they give one by one, however late those write."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false, reportMissingTypeStubs=false, reportArgumentType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownVariableType=false
# (Triton ships no type information.)

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kit.operands.random import randn_on_gpu as randn
from onewave.gpu import dependent_launch as dependent_launch_impl
from onewave.gpu.dependent_launch import after_last
from onewave.gpu.launch import launch_kernel
from onewave.ops.append_kv import append_kv
from onewave.ops.decode_attention import decode_attention
from onewave.ops.ffn import ffn
from onewave.ops.linear import linear
from onewave.ops.masked_multihead_attention import masked_multihead_attention
from onewave.ops.rms_norm import add_rms_norm, rms_norm
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
            update = linear(attended.flatten(1), o)
            normed, stream = add_rms_norm(update, stream, gain, 1e-5)
            update = linear(swiglu(linear(normed, up)), down)
            seen += [stream, update]
        logits = linear(update, head, out_dtype=torch.float32)
        return [*seen, logits, greedy(logits)]

    return run


def one_by_one(run: Callable[[], list[Tensor]], monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """As on a GPU without dependent launches."""

    def of_ampere(device: torch.device) -> tuple[int, int]:
        return 8, 0

    with monkeypatch.context() as patch:
        # Not has_dependent_launch itself: an operator first loaded here would keep what stands in for it.
        patch.setattr(dependent_launch_impl, "capability", of_ampere)
        return [found.clone() for found in run()]


def recorded(run: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of the calls, and what it writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found


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
    graph, found = recorded(run)
    for _ in range(1000):
        for tensor in found:
            tensor.zero_()
        # Two in a row: the second begins while the first one ends.
        graph.replay()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@triton.jit
def late_copy(source_ptr, target_ptr, count, BLOCK: tl.constexpr):
    """A copy that lets the next kernel begin, and then takes its time."""
    after_last(True)
    for _ in range(4):
        tl.inline_asm_elementwise(
            "nanosleep.u32 1000; mov.u32 $0, $1;", "=r,r", [count], dtype=tl.int32, is_pure=False, pack=1
        )
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + at, tl.load(source_ptr + at, mask=at < count), mask=at < count)


def reader(name: str) -> tuple[tuple[int, ...], Callable[[Tensor], Tensor]]:
    """The shape of what a kernel of that name reads, and a call of it."""
    weight, gain = randn(HIDDEN, HIDDEN, seed=1) * 0.03, randn(HIDDEN, seed=2)
    k_cache, v_cache = (randn(2, KV_HEADS, 600, DIM, seed=seed) for seed in (3, 4))
    lengths = torch.tensor([513, 600], device="cuda")
    positions = lengths - 1
    slots = torch.arange(2, device="cuda")
    up, down = randn(INNER, HIDDEN, seed=5) * 0.03, randn(HIDDEN, INNER, seed=6) * 0.03
    queries = randn(2, HEADS, DIM, seed=7)

    def decode(q: Tensor, k: Tensor, lengths: Tensor, backend: str) -> Tensor:
        return decode_attention(q, k, v_cache, lengths, backend=backend)

    width = HEADS + 2 * KV_HEADS
    many = [randn(64, KV_HEADS, 600, DIM, seed=seed) for seed in (10, 11)]
    asked = randn(64, HEADS, DIM, seed=12)

    def of_lengths(rows: int) -> Callable[[Tensor], Tensor]:
        def call(lengths: Tensor) -> Tensor:
            return decode_attention(asked[:rows], many[0][:rows], many[1][:rows], lengths, backend="gluon")

        return call

    # A row in pages of 8, and one whose new token is in the cache already, so that no call changes it.
    paged = [cache[:1].unflatten(2, (-1, 8)).transpose(1, 2).flatten(0, 1).contiguous() for cache in many]
    table = torch.arange(75, device="cuda", dtype=torch.int32)[None]
    projection = randn(1, width * DIM, seed=13)

    def in_pages(lengths: Tensor) -> Tensor:
        return decode_attention(asked[:1], *paged, lengths, block_table=table, backend="gluon")

    def masked(lengths: Tensor) -> Tensor:
        return masked_multihead_attention(projection, k_cache[:1], v_cache[:1], lengths, backend="gluon")

    if name == "masked_multihead_attention, lengths of a row":
        for length in (1, 599):
            masked(torch.tensor([length], device="cuda"))
    calls: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
        "decode_attention, lengths of a row in pages": ((1,), in_pages),
        "masked_multihead_attention, lengths of a row": ((1,), masked),
        # The keys of the last lengths are asked for before these have come.
        **{f"decode_attention, lengths of {rows}": ((rows,), of_lengths(rows)) for rows in (1, 16, 64)},
        "linear": ((1, HIDDEN), lambda x: linear(x, weight)),
        "linear, eight tokens": ((8, HIDDEN), lambda x: linear(x, weight, out_dtype=torch.float32)),
        "rms_norm": ((3, HIDDEN), lambda x: rms_norm(x, gain, 1e-5)),
        "swiglu": ((3, HIDDEN), swiglu),
        "append_kv": (
            (2, width * DIM),
            lambda x: append_kv(x, None, k_cache, v_cache, slots, positions, num_heads=HEADS, eps=1e-5),
        ),
        "ffn": ((1, HIDDEN), lambda x: ffn(x, up, down, backend="wave")),
    }
    for backend in ("triton", "gluon"):
        calls |= {
            f"decode_attention, queries, {backend}": (
                (2, HEADS, DIM),
                lambda x, backend=backend: decode(x, k_cache, lengths, backend),
            ),
            f"decode_attention, keys, {backend}": (
                (2, KV_HEADS, 600, DIM),
                lambda x, backend=backend: decode(queries, x, lengths, backend),
            ),
            f"decode_attention, lengths, {backend}": (
                (2,),
                lambda x, backend=backend: decode(queries, k_cache, x, backend),
            ),
            f"masked_multihead_attention, {backend}": (
                (2, width * DIM),
                lambda x, backend=backend: masked_multihead_attention(x, k_cache, v_cache, positions, backend=backend),
            ),
        }
    return calls[name]


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="Hopper's")
@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "linear, eight tokens",
        "rms_norm",
        "swiglu",
        "append_kv",
        "ffn",
        *(f"decode_attention, lengths of {rows}" for rows in (1, 16, 64)),
        "decode_attention, lengths of a row in pages",
        "masked_multihead_attention, lengths of a row",
        *(
            f"{what}, {backend}"
            for what in (
                "decode_attention, queries",
                "decode_attention, keys",
                "decode_attention, lengths",
                "masked_multihead_attention",
            )
            for backend in ("triton", "gluon")
        ),
    ],
)
def test_a_kernel_waits_for_what_is_written_late(name: str) -> None:
    shape, call = reader(name)
    sources = [randn(*shape, seed=seed) for seed in (8, 9)]
    if "lengths" in name:
        rows = shape[0]
        # The second ones leave programs without keys; 599, as masked attention adds one to a cache of 600.
        both = ([513, 600], [64, 300]) if rows == 2 else ([599] * rows, [1] + [0] * (rows - 1))
        sources = [torch.tensor(lengths, device="cuda", dtype=torch.int32) for lengths in both]
    x = torch.empty_like(sources[0])
    expected: list[Tensor] = []
    for source in sources:
        x.copy_(source)
        torch.cuda.synchronize()
        expected.append(call(x).clone())
        torch.cuda.synchronize()
    assert not torch.equal(*expected)

    def written_late() -> list[Tensor]:
        found: list[Tensor] = []
        for source in (*sources, *sources):
            launch_kernel(
                late_copy, (triton.cdiv(x.numel(), 1024),), source, x, x.numel(), BLOCK=1024, num_warps=1,
                launch_pdl=True,
            )  # fmt: skip
            found.append(call(x))
        return found

    graph, found = recorded(written_late)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        graph.replay()
        for at, out in enumerate(found):
            wrong += (out != expected[at % 2]).any()
    assert int(wrong) == 0
