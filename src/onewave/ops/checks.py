"""Checks of operators' arguments: one question a function, each with one error that says what, got and allowed.

operator, name: an error's first words. They are joined in errors alone: a layer on a CPU asks a hundred such questions.
Only `indices` reads contents.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import cast

import numpy as np
import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError, shown
from onewave.ops.choice import Call

SMALLEST_HEAD_DIM = 16
HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32, torch.float64)
"""Not float8, which PyTorch adds to nothing."""
WHOLE = (torch.int32, torch.int64)
_LARGEST = 3.4028234663852886e38
# A tanh near 1 of float32 is off by 6e-8: scores by as much of the cap.
_SOFTCAPS = (1e-6, 1e4)


def is_whole(value: object) -> bool:
    """Whether it is a whole number, of Python's, NumPy's or a compiler's; True and False are none."""
    return not isinstance(value, bool) and isinstance(value, (Integral, torch.SymInt))


def is_finite(number: object) -> bool:
    """Whether it is a number that float32 holds, and no True or False. By comparing, as a compiler can, too."""
    if type(number) is float:  # asking the abstract class takes half a microsecond
        return -_LARGEST <= number <= _LARGEST
    if isinstance(number, np.generic):  # a narrow one would overflow beside the bound
        number = cast("object", number.item())
    return not isinstance(number, bool) and isinstance(number, Real) and -_LARGEST <= cast("float", number) <= _LARGEST


def as_whole(number: int, most: int) -> int:
    """A whole number as Python's own, at most `most`; a compiler's stays what it is."""
    return number if isinstance(number, torch.SymInt) else min(int(number), most)  # pyright: ignore[reportUnnecessaryIsInstance] (a compiler's)


def names_of(dtypes: Iterable[torch.dtype]) -> str:
    """The dtypes' names, for an error."""
    return ", ".join(str(each).removeprefix("torch.") for each in dtypes)


def words_of(tensor: Tensor) -> str:
    """A tensor's dtype and shape, for an error."""
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def one_of(operator: str, name: str, value: object, allowed: Collection[str | None]) -> None:
    """Raise InvalidArgumentError for what is none of the allowed words."""
    if (value is not None and not isinstance(value, str)) or value not in allowed:
        raise InvalidArgumentError(f"{operator}: {name}", got=shown(value), allowed=", ".join(map(str, allowed)))


def backend(operator: str, call: Call, backend: str, known: Collection[str]) -> None:
    """Raise InvalidArgumentError for an unknown backend, UnsupportedError for a GPU's elsewhere."""
    one_of(operator, "backend", backend, known)
    if backend in ("gluon", "triton") and not call.on_gpu:
        what = f"{operator} (backend={backend})"
        raise UnsupportedError(what, got=call.where, allowed="cuda", next='Use backend="auto".')


def switch(what: str, value: object, next: str | None = None) -> None:
    """Raise InvalidArgumentError for anything but True and False: other values, "False" among them, would be one."""
    if not isinstance(value, (bool, np.bool_)):
        got = f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else shown(value)
        raise InvalidArgumentError(what, got=got, allowed="True or False", next=next)


def whole(operator: str, name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise InvalidArgumentError for anything but a whole number in bounds."""
    if not is_whole(value) or not least <= cast("int", value) or (most is not None and cast("int", value) > most):
        allowed = f"a whole number from {least}" + ("" if most is None else f" to {most}")
        raise InvalidArgumentError(f"{operator}: {name}", got=shown(value), allowed=allowed)


def finite(operator: str, name: str, value: object, *, positive: bool = False) -> None:
    """Raise InvalidArgumentError for anything but a finite number, greater than 0 if positive, or None."""
    if value is not None and not (is_finite(value) and (not positive or cast("float", value) > 0)):
        allowed = f"a finite number{' greater than 0' * positive}, or None"
        raise InvalidArgumentError(f"{operator}: {name}", got=shown(value), allowed=allowed)


def eps(operator: str, eps: object) -> None:
    """Raise InvalidArgumentError for no finite number, or one below 0."""
    if not is_finite(eps) or cast("float", eps) < 0:
        raise InvalidArgumentError(f"{operator}: eps", got=shown(eps), allowed="a finite number, at least 0")


def int8_bounds(operator: str, low: object, high: object) -> None:
    """Raise InvalidArgumentError for bounds of quantised results that are not in order within int8."""
    if not (is_finite(low) and is_finite(high) and -128 <= cast("float", low) <= cast("float", high) <= 127):
        what = f"{operator}: quant_min_bound, quant_max_bound"
        raise InvalidArgumentError(what, got=f"{low!r}, {high!r}", allowed="in order within int8")


def softcap(operator: str, softcap: object) -> None:
    """Raise InvalidArgumentError for what is no cap, or one so large that scores would lose more than they are cut."""
    finite(operator, "softcap", softcap, positive=True)
    if softcap is None:
        return
    cap, (least, most) = cast("float", softcap), _SOFTCAPS
    if not least <= cap <= most:
        allowed, useless = f"from {least:g} to {most:,.0f}, or None", "None changes scores as little."
        next = useless if cap > most else None
        raise InvalidArgumentError(f"{operator}: softcap", got=str(cap), allowed=allowed, next=next)


def together(operator: str, names: str, *values: object) -> None:
    """Raise InvalidArgumentError where one of the values is given and another is None."""
    if len({value is None for value in values}) > 1:
        raise InvalidArgumentError(f"{operator}: {names}", got="one of them", allowed="both or none")


def tensors(operator: str, **tensors: object) -> None:
    """Raise InvalidArgumentError for the first that is no tensor, UnsupportedError for a sparse or nested one."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            plain = tensor is None or isinstance(tensor, (int, float, str))
            got = shown(tensor) if plain else type(tensor).__name__
            raise InvalidArgumentError(f"{operator}: {name}", got=got, allowed="a torch.Tensor")
        if tensor.layout is not torch.strided or tensor.is_nested:
            got = "a nested tensor" if tensor.is_nested else str(tensor.layout)
            raise UnsupportedError(f"{operator}: {name}", got=got, allowed="a dense tensor")


def optional(operator: str, given: Mapping[str, object]) -> None:
    """As `tensors`, of those that are not None."""
    tensors(operator, **{name: tensor for name, tensor in given.items() if tensor is not None})


def one_device(operator: str, first: Tensor, others: Iterable[Tensor | None]) -> None:
    """Raise UnsupportedError where another tensor lies on another device than the first."""
    for other in others:
        if other is not None and other.device != first.device:
            got = f"{first.device} and {other.device}"
            raise UnsupportedError(f"{operator}: devices", got=got, allowed="one device")


def dtype(operator: str, name: str, dtype: object, allowed: Collection[torch.dtype], where: Call | None = None) -> None:
    """Raise UnsupportedError for another dtype, or what is none. where: a call whose device decides what is allowed."""
    if dtype not in allowed:
        got = shown(dtype) if where is None else f"{shown(dtype)} on {where.where}"
        raise UnsupportedError(f"{operator}: {name}", got=got, allowed=names_of(allowed))


def is_one_of(shape: Sequence[int], allowed: Sequence[tuple[int, ...]]) -> bool:
    """Whether a shape is one of those. To torch.compile `in` misses it where one of two equal numbers is symbolic."""
    return shape in allowed or any(shape == each for each in allowed)


def shape(operator: str, name: str, tensor: Tensor, *shapes: tuple[int, ...]) -> None:
    """Raise ShapeError for another shape."""
    if not is_one_of(tensor.shape, shapes):
        got, allowed = str(tuple(tensor.shape)), " or ".join(map(str, shapes))
        raise ShapeError(f"{operator}: {name}", got=got, allowed=allowed)


def form(operator: str, name: str, tensor: Tensor, dtypes: Collection[torch.dtype], *shapes: tuple[int, ...]) -> None:
    """Raise ShapeError for another dtype or shape."""
    if tensor.dtype not in dtypes or not is_one_of(tensor.shape, shapes):
        allowed = f"{names_of(dtypes)} {' or '.join(str(list(shape)) for shape in shapes)}"
        raise ShapeError(f"{operator}: {name}", got=words_of(tensor), allowed=allowed)


def last_axis(operator: str, name: str, tensor: Tensor) -> None:
    """Raise ShapeError where the last axis is not contiguous."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        got, allowed = f"strides {tensor.stride()}", "a contiguous last axis"
        raise ShapeError(f"{operator}: {name}", got=got, allowed=allowed, next="Call .contiguous().")


def out(operator: str, out: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise ShapeError for a tensor that can't take a result of that dtype and shape."""
    odd = out.stride(-1) != 1 and out.numel() > 0
    if odd or tuple(out.shape) != tuple(shape) or out.dtype is not dtype or shares_elements(out):
        got = f"{words_of(out)}, strides {out.stride()}"
        allowed = f"{dtype} {tuple(shape)} with a contiguous last axis, elements of their own"
        raise ShapeError(f"{operator}: out", got=got, allowed=allowed)


def head_dim(operator: str, head_dim: int, *, on_cpu: bool, least: int = SMALLEST_HEAD_DIM) -> None:
    """Check for an even one up to 256 on a CPU, and a multiple of 8 from `least` on a GPU. Raises UnsupportedError."""
    step, least = (2, 2) if on_cpu else (8, least)
    if head_dim % step or not least <= head_dim <= 256:
        allowed = f"multiples of {step} from {least} to 256" + ("" if on_cpu else " on a GPU")
        raise UnsupportedError(f"{operator}: head_dim", got=str(head_dim), allowed=allowed, next="Pad it with zeros.")


def rotary(operator: str, rotary: Tensor, rows: int, head_dim: int) -> None:
    """Raise ShapeError, UnsupportedError for what is no cosines and sines of each row."""
    shape = rotary.shape
    if len(shape) != 2 or shape[0] != rows or shape[1] % 2 or shape[1] > head_dim:
        allowed = f"[{rows}, an even rotary_dim up to {head_dim}]"
        raise ShapeError(f"{operator}: rotary", got=str(tuple(shape)), allowed=allowed)
    dtype(operator, "dtype of rotary", rotary.dtype, (torch.float32,))


def indices(operator: str, name: str, values: Tensor, limit: int) -> None:
    """Raise InvalidArgumentError for whole numbers outside 0 to limit - 1. Reads them: waits for the device."""
    if values.numel() == 0:
        return
    low, high = (int(end) for end in values.aminmax())
    if low < 0 or high >= limit:
        allowed = f"0 to {limit - 1}" if limit else "none, as that is empty"
        raise InvalidArgumentError(f"{operator}: {name}", got=str(low if low < 0 else high), allowed=allowed)


def shares_elements(tensor: Tensor) -> bool:
    """Whether elements may share their place: unless every axis steps over all that the finer ones reach."""
    if tensor.is_contiguous():
        return False
    # Compared by pairs: torch.compile cannot sort sizes that it does not know.
    axes = [(step, size - 1) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    for at, (step, _) in enumerate(axes):
        finer = [other * last for i, (other, last) in enumerate(axes) if other < step or (other == step and i < at)]
        if step <= sum(finer):
            return True
    return False


def apart(operator: str, name: str, written: Tensor) -> None:
    """Raise ShapeError where elements of a tensor that is to be written share their place."""
    if shares_elements(written):
        got, allowed = f"shape {tuple(written.shape)} with strides {written.stride()}", "elements of their own"
        raise ShapeError(
            f"{operator}: {name}", got=got, allowed=allowed, next="Call .contiguous() and keep the result."
        )
