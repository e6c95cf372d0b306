"""Runs the m16n8k16 kernel's own Gluon source in NumPy, statement by statement, on a recorded launch.

Tensors are arrays without their layouts (kit/runs/mma.py runs what layouts become). Pointers know which elements are
theirs: reading or writing others is an error, as is a second write and the use of a tile whose copy has not been waited
for (it is NaN). float16 stands for both 16-bit types.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from kit.numpy_gpu.gluon_in_numpy import Gluon
from kit.numpy_gpu.mma_launches import Launch
from kit.numpy_gpu.numpy_memory import Array, multiplied, wrapped
from kit.runs.tensors import addressed
from onewave.ops.attention.mma import kernel as mma_kernel_impl


class Memory:
    """A tensor's whole memory, as elements; own: those that belong to the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        storage, own = addressed(tensor)
        self.dtype = types.SimpleNamespace(element_ty=np.dtype(str(tensor.dtype).removeprefix("torch.")))
        self.elements = storage.numpy().view(self.dtype.element_ty)
        self.own = own.numpy()[:: tensor.element_size()]
        self.written = np.zeros(len(self.elements), bool)


class Pointer:
    """Places in one memory, in elements."""

    def __init__(self, memory: Memory, at: Any) -> None:
        self.memory, self.at, self.dtype = memory, wrapped(at), memory.dtype
        self.shape, self.type = self.at.shape, types.SimpleNamespace(layout="registers")

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, np.asarray(self.at) + np.asarray(offset).astype(np.int64))

    def reshape(self, shape: Sequence[int]) -> Pointer:
        whole = np.broadcast_to(np.asarray(self.at), np.broadcast_shapes(self.at.shape))
        return Pointer(self.memory, whole.reshape(shape))


class Shared:
    """A tile of shared memory; NaN until written, and while a copy is on its way."""

    def __init__(self, dtype: Any, shape: Sequence[int]) -> None:
        self.cells, self.shape = np.full(shape, np.nan, dtype), tuple(shape)

    def permute(self, axes: tuple[int, int]) -> Shared:
        turned = Shared(self.cells.dtype, (0, 0))
        turned.cells = self.cells.transpose(axes)
        return turned

    def load(self, layout: Any) -> Array:
        return wrapped(self.cells.copy())

    def store(self, values: Any) -> None:
        self.cells[...] = values


class Language(Gluon):
    """The kernel's `gl` and `async_copy`, for one program."""

    def __init__(self, program: int) -> None:
        self.block, self.blocks = program, (program + 1, 1)
        self.groups: list[list[Callable[[], None]]] = [[]]

    def allocate_shared_memory(self, dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
        return Shared(dtype, shape)

    def convert_layout(self, x: Any, layout: Any, assert_trivial: bool = False) -> Any:
        return x

    def hint(self, x: Any, sizes: Any) -> Any:
        return x

    max_constancy = max_contiguous = multiple_of = hint

    def inline_asm_elementwise(self, text: str, registers: str, operands: list[Array], **_: Any) -> Array:
        """movmatrix on every 8 x 8 block."""
        (x,) = operands
        assert text.startswith("movmatrix.sync.aligned.m8n8.trans.b16")
        rows, columns = x.shape
        return wrapped(np.asarray(x).reshape(rows // 8, 8, columns // 8, 8).swapaxes(1, 3).reshape(rows, columns))

    def load(self, pointer: Pointer, mask: Any = True, other: float = 0) -> Array:
        at, mask = np.broadcast_arrays(np.asarray(pointer.at), np.asarray(mask))
        assert pointer.memory.own[at[mask]].all(), "reads what is not the tensor's"
        found = pointer.memory.elements[np.where(mask, at, 0)]
        return wrapped(np.where(mask, found, found.dtype.type(other)))

    def store(self, pointer: Pointer, values: Any, mask: Any) -> None:
        at, values, mask = np.broadcast_arrays(np.asarray(pointer.at), np.asarray(values), np.asarray(mask))
        at = at[mask]
        assert pointer.memory.own[at].all(), "writes what is not the tensor's"
        assert not pointer.memory.written[at].any(), "a second write"
        pointer.memory.written[at] = True
        pointer.memory.elements[at] = values[mask]

    def async_copy_global_to_shared(self, tile: Shared, pointer: Pointer, mask: Any) -> None:
        values = self.load(pointer, mask)
        tile.store(np.nan)
        self.groups[-1].append(lambda: tile.store(values))

    def commit_group(self) -> None:
        self.groups.append([])

    def wait_group(self, pending: int) -> None:
        while len(self.groups) - 1 > pending:
            for land in self.groups.pop(0):
                land()


def namespace(gl: Language) -> dict[str, Any]:
    """The kernel's module with NumPy under its names."""
    space: dict[str, Any] = {}
    for name, thing in vars(mma_kernel_impl).items():
        raw = getattr(thing, "fn", None)
        if isinstance(raw, types.FunctionType):
            space[name] = types.FunctionType(raw.__code__, space, name, raw.__defaults__)
        elif hasattr(thing, "value"):
            space[name] = thing.value
    # In place: the functions hold on to this dictionary.
    space |= {"gl": gl, "async_copy": gl, "mma_v2": lambda a, b, acc: acc + multiplied(a, b)}
    return space


def run(launch: Launch) -> None:
    """Run a launch's programs, one after another; its out and lse are written."""
    memories: dict[int, Memory] = {}
    given: dict[str, Any] = {}
    for name, value in launch.given.items():
        if isinstance(value, Tensor):
            memory = memories.setdefault(id(value), Memory(value))
            given[name] = Pointer(memory, value.storage_offset())
        else:
            given[name] = wrapped(np.int32(value)) if isinstance(value, int) and not name.isupper() else value
    with np.errstate(all="ignore"):
        for program in range(launch.programs):
            namespace(Language(program))["mma_kernel"](**given)
    out = memories[id(launch.given["out_ptr"])]
    assert launch.given["RAGGED"] or (out.written == out.own).all(), "some of the output was not written"
