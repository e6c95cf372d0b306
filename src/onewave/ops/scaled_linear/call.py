"""A call of linear_int8 or linear_fp8: tensors and epilogue, what it accepts, torch.library's flat arguments."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onewave.base.device import Device
from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError, shown
from onewave.ops import checks
from onewave.ops.choice import Call
from onewave.ops.library import checks_contents

MAX_COLS = (1 << 17) - 1
"""Columns up to which no sum leaves int32, and up to which float64 holds every sum of e4m3 products exactly."""

# Arguments of the registered operator, in the order of ScaledCall.flat.
SCHEMA = (
    "Tensor x, Tensor weight, ScalarType out_dtype, str backend, Tensor? x_scale, Tensor? weight_scale, Tensor? bias, "
    "Tensor? out_shift, Tensor? out_smooth, float? out_scale=None, bool half_away=False, float max_bound=127.0, "
    "float min_bound=-127.0"
)
_BACKENDS = ("auto", "gluon", "triton", "reference")
_FLOATS = checks.FLOATS[:3]
NAMES = {torch.int8: "linear_int8", torch.float8_e4m3fn: "linear_fp8"}
"""The operator of a dtype."""


class Epilogue(NamedTuple):
    """The steps applied to the sums, in this order; see op.linear_int8."""

    x_scale: Tensor | None = None
    weight_scale: Tensor | None = None
    bias: Tensor | None = None
    out_shift: Tensor | None = None
    out_smooth: Tensor | None = None
    out_scale: float | None = None
    half_away: bool = False
    max_bound: float = 127.0
    min_bound: float = -127.0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Its tensors, present or not."""
        return self[:5]

    @property
    def factor(self) -> float:
        """The factor of int8 results before they are rounded: max_bound * out_scale in float32."""
        assert self.out_scale is not None
        return float(torch.tensor(self.max_bound, dtype=torch.float32) * torch.tensor(self.out_scale).float())


_NOTHING = Epilogue()


@dataclass(frozen=True, eq=False)
class ScaledCall(Call):
    """x: [tokens, cols], weight: [rows, cols], both int8 or both e4m3. out_dtype: int32 for the sums themselves."""

    x: Tensor
    weight: Tensor
    out_dtype: torch.dtype
    epilogue: Epilogue = _NOTHING
    backend: str = "auto"
    described: Device | None = None

    @property
    def name(self) -> str:
        """The operator's."""
        return NAMES[self.x.dtype]

    @property
    def flat(self) -> tuple[Any, ...]:
        """The registered operator's arguments, in SCHEMA's order; scaled_call goes back."""
        return (self.x, self.weight, self.out_dtype, self.backend, *self.epilogue)

    def output(self) -> Tensor:
        """An empty result."""
        return torch.empty((self.x.shape[0], self.weight.shape[0]), dtype=self.out_dtype, device=self.x.device)


def scaled_call(x: Tensor, weight: Tensor, out_dtype: torch.dtype, backend: str, *epilogue: Any) -> ScaledCall:
    """Return the call that the registered operator's arguments make; those at the end that have defaults may lack."""
    return ScaledCall(x, weight, out_dtype, Epilogue(*epilogue), backend)


def check_operands(name: str, kind: torch.dtype, x: Tensor, weight: Tensor, epilogue: Epilogue) -> None:
    """Check tensors and their dtypes. Raises InvalidArgumentError, UnsupportedError, ShapeError."""
    checks.tensors(name, x=x, weight=weight)
    names = ("x_scale", "weight_scale", "bias", "out_shift", "out_smooth")
    checks.optional(name, dict(zip(names, epilogue.tensors, strict=True)))
    checks.one_device(name, x, (weight, *epilogue.tensors))
    checks.dtype(name, "dtype of x", x.dtype, (kind,))
    checks.dtype(name, "dtype of weight", weight.dtype, (kind,))
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        got = f"{tuple(x.shape)}, {tuple(weight.shape)}"
        raise ShapeError(f"{name}: x, weight", got=got, allowed="[tokens, cols] and [rows, cols]")
    if x.shape[1] > MAX_COLS:
        raise UnsupportedError(f"{name}: cols", got=str(x.shape[1]), allowed=f"up to {MAX_COLS}")
    rows = weight.shape[0]
    for what, tensor, count in zip(names, epilogue.tensors, (x.shape[0], *(rows,) * 4), strict=True):
        if tensor is None:
            continue
        is_scale = what.endswith("_scale")
        checks.dtype(name, f"dtype of {what}", tensor.dtype, (torch.float32,) if is_scale else _FLOATS)
        checks.shape(name, what, tensor, (count,), *(((count, 1), (), (1,), (1, 1)) if is_scale else ()))


def check(call: ScaledCall) -> None:
    """Check what the result is to be, and the backend. Raises UnsupportedError, InvalidArgumentError."""
    name, e, kind = call.name, call.epilogue, call.out_dtype
    plain = e.out_scale is None and not any(tensor is not None for tensor in e.tensors)
    sums = torch.int32 if call.x.dtype is torch.int8 and plain else None
    allowed = (torch.int8,) if e.out_scale is not None else (*_FLOATS, *([sums] if sums else []))
    if kind not in allowed:
        hint = None if kind is not torch.int32 else "Sums in int32 have no scales, bias, shift or smooth."
        got = f"{shown(kind)}{'' if e.out_scale is None else ' with out_scale'}"
        raise UnsupportedError(f"{name}: out_dtype", got=got, allowed=checks.names_of(allowed), next=hint)
    checks.finite(name, "out_scale", e.out_scale, positive=True)
    checks.int8_bounds(name, e.min_bound, e.max_bound)
    checks.backend(name, call, call.backend, _BACKENDS)
    scale = e.weight_scale
    if scale is not None and not scale.is_meta and checks_contents() and not bool(scale.isfinite().all()):
        raise InvalidArgumentError(f"{name}: weight_scale", got="a number that is not finite", allowed="finite numbers")
