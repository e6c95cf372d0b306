"""Random operands of the feed-forward block on a GPU, and the rule that its results are held to."""

import torch
from torch import Tensor

from onewave.ops.ffn.reference import ffn as in_torch

Operands = tuple[Tensor, Tensor, Tensor, Tensor | None]


def operands(
    rows: int, hidden: int, inner: int, out: int, *, gated: bool = True, dtype: torch.dtype = torch.bfloat16
) -> Operands:
    """Return x, up, down and gate."""
    dice = torch.Generator("cuda").manual_seed(rows + hidden)

    def randn(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=dice, device="cuda") * shape[-1] ** -0.5).to(dtype)

    x = randn(rows, hidden) * hidden**0.5
    return x, randn(inner, hidden), randn(out, inner), randn(inner, hidden) if gated else None


def assert_close(found: Tensor, given: Operands, activation: str | None) -> None:
    """The operators' rule: error at most twice PyTorch's own at the same dtype. Of many rows, 512 are looked at."""
    x, up, down, gate = given
    plain = in_torch(x, up, down, gate, activation)
    some = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:512].to(x.device)
    gate = None if gate is None else gate.double()
    exact = in_torch(x[some].double(), up.double(), down.double(), gate, activation)
    bound = 2 * (plain[some].double() - exact).abs().max() + 1e-5
    assert (found[some].double() - exact).abs().max() <= bound
    assert found.isfinite().all()
