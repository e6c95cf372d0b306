"""One choice an operator: a Call goes in, a Choice comes out; the launch runs it and explain prints it.

The pattern, in each operator's folder (merge_attention is the shortest example):

    call.py       `XCall(Call)`: the tensors and options of one call, frozen; `check(call)` raises what the user sees
                  (ops/checks.py)
    choose.py     `choose(call) -> Choice`: backend, kernel, plan, reasons; reads shapes, strides, dtypes, `call.device`
                  and options, never contents; cached by these. Raises UnsupportedError where an explicit backend
                  does not take the call
                  `describe(asked) -> XCall`: explain's question as a Call of meta tensors on a described device
    op.py         the public function: builds the Call, checks it, then runs its Choice, or the registered operator
                  where something watches. `_call(*flat)` makes a Call of torch.library's flat arguments and
                  `call.flat` goes back: the order of the schema stands in these two alone
    reference.py  what the operator means
    others        `run(call, choice)`: one module or folder an implementation

A row of the table in explain.py names `describe` and `choose`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from onewave.base.device import Device, device_of
from onewave.base.errors import InvalidArgumentError, ShapeError, UnsupportedError, shown

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
_MAX_KEPT = 4096
_T = TypeVar("_T")
# PyTorch can't count the bytes of more.
_MAX_ELEMENTS = 1 << 59


class Reason(NamedTuple):
    """Why a Choice is what it is: a format string and its values. explain alone makes a sentence of it."""

    text: str
    values: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return self.text.format(*self.values)


def because(text: str, *values: Any) -> Reason:
    """Return the reason `text`, whose {} stand for values."""
    return Reason(text, values)


class Call:
    """One call of an operator: its tensors and its checked options. Subclasses are frozen dataclasses that name them.

    described: the last of a subclass's fields, None by default. The device of explain's question, which need not exist;
    then the tensors are on meta. None: the device of the tensors. No field of this class: subclasses would have it
    first, and torch.compile of PyTorch 2.11 gives a constructor's positional arguments to the fields in their order.
    """

    described: Device | None
    __match_args__: ClassVar[tuple[str, ...]]

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """Return the call of these fields, the others at their defaults; for the paths that a CPU takes most.

        A frozen dataclass's own constructor takes four times as long.
        """
        call = cls.__new__(cls)
        call.__dict__.update(fields)
        return call

    @property
    def first(self) -> Tensor:
        """The tensor whose device counts: the first field."""
        return getattr(self, self.__match_args__[0])

    @property
    def device(self) -> Device:
        """Capability and SMs of the device that runs the call."""
        return device_of(self.first.device) if self.described is None else self.described

    @property
    def where(self) -> str:
        """The device, for errors."""
        return str(self.first.device) if self.described is None else self.described.text

    @property
    def on_cpu(self) -> bool:
        """Whether a CPU runs the call. It asks for no capability, so a compiler can trace it."""
        return self.first.device.type == "cpu" if self.described is None else self.described.capability is None

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU runs the call; tensors that are shapes alone (on meta) lie on none."""
        return self.first.is_cuda if self.described is None else self.described.capability is not None


@dataclass(frozen=True)
class Choice:
    """The backend and kernel that run a call. Subclasses add the plan that the launch needs, and print it.

    module: of the operator's folder, with `run(call, choice)`. kernel: for explain, "path below ops: function".
    """

    backend: str
    module: str
    kernel: str
    reasons: tuple[Reason, ...]

    @property
    def why(self) -> tuple[Reason, ...]:
        """The reasons, and those that take a plan to say."""
        return self.reasons

    @property
    def tile(self) -> str | None:
        """Rows, columns, warps and stages of a program; None where it has none."""
        return None

    @property
    def split(self) -> str | None:
        """How a reduction is split; None where nothing is said."""
        return None

    @property
    def programs(self) -> str | None:
        """Thread blocks of the launch; None where there is none."""
        return None


class Counted:
    """A Choice that counts its launch's thread blocks; stands before Choice among a class's bases."""

    num_programs: int

    @property
    def programs(self) -> str:
        """Thread blocks of the launch."""
        return str(self.num_programs)


@dataclass(frozen=True)
class Asked:
    """A question to explain: an operator, shapes of its main tensors, a device, a dtype, and the call's own options."""

    operator: str
    shapes: tuple[tuple[int, ...], ...]
    device: Device
    dtype: torch.dtype
    options: dict[str, Any]

    @property
    def on_cpu(self) -> bool:
        """Whether the question is about a CPU."""
        return self.device.capability is None

    def __str__(self) -> str:
        shapes = ", ".join(str(list(shape)) for shape in self.shapes)
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{shapes}, {str(self.dtype).removeprefix('torch.')} on {self.device.text}{options}"

    def take(self, *ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes, one for each given set of allowed ranks. Raises ShapeError."""
        if len(self.shapes) != len(ranks) or any(len(s) not in r for s, r in zip(self.shapes, ranks, strict=True)):
            allowed = ", ".join(" or ".join(f"{rank} axes" for rank in each) for each in ranks)
            raise ShapeError(f"explain {self.operator}: shapes", got=str(self), allowed=f"shapes of {allowed}")
        return self.shapes

    def given(self, *names: str) -> dict[str, Any]:
        """Return those of the named options that the question has."""
        return {name: self.options[name] for name in names if name in self.options}

    def has(self, option: str) -> bool:
        """Whether the call has such a tensor or number."""
        return self.options.get(option) is not None

    def number(self, option: str, default: int | None = None) -> Any:
        """Return a count that an option gives, or the default."""
        given = self.options.get(option)
        return default if given is None else int(given)

    def allow(self, known: set[str]) -> None:
        """Raise InvalidArgumentError for an option that a call has and a question can't ask about."""
        if odd := self.options.keys() - known:
            what, allowed = f"explain {self.operator}: options", ", ".join(sorted(known))
            raise InvalidArgumentError(what, got=", ".join(sorted(odd)), allowed=allowed)

    def dtype_of(self, option: str, default: torch.dtype) -> torch.dtype:
        """Return the dtype that an option names. Raises UnsupportedError."""
        given = self.options.get(option)
        kind = default if given is None else DTYPES.get(given) if isinstance(given, str) else given
        if not isinstance(kind, torch.dtype):
            raise UnsupportedError(f"explain {self.operator}: {option}", got=shown(given), allowed=", ".join(DTYPES))
        return kind


class Kept(dict[object, _T]):
    """A cache of findings for calls of one form, keyed by all that they depend on. A look-up beats finding again."""

    def keep(self, key: object, found: _T) -> _T:
        """Keep what was found, and return it. With very many kept, all go first."""
        if len(self) >= _MAX_KEPT:
            self.clear()
        self[key] = found
        return found


def empty_on_meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor that is a shape and a dtype alone. Raises ShapeError."""
    whole = all(isinstance(size, Integral) and not isinstance(size, bool) and size >= 0 for size in shape)  # pyright: ignore[reportUnnecessaryIsInstance] (callers may be untyped)
    if not whole or math.prod(shape) > _MAX_ELEMENTS:
        raise ShapeError("explain: shape", got=shown(shape), allowed=f"whole numbers, a product up to {_MAX_ELEMENTS}")
    return torch.empty(tuple(shape), dtype=dtype, device="meta")
