"""A layer's operations after attention: every arrangement on the same operands, in turns as in bench/ops/ffn.py.

One launch ("chain"); our operators one after the other ("separate"); the same with cuBLAS's products; and each of these
for both halves of the rows on two streams, so that one half's norms and last tiles run beside the other's products.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from onewave.bench.ops.ffn import Arrangement, FFNShape
from onewave.ops.post_attention import PostAttentionWeights, post_attention
from onewave.ops.post_attention.call import PostAttentionCall
from onewave.ops.rms_norm import add_rms_norm
from onewave.ops.swiglu import swiglu

SEPARATE, CUBLAS = "separate", "cuBLAS"
_EPS = 1e-5
# Rows from which both halves are whole row blocks.
_TWO_STREAMS_ROWS = 256

Operands = tuple[Tensor, Tensor, PostAttentionWeights]
Result = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LayerShape(FFNShape):
    """rows, and the sizes of a decoder layer. attended: columns of what attention gives."""

    gated: bool = True
    attended: int = 4096

    operator: ClassVar[str] = "post_attention"
    baseline: ClassVar[str] = SEPARATE
    baseline_name: ClassVar[str] = SEPARATE

    @property
    def weight_bytes(self) -> int:
        return 2 * self.hidden * (3 * self.intermediate + self.attended)

    @property
    def least_bytes(self) -> int:
        """Bytes that every way moves: the matrices, what attention gives, the residual stream in and out, the normed
        rows out."""
        return self.weight_bytes + self.rows * (2 * self.attended + 10 * self.hidden)

    def __str__(self) -> str:
        return f"{self.rows}x{self.attended}x{self.hidden}x{self.intermediate}"

    def arrangements(self, device: torch.device, dtype: torch.dtype, *, copies: int) -> list[Arrangement]:
        operands = [random_layer(self, device, dtype) for _ in range(copies)]
        ways = [_chain(operands)]
        for name, run in ((CUBLAS, with_cublas), (SEPARATE, separately)):
            if self.rows >= _TWO_STREAMS_ROWS:
                ways.append(_arrangement(f"{name}, two streams", on_two_streams(run, device), operands))
            ways.append(_arrangement(name, run, operands))
        return ways


SWEEP = tuple(
    LayerShape(256 << i, hidden, inner, attended=hidden)
    for hidden, inner in ((4096, 14336), (2048, 8192))
    for i in range(8)
)
"""256 to 32,768 rows of the 8B's layer and of the 1B's."""


def random_layer(shape: LayerShape, device: torch.device, dtype: torch.dtype) -> Operands:
    """Return random operands: attention's output, the residual stream, and weights."""
    hidden, inner, attended = shape.hidden, shape.intermediate, shape.attended

    def random(*size: int) -> Tensor:
        return (torch.randn(size, device=device) * size[-1] ** -0.5).to(dtype)

    gains = (1 + 0.1 * torch.randn(2, hidden, device=device)).to(dtype)
    weights = PostAttentionWeights(
        random(hidden, attended), gains[0], random(2 * inner, hidden), random(hidden, inner), gains[1]
    )
    rows = torch.randn(shape.rows, attended, device=device).to(dtype)
    return rows, torch.randn(shape.rows, hidden, device=device), weights


def separately(attended: Tensor, residual: Tensor, weights: PostAttentionWeights) -> Result:
    """Our operators one after the other."""
    return post_attention(attended, residual, weights, _EPS, backend="separate")


def with_cublas(attended: Tensor, residual: Tensor, weights: PostAttentionWeights) -> Result:
    """PyTorch's products with our norms and our SwiGLU kernel between them."""
    o, gate_up, down = weights.matrices
    normed, residual = add_rms_norm(F.linear(attended, o), residual, weights.post_norm, _EPS)
    update = F.linear(swiglu(F.linear(normed, gate_up)), down)
    return add_rms_norm(update, residual, weights.next_norm, _EPS)


def on_two_streams(run: Callable[..., Result], device: torch.device) -> Callable[..., tuple[Result, Result]]:
    """The same for the first and the second half of the rows, side by side."""
    side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def both(attended: Tensor, residual: Tensor, weights: PostAttentionWeights) -> tuple[Result, Result]:
        half = len(attended) // 2 // 128 * 128
        if side is None:
            first = run(attended[:half], residual[:half], weights)
            return first, run(attended[half:], residual[half:], weights)
        here = torch.cuda.current_stream(device)
        side.wait_stream(here)
        first = run(attended[:half], residual[:half], weights)
        with torch.cuda.stream(side):
            second = run(attended[half:], residual[half:], weights)
        here.wait_stream(side)
        return first, second

    return both


def _arrangement(name: str, run: Callable[..., object], operands: list[Operands]) -> Arrangement:
    return Arrangement(name, [lambda given=given: run(*given) for given in operands], [])


def _chain(operands: list[Operands]) -> Arrangement:
    from onewave.ops.post_attention.chain.launch import chain

    made = chain(PostAttentionCall(*operands[0], _EPS))
    plan = made.plan
    name = f"chain, {plan.order}, {plan.policy}, {plan.tile.rows}x{plan.tile.columns}"
    return Arrangement(name, [lambda given=given: made(*given, _EPS) for given in operands], [made.check])
