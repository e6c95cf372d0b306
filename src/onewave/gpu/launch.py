"""Launches Triton kernels with less of the host's time.

Triton binds a call's arguments by name, looks at each for what the kernel is compiled for, and makes a key of all that
in text, at every launch: tens of microseconds, more than many of these kernels run. `launch_kernel` makes a shorter key
of the same properties and goes straight to the kernel that Triton compiled for it before.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator, Hashable, Iterable
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from onewave.gpu.first_launch import await_first_launch
from onewave.gpu.hashes import hash_in_order
from onewave.gpu.prebuilt import Launch, take_prebuilt
from onewave.gpu.tape import Launched, current_tape, recording

_ALIGNED_BYTES = 16
_HALF = 1 << 31
_CONSTANT, _PLAIN, _ANY = range(3)


class _Kernel:
    """A kernel's parameters, and what Triton has compiled it to so far, by device, launch options and properties of
    its arguments."""

    def __init__(self, function: Any) -> None:
        self.names: list[str] = function.arg_names
        self.kinds = [_CONSTANT if p.is_constexpr else _PLAIN if p.do_not_specialize else _ANY for p in function.params]
        # Constants from here on are part of the key as they are.
        self.first_constants = max((at + 1 for at, kind in enumerate(self.kinds) if kind != _CONSTANT), default=0)
        self.defaults = {p.name: p.default for p in function.params if p.has_default}
        self.compiled: dict[Hashable, CompiledKernel] = {}


# By identity, and together with the function, so that no other takes its place: its own hash reads its source.
_kernels: dict[int, tuple[Any, _Kernel]] = {}


def launch_kernel(function: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
    """Launch a Triton or Gluon kernel as function[grid](*args, **named) does.

    The launch is on the current stream of the GPU where the first tensor lies.

    A kernel that runs in the interpreter, or stands in for one, is called that way each time, and so is one that is
    to be compiled first. Constants 1, 1.0 and True are one, as they are to Triton. What Triton looks at before each
    launch is looked at before the first alone: hooks before a run, debug and instrumentation switches, globals.
    """
    tape = current_tape()
    if not isinstance(function, JITFunction):
        function[grid](*args, **named)
        if tape is not None:
            tape.launches.append(Launched(None, grid, []))
        return
    if _here.kept is not None:
        _here.kept.append(Launch(function, args, named, grid))
        return
    gpu = _card_of(chain(args, named.values()))
    if gpu is not None and gpu != torch.cuda.current_device():
        with torch.cuda.device(gpu):
            launch_kernel(function, grid, *args, **named)
        return
    kernel, values, key = _form_of(function, args, named)
    compiled = kernel.compiled.get(key)
    if compiled is None:
        await_first_launch()
        hash_in_order(function)
        take_prebuilt(Launch(function, values, named, grid))
        with without_collection():
            made = function[grid](*values, **named)
        if isinstance(made, CompiledKernel):
            kernel.compiled[key] = compiled = made
    else:
        compiled[(*grid, 1, 1)[:3]](*values)
    if tape is not None:
        tape.launches.append(Launched(compiled, (*grid, 1, 1)[:3], values))


def _form_of(function: Any, args: Iterable[Any], named: dict[str, Any]) -> tuple[_Kernel, list[Any], Hashable]:
    """The kernel, its arguments in order, which `named` loses, and what is compiled once for all launches alike."""
    found = _kernels.get(id(function))
    if found is None:
        found = _kernels.setdefault(id(function), (function, _Kernel(function)))
    kernel = found[1]
    values = list(args)
    values += [named.pop(name) if name in named else kernel.defaults[name] for name in kernel.names[len(values) :]]
    looked_at, constants = values[: kernel.first_constants], values[kernel.first_constants :]
    key = (torch.cuda.current_device(), *named.items(), *properties(looked_at, kernel.kinds), *constants)
    return kernel, values, key


def distinct(launches: Iterable[Launch]) -> list[Launch]:
    """Return the first of all launches that one compiled kernel serves."""
    found: dict[Hashable, Launch] = {}
    for one in launches:
        found.setdefault((id(one.function), _form_of(one.function, one.args, dict(one.named))[2]), one)
    return list(found.values())


def compile_ahead(launch: Launch) -> None:
    """Do what comes before a kernel's first launch, on the current GPU: take it prebuilt or compile it, make what
    launches it, and load it."""
    await_first_launch()
    hash_in_order(launch.function)
    take_prebuilt(launch)
    with without_collection():
        made = launch.function.warmup(*launch.args, grid=launch.grid, **launch.named)
    made._init_handles()


class _Here(threading.local):
    kept: list[Launch] | None = None


_here = _Here()


@contextmanager
def launches_nowhere() -> Generator[list[Launch]]:
    """Keep this thread's launches in the list meanwhile, and make none: for what is compiled without a launch.
    Operators' calls prepare nothing meanwhile, as within another operator."""
    before, _here.kept = _here.kept, []
    try:
        with recording():
            yield _here.kept
    finally:
        _here.kept = before


@contextmanager
def without_collection() -> Generator[None]:
    """Meanwhile Python collects no garbage, of which a compilation makes hundreds of thousands of objects: with PyTorch
    loaded, going through all there are takes 0.15 s and more, once a compilation or twice. Of several threads the first
    one to begin ends it for all, which costs the others time, and nothing else."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _card_of(args: Iterable[Any]) -> int | None:
    """The number of the GPU where the first tensor, or what the first descriptor describes, lies."""
    for value in args:
        tensor = value if isinstance(value, Tensor) else getattr(value, "base", None)
        if isinstance(tensor, Tensor):
            return tensor.get_device() if tensor.is_cuda else None
    return None


def properties(values: Iterable[Any], kinds: Iterable[int]) -> list[Hashable]:
    """Return the properties of each argument that a kernel may be compiled for.

    They are a constant's value; a whole number's size and, unless the kernel has it otherwise, whether it is 1 or a
    multiple of 16; a tensor's dtype and alignment; a descriptor's dtype, box and layout; a tuple's items' properties.

    kinds: of each parameter, and maybe of more, 0 a constant, 1 a number that is not looked at, 2 any other.
    """
    found: list[Hashable] = []
    for value, kind in zip(values, kinds, strict=False):
        if kind == _CONSTANT:
            found.append(value)
        elif type(value) is int:
            size = 32 if -_HALF <= value < _HALF else 64 if value < 1 << 63 else -64  # Triton's i32, i64, u64
            found.append(size if kind == _PLAIN else (size, value == 1, value % 16 == 0))
        elif isinstance(value, Tensor):
            found.append(value.dtype if value.data_ptr() % _ALIGNED_BYTES == 0 else (value.dtype,))
        elif value is None or isinstance(value, (bool, float)):
            found.append(type(value))
        elif isinstance(value, tuple):  # whose numbers Triton always looks at
            found.append((type(value), *properties(value, repeat(_ANY))))
        elif hasattr(value, "block_shape"):  # a tensor descriptor, whose base is aligned
            found += value.base.dtype, tuple(value.block_shape), getattr(value, "layout", None), value.padding
        else:  # Triton says what it makes of it, or why it does not
            found.append(value)
    return found
