"""A call of merge_attention, and what it accepts."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError, shown
from onewave.ops.choice import Call

_NAME = "merge_attention"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_BACKENDS = ("auto", "triton", "reference")


@dataclass(frozen=True, eq=False)
class MergeCall(Call):
    """outs: [parts, .., S, head_dim] each, of one shape; lses: [parts, .., S]. The parts of all follow each other."""

    outs: list[Tensor]
    lses: list[Tensor]
    backend: str = "auto"

    @property
    def first(self) -> Tensor:
        return self.outs[0]

    @property
    def flat(self) -> tuple[Any, ...]:
        """The registered operator's arguments."""
        return self.outs, self.lses, self.backend


def check(call: MergeCall) -> None:
    """Raises ShapeError, UnsupportedError, InvalidArgumentError."""
    outs, lses, backend = call.outs, call.lses, call.backend
    if not outs or len(outs) != len(lses):
        raise ShapeError(
            f"{_NAME}: parts", got=f"{len(outs)} outs, {len(lses)} lses", allowed="as many of each, at least one"
        )
    shape, dtype, device = outs[0].shape, outs[0].dtype, outs[0].device
    if len(shape) < 3 or shape[0] == 0:
        raise ShapeError(f"{_NAME}: outs", got=str(tuple(shape)), allowed="[parts, .., S, head_dim], at least one part")
    if dtype not in _DTYPES and not (dtype is torch.float64 and call.on_cpu):
        raise UnsupportedError(f"{_NAME}: dtype of outs", got=str(dtype), allowed="float16, bfloat16, float32")
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
        if out.device != device or lse.device != device:
            raise UnsupportedError(f"{_NAME}: devices", got=f"{out.device}, {lse.device}", allowed=f"{device} for all")
        if out.stride(-1) != 1 and out.shape[-1] > 1:
            raise ShapeError(f"{_NAME}: strides of outs", got=str(out.stride()), allowed="a contiguous last axis")
    if backend not in _BACKENDS:
        raise InvalidArgumentError(f"{_NAME}: backend", got=shown(backend), allowed=", ".join(_BACKENDS))
    if backend == "triton" and call.on_cpu:
        place = str(call.first.device) if call.described is None else call.described.text
        raise UnsupportedError(f"{_NAME} (backend=triton)", got=place, allowed="cuda", next='Use backend="auto".')
