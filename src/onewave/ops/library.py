"""How operators are known to PyTorch: torch.library registration, and when a call goes through it.

Every operator is registered under `torch.ops.onewave` with a fake implementation, so that torch.compile and
torch.export see one node with known shapes. The dispatcher costs microseconds a call, which a decode step pays hundreds
of times; plain eager inference therefore calls the implementation directly, and only calls that something watches
(a compiler, a tensor subclass, autograd) take the registered way.
"""

from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack  # pyright: ignore[reportPrivateUsage] (nothing public tells)
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_gradtrackingtensor, peek_interpreter_stack
from torch.autograd import forward_ad

import onewave.ops.forked  # noqa: F401  # pyright: ignore[reportUnusedImport] (before anything computes)
from onewave.base.errors import UnsupportedError
from onewave.base.settings import Settings

PLAIN_TENSORS = frozenset((Tensor, torch.nn.Parameter))
"""Kinds of tensors that are memory and nothing more: what is done to them concerns autograd alone."""

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def register(
    name: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    mutates: Iterable[str] = (),
    schema: str | None = None,
) -> None:
    """Register `function` as onewave::<name>. `mutates` names the arguments it writes.

    schema: as torch.library writes it, "(Tensor x, ..) -> Tensor"; by default what function's annotations say.

    fake: same signature, returns empty tensors of the right shape and dtype (None for an operator that only mutates).
    Outputs may alias no input. Backward through an operator raises UnsupportedError when it is asked for, not before.
    """
    operator = torch.library.custom_op(f"onewave::{name}", function, mutates_args=tuple(mutates), schema=schema)
    operator.register_fake(fake)  # pyright: ignore[reportUnknownMemberType]

    def refuse(ctx: object, *grads: object) -> None:
        raise UnsupportedError(f"{name}: backward", allowed="forward only", next="Run it under torch.no_grad().")

    if mutates:
        # register_autograd takes no operator that writes to its arguments, not even to refuse.
        operator._backward_fn = refuse  # pyright: ignore[reportPrivateUsage]

        def refuse_vmap(info: object, in_dims: object, *args: object) -> None:
            next = "Call it on the whole batch, or once for each."
            raise UnsupportedError(f"{name}: torch.vmap", got="a tensor to be written to", next=next)

        operator.register_vmap(refuse_vmap)  # pyright: ignore[reportUnknownMemberType]
    else:
        operator.register_autograd(refuse)  # pyright: ignore[reportUnknownMemberType]


def is_watched(*tensors: Tensor | None) -> bool:
    """Whether a compiler, a dispatch mode, a transform (vmap), a tensor subclass or autograd must see this call as one
    registered operator.

    And whether the first tensor has a shape alone (device meta): then the registered operator answers, too. Raises
    UnsupportedError for a tensor with a tangent, or one that torch.func.grad follows, which no operator would.
    """
    if torch.compiler.is_compiling() or _len_torch_dispatch_stack():
        return True
    if forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType] (asking each tensor takes microseconds)
        _refuse_tangents(tensors)
    if peek_interpreter_stack():
        _refuse_gradients(tensors)
        return True
    grad = torch.is_grad_enabled()
    # Not any(...): a generator takes twice as long, and a layer asks seven times.
    for t in tensors:
        if t is not None and (type(t) not in PLAIN_TENSORS or (grad and t.requires_grad)):
            return True
    first = tensors[0]
    return first is not None and first.is_meta


def is_observed() -> bool:
    """Whether a dispatch mode, forward-mode differentiation or a transform is active, whatever the tensors."""
    if _len_torch_dispatch_stack() or peek_interpreter_stack():
        return True
    return bool(forward_ad._current_level >= 0)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportUnknownArgumentType]


def is_readable(*tensors: Tensor | None) -> bool:
    """Whether contents can be read: not while a compiler, a dispatch mode or a transform sees the call, nor of a tensor
    that may have none (device meta, a subclass that dispatches by itself, such as a fake one)."""
    if torch.compiler.is_compiling() or _len_torch_dispatch_stack() or peek_interpreter_stack():
        return False
    given = [t for t in tensors if t is not None]
    kinds: list[Any] = [Tensor, *map(type, given)]
    return all(kind.__torch_dispatch__ is kinds[0].__torch_dispatch__ for kind in kinds) and not any(
        t.is_meta for t in given
    )


def _refuse_tangents(tensors: Iterable[Tensor | None]) -> None:
    if any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):  # pyright: ignore[reportUnknownMemberType]
        raise UnsupportedError(
            "forward-mode differentiation", got="a tensor with a tangent", next="Pass the tensor without it, detached."
        )


def _refuse_gradients(tensors: Iterable[Tensor | None]) -> None:
    def followed(tensor: Tensor) -> bool:
        while is_batchedtensor(tensor):  # within vmap
            tensor = get_unwrapped(tensor)
        return is_gradtrackingtensor(tensor) and tensor.requires_grad

    if torch.is_grad_enabled() and any(tensor is not None and followed(tensor) for tensor in tensors):
        raise UnsupportedError(
            "backward", got="a tensor that torch.func.grad follows", next="Pass the tensor without it, detached."
        )


def outside_autocast(
    function: Callable[Concatenate[Tensor, _Given], _Result],
) -> Callable[Concatenate[Tensor, _Given], _Result]:
    """The function as it is outside torch.autocast, which would have its products, and so its result, rounded."""

    @wraps(function)
    def call(first: Tensor, *given: _Given.args, **named: _Given.kwargs) -> _Result:
        kind = first.device.type
        if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
            return function(first, *given, **named)
        with torch.autocast(kind, enabled=False):
            return function(first, *given, **named)

    return call


def refuse_grad(what: str, *tensors: Tensor | None) -> None:
    """Raises UnsupportedError where autograd would have to follow a call that is no registered operator, or writes to
    out=."""
    if not torch.is_grad_enabled():
        return
    if any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise UnsupportedError(what, got="tensors that require grad", next="Run it under torch.no_grad().")


def checks_contents() -> bool:
    """Whether operators read lengths and block tables back to check them (ONEWAVE_DEBUG=1): never while a CUDA graph is
    recorded, when nothing can be read."""
    return is_debug() and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


@cache
def is_debug() -> bool:
    """Whether ONEWAVE_DEBUG=1."""
    return Settings.from_env().debug
