"""A call of merge_attention, and what it accepts."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onewave.base.device import Device
from onewave.base.errors import ShapeError, UnsupportedError
from onewave.ops import checks
from onewave.ops.choice import Call

_NAME = "merge_attention"
_DTYPES = (*checks.HALVES, torch.float32)
_BACKENDS = ("auto", "triton", "reference")


@dataclass(frozen=True, eq=False)
class MergeCall(Call):
    """outs: [parts, .., S, head_dim] each, of one shape; lses: [parts, .., S]. The parts of all follow each other."""

    outs: list[Tensor]
    lses: list[Tensor]
    backend: str = "auto"
    described: Device | None = None

    @property
    def first(self) -> Tensor:
        return self.outs[0]

    @property
    def flat(self) -> tuple[Any, ...]:
        """The registered operator's arguments."""
        return self.outs, self.lses, self.backend


def check(call: MergeCall) -> None:
    """Raises ShapeError, UnsupportedError, InvalidArgumentError."""
    outs, lses = call.outs, call.lses
    if not outs or len(outs) != len(lses):
        raise ShapeError(
            f"{_NAME}: parts", got=f"{len(outs)} outs, {len(lses)} lses", allowed="as many of each, at least one"
        )
    shape, dtype = outs[0].shape, outs[0].dtype
    if len(shape) < 3 or shape[0] == 0:
        raise ShapeError(f"{_NAME}: outs", got=str(tuple(shape)), allowed="[parts, .., S, head_dim], at least one part")
    checks.dtype(_NAME, "dtype of outs", dtype, (*_DTYPES, torch.float64) if call.on_cpu else _DTYPES)
    checks.one_device(_NAME, outs[0], (*outs, *lses))
    for out, lse in zip(outs, lses, strict=True):
        if out.shape != shape or lse.shape != shape[:-1]:
            raise ShapeError(
                f"{_NAME}: a part's out and lse",
                got=f"{tuple(out.shape[1:])}, {tuple(lse.shape[1:])}",
                allowed=f"{tuple(shape[1:])}, {tuple(shape[1:-1])} in each part",
            )
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        if out.dtype is not dtype or lse.dtype is not wide:
            allowed = f"{dtype}, {wide} for its lse"
            raise UnsupportedError(f"{_NAME}: dtypes of a part", got=f"{out.dtype}, {lse.dtype}", allowed=allowed)
        checks.last_axis(_NAME, "outs", out)
    checks.backend(_NAME, call, call.backend, _BACKENDS)
