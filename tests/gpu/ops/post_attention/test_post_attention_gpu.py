"""All of a layer behind attention on a GPU: the separate operators' bits, orders, delays, graphs, stalls, any size."""

import random
import time

import pytest
import torch
from torch import Tensor

from kit.operands.on_gpu import ON_WAVE
from onewave.base.errors import UnsupportedError, WaveStalled
from onewave.ops import PostAttentionWeights, post_attention
from onewave.ops.ffn.chain.launch import rows_planned
from onewave.ops.ffn.chain.plan import ChainTile
from onewave.ops.post_attention.chain.launch import PostAttentionChain
from onewave.ops.post_attention.chain.plan import LayerSizes, plan_layer
from onewave.wave.launch.launch import co_resident

pytestmark = ON_WAVE
EPS = 1e-5
Operands = tuple[Tensor, Tensor, PostAttentionWeights]


def layer(rows: int, attended: int, hidden: int, inner: int, dtype: torch.dtype = torch.bfloat16) -> Operands:
    """Return what attention gives, the residual stream, and weights."""
    dice = torch.Generator("cuda").manual_seed(rows + hidden)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=dice, device="cuda")

    shapes = ((hidden, attended), (2 * inner, hidden), (hidden, inner))
    o, gate_up, down = ((randn(*shape) * shape[1] ** -0.5).to(dtype) for shape in shapes)
    post_norm, next_norm = ((1 + 0.1 * randn(hidden)).to(dtype) for _ in range(2))
    return randn(rows, attended).to(dtype), 2 * randn(rows, hidden), PostAttentionWeights(
        o, post_norm, gate_up, down, next_norm
    )  # fmt: skip


def made(given: Operands, *, test: bool = False, workers: int | None = None, **choices: object) -> PostAttentionChain:
    attended, residual, weights = given
    hidden, inner = residual.shape[1], weights.down.shape[1]
    sizes = LayerSizes(rows_planned(len(attended)), hidden, inner, hidden, True, attended.shape[1])
    count = co_resident(attended.device) if workers is None else workers
    plan = plan_layer(sizes, workers=count, **choices)
    return PostAttentionChain(plan, attended.device, attended.dtype, test=test)


def finished(chain: PostAttentionChain, given: Operands) -> tuple[Tensor, Tensor]:
    found = chain(*given, EPS)
    torch.cuda.synchronize()
    chain.check()
    return found


def same(found: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> bool:
    return all(map(torch.equal, found, right))


@pytest.mark.parametrize(
    ("rows", "attended", "hidden", "inner", "dtype"),
    [
        (2, 4096, 4096, 14336, torch.bfloat16),  # one row alone has another product (row_kernel)
        (65, 2048, 2048, 8192, torch.float16),
        (300, 576, 576, 1536, torch.bfloat16),
        (700, 3072, 3072, 8192, torch.float16),
        (1000, 1024, 1024, 2816, torch.bfloat16),
        (257, 2560, 3008, 1024, torch.bfloat16),
        (2048, 4096, 4096, 14336, torch.bfloat16),
    ],
)
def test_one_launch_gives_the_separate_operators_bits(
    rows: int, attended: int, hidden: int, inner: int, dtype: torch.dtype
) -> None:
    given = layer(rows, attended, hidden, inner, dtype)
    right = post_attention(*given, EPS, backend="separate")
    kept = given[1].clone()
    for _ in range(3):
        assert same(post_attention(*given, EPS, backend="chain"), right)
    assert torch.equal(given[1], kept)
    exact = post_attention(*given, EPS, backend="reference")
    assert (right[0].float() - exact[0].float()).abs().max() < 0.02 * exact[0].float().abs().max()


def test_three_hundred_random_sizes_end_and_give_the_separate_operators_bits() -> None:
    dice = random.Random(7)
    for _ in range(300):
        attended, hidden, inner = 64 * dice.randint(1, 12), 64 * dice.randint(9, 15), 64 * dice.randint(1, 24)
        given = layer(dice.randint(2, 1400), attended, hidden, inner)
        order = dice.choice(("auto", "row", "rows:2", "half_row", "sequential", "hilbert", "accumulate-first-column"))
        began = time.perf_counter()
        found = post_attention(*given, EPS, backend="chain", order=order)
        right = post_attention(*given, EPS, backend="separate")
        torch.cuda.synchronize()
        assert same(found, right)
        assert time.perf_counter() - began < 30


@pytest.mark.parametrize("order", ["auto", "row", "half_row", "sequential", "accumulate-first-column"])
def test_random_delays_orders_and_workers_change_no_bit(order: str) -> None:
    given = layer(400, 256, 640, 1088)
    right = post_attention(*given, EPS, backend="separate")
    for workers in (3, 40, co_resident(given[0].device)):
        chain = made(given, test=True, order=order, workers=workers, tile=ChainTile(2, 128, 6, 2))
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(50):
            for found, expected in zip(chain(*given, EPS), right, strict=True):
                wrong += (found != expected).any()
        finished(chain, given)
        assert int(wrong) == 0


@pytest.mark.parametrize("kind", [2, 3, 0, 1])
def test_a_missing_post_ends_in_wave_stalled_and_the_next_launch_works(kind: int) -> None:
    given = layer(600, 512, 1024, 1536)
    chain = made(given)
    right = finished(chain, given)
    posts = (chain.plan.records[:, 0] == kind) & (chain.plan.records[:, 10] >= 0)
    chain(*given, EPS, keep_back=int(posts.argmax()))
    torch.cuda.synchronize()
    with pytest.raises(WaveStalled, match="post_attention"):
        chain.check()
    assert same(finished(chain, given), right)


def test_graphs_and_other_streams_give_the_same_bits() -> None:
    given = layer(600, 1024, 1024, 2816)
    right = post_attention(*given, EPS, backend="chain")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        recorded = post_attention(*given, EPS, backend="chain")
    for _ in range(10):
        graph.replay()
        torch.cuda.synchronize()
        assert same(recorded, right)
        with torch.cuda.stream(stream):
            found = post_attention(*given, EPS, backend="chain")
        torch.cuda.synchronize()
        assert same(found, right)
    other = layer(100, 1024, 1024, 2816)
    with pytest.raises(UnsupportedError, match="before recording"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        post_attention(*other, EPS, backend="chain")


def test_the_trace_holds_every_task() -> None:
    given = layer(600, 512, 1024, 1536)
    chain = made(given)
    finished(chain, given)
    trace = chain.trace(*given, EPS)
    assert sorted(trace.task.tolist()) == list(range(len(trace)))
    assert {phase.phase for phase in trace.phases()} == {"o", "norm", "up", "down", "next norm"}
