"""`auto` on a GPU whose measurements the table has: the backend that was fastest, its bits, and no surprises."""

import pytest
import torch
from torch import Tensor

from kit.operands.on_gpu import GPU, ON_WAVE
from onewave.ops.explain import explain
from onewave.ops.ffn import ffn
from onewave.ops.ffn.measured import MEASURED

NAME = torch.cuda.get_device_name(GPU) if GPU.type == "cuda" else ""
KNOWN = [row for row in MEASURED if row.block.gpu == NAME and row.rows <= 8192]
pytestmark = [
    *ON_WAVE,
    pytest.mark.skipif(not KNOWN, reason="needs a GPU that the table knows"),
]


def weights(gated: bool, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
    dice = torch.Generator("cuda").manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=dice, device="cuda") * shape[-1] ** -0.5).bfloat16()

    return randn(14336, 4096), randn(4096, 14336), randn(14336, 4096) if gated else None


def rows(count: int) -> Tensor:
    return torch.randn(count, 4096, generator=torch.Generator("cuda").manual_seed(count), device="cuda").bfloat16()


@pytest.mark.parametrize("gated", [False, True])
def test_auto_gives_the_bits_of_the_backend_that_explain_names(gated: bool) -> None:
    up, down, gate = weights(gated)
    for row in (each for each in KNOWN if each.block.gated is gated):
        x = rows(row.rows)
        named = explain("ffn", x.shape, up.shape, down.shape, device=GPU, gated=gated).backend
        assert named == row.best
        assert torch.equal(ffn(x, up, down, w_gate=gate), ffn(x, up, down, w_gate=gate, backend=named))


def test_more_blocks_than_packed_copies_and_weights_that_change_give_right_numbers() -> None:
    blocks = [weights(False, seed) for seed in range(6)]
    x = rows(1)
    for _ in range(2):
        for up, down, _gate in blocks:
            expected = ffn(x, up, down, backend="torch").float()
            assert (ffn(x, up, down).float() - expected).abs().max() <= 0.05 * expected.abs().max()
    up, down, _gate = blocks[0]
    before = ffn(x, up, down)
    down.neg_()
    assert torch.equal(ffn(x, up, down), -before)


def test_auto_can_be_recorded_cold_and_warm() -> None:
    up, down, gate = weights(True, seed=9)
    for count in (1, 64, 512, 4096):
        x = rows(count)
        expected = ffn(x, up, down, w_gate=gate, backend="torch").float()
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = ffn(x, up, down, w_gate=gate)
            graph.replay()
            torch.cuda.synchronize()
            assert (found.float() - expected).abs().max() <= 0.05 * expected.abs().max()
            ffn(x, up, down, w_gate=gate)
