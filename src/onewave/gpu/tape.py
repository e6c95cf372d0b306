"""The launches of one operator call, recorded while it runs, so that calls of the same form can repeat them.

A thread records its own launches (`launch_kernel`) and the memory that they take beside operands and results
(`scratch`, dealt tables); `prepared.py` makes a prepared call of a tape.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # pyright: ignore[reportPrivateImportUsage]

_Memory = TypeVar("_Memory", Tensor, Tensor | None)


@dataclass(frozen=True)
class Launched:
    """A kernel's launch: what Triton compiled, None where that is not known; blocks along three axes; all arguments."""

    compiled: Any
    grid: tuple[int, ...]
    values: list[Any]


@dataclass(frozen=True)
class Tape:
    """Launches in order, and memory with what finds it again for the current stream."""

    launches: list[Launched] = field(default_factory=list[Launched])
    memory: list[tuple[Tensor, Callable[[], Tensor]]] = field(default_factory=list[tuple[Tensor, Callable[[], Tensor]]])


class _Here(threading.local):
    tape: Tape | None = None


_here = _Here()


def current_tape() -> Tape | None:
    """Return the tape of the call that this thread is in, if it is recorded."""
    return _here.tape


@contextmanager
def recording() -> Generator[Tape]:
    """Record what this thread launches meanwhile."""
    _here.tape = Tape()
    try:
        yield _here.tape
    finally:
        _here.tape = None


def taken(again: Callable[[], _Memory]) -> _Memory:
    """Return memory of a launch that is neither operand nor result; again: finds it, for whatever stream."""
    memory = again()
    if _here.tape is None or memory is None:
        return memory
    separate = apart(memory)
    _here.tape.memory.append((separate, cast("Callable[[], Tensor]", again)))
    return cast("Any", separate)


def apart(tensor: Tensor) -> Tensor:
    """Return the tensor with a storage of its own over the same memory, by which views of it are known.

    Operands may be views of one tensor; of another call of the same form they need not be.
    """
    bits = tensor.detach()
    bits = bits.view(torch.uint8) if tensor.dtype.itemsize == 1 else bits  # DLPack does not know all float8
    return from_dlpack(to_dlpack(bits)).view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
