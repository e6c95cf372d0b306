"""Operators whose eager calls on a GPU are prepared: from its third call on, a form of call only packs and launches.

`@prepared` stands before the public function of an operator. A form is all that the function may decide by: each
tensor's shape, strides, dtype, device and alignment, and every other argument with its type. The first call of a form
runs as ever, the second is recorded, later ones take what was prepared (gpu/prepared.py). Run as ever are calls that a
compiler, a transform, a dispatch mode or autograd watches, calls within another operator or a CUDA graph's recording,
on another GPU than the current one, with ONEWAVE_DEBUG=1 or a profiler's hooks in Triton, and all on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from enum import Enum, auto
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor

from onewave.gpu.tape import apart, current_tape, recording
from onewave.ops.library import PLAIN_TENSORS, is_debug, is_observed

if TYPE_CHECKING:
    from onewave.gpu.prepared import Prepared

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result", covariant=True)

_MAX_FORMS = 1024
_ALIGNED_BYTES = 16
_PLAIN = frozenset((bool, int, float, str, torch.dtype))


class _Seen(Enum):
    ONCE = auto()
    UNPREPARED = auto()


class PreparedOperator(Protocol[_Given, _Result]):
    """An operator with prepared calls."""

    def __call__(self, *args: _Given.args, **named: _Given.kwargs) -> _Result: ...

    def bound(self, *args: _Given.args, **named: _Given.kwargs) -> tuple[Callable[[], None], _Result] | None:
        """Return what launches this very call again and again, and its result, which is written anew each time.

        It only launches: nothing is looked at that a call looks at, from compilers and hooks to whether the operands'
        memory is still theirs. Makes the call where none of its form is prepared. None where it can't be bound.
        """
        ...


def prepared(function: Callable[_Given, _Result]) -> PreparedOperator[_Given, _Result]:
    """Return the operator with prepared calls; same arguments, results and errors."""
    forms: dict[Hashable, Prepared | _Seen] = {}

    @wraps(function)
    def call(*args: _Given.args, **named: _Given.kwargs) -> _Result:
        first = args[0] if args else next(iter(named.values()), None)
        # First: a CPU's call loses 0.25 us by all this, and a model makes hundreds of calls a token.
        if not getattr(first, "is_cuda", False) or torch.compiler.is_compiling():
            return function(*args, **named)
        if is_observed() or torch.cuda.is_current_stream_capturing():
            return function(*args, **named)
        values: tuple[Any, ...] = (*args, *named.values()) if named else args
        tensors: list[Tensor] = []
        addresses: list[int] = []
        form = _form(values, tuple(named), tensors, addresses)
        if form is None or current_tape() is not None or is_debug():
            return function(*args, **named)
        known = forms.get(form)
        if known is None:
            if len(forms) >= _MAX_FORMS:
                forms.clear()
            forms[form] = _Seen.ONCE
        elif known is _Seen.ONCE:
            return _record(function, args, named, lambda found: forms.__setitem__(form, found))
        elif known is not _Seen.UNPREPARED and not known.has_hooks():
            return known(tensors, addresses)
        return function(*args, **named)

    def bound(*args: _Given.args, **named: _Given.kwargs) -> tuple[Callable[[], None], _Result] | None:
        values: tuple[Any, ...] = (*args, *named.values())
        for _ in range(3):  # of which the first, or the second, is recorded
            tensors: list[Tensor] = []
            addresses: list[int] = []
            form = _form(values, tuple(named), tensors, addresses)
            known = forms.get(form)
            if known is not None and not isinstance(known, _Seen):
                return None if known.has_hooks() else known.bound(tensors, addresses)
            if known is None and len(forms) < _MAX_FORMS:
                forms[form] = _Seen.ONCE
            call(*args, **named)
        return None

    operator = cast("PreparedOperator[_Given, _Result]", call)
    operator.bound = bound
    return operator


def _form(
    values: tuple[Any, ...], names: tuple[str, ...], tensors: list[Tensor], addresses: list[int]
) -> Hashable | None:
    """All that decides a call; None where more does, and on another GPU than the current one.

    Its tensors and their addresses go into the lists.
    """
    device = torch.cuda.current_device()
    form: list[Hashable] = [device, names]
    grad = torch.is_grad_enabled()
    try:
        for value in values:
            kind = cast("Any", type(value))
            if value is None:
                form.append(None)
            elif kind in PLAIN_TENSORS:
                if value.get_device() != device or (grad and value.requires_grad):
                    return None
                address = value.data_ptr()
                tensors.append(value)
                addresses.append(address)
                form += (value.shape, value.stride(), value.dtype, address % _ALIGNED_BYTES)
            elif kind in _PLAIN or (kind is tuple and all(type(each) is int or each is None for each in value)):
                form += (kind, value)  # True, 1 and 1.0 are one without their kind
            else:
                return None
    except (RuntimeError, NotImplementedError):  # tensors without strides or memory: the operator says what is wrong
        return None
    return tuple(form)


def _record(
    function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any], keep: Callable[[Prepared | _Seen], None]
) -> Any:
    """Run a call, record what it launches, and keep what is prepared of it."""
    from onewave.gpu.prepared import prepare

    given = [*args, *named.values()]
    places = [at for at, value in enumerate(given) if type(value) in PLAIN_TENSORS]
    operands = [apart(given[at]) for at in places]
    for at, operand in zip(places, operands, strict=True):
        given[at] = operand
    with recording() as tape:
        result = function(*given[: len(args)], **dict(zip(named, given[len(args) :], strict=True)))
    keep(prepare(tape, operands, result) or _Seen.UNPREPARED)

    def own(tensor: Any) -> Any:
        """The caller's own tensor where the operator returns one that it was given."""
        same = [at for at, operand in zip(places, operands, strict=True) if operand is tensor]
        return [*args, *named.values()][same[0]] if same else tensor

    if isinstance(result, tuple):
        return tuple([own(each) for each in cast("tuple[Any, ...]", result)])
    return own(result)
