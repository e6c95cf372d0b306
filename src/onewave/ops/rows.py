"""Chooses the implementation of a row-wise operator (rms_norm, add_rms_norm, swiglu) by device and dtype alone.

The launch asks `module_for` and the operator's own tile, and so does explain.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onewave.base.device import Device
from onewave.base.errors import ShapeError, UnsupportedError
from onewave.ops.backends import module_for
from onewave.ops.choice import Asked, Call, Choice, Reason, because, empty_on_meta

_REASONS = {
    "numba_impl": ("cpu", because("compiled loops take it: float32")),
    "reference": ("reference", because("compiled loops take only float32")),
}


@dataclass(frozen=True, eq=False)
class RowCall(Call):
    """A question about one of these operators. folder: of its implementations. x: [..., columns] on meta."""

    x: Tensor
    folder: str
    described: Device | None = None

    @property
    def num_rows(self) -> int:
        """Rows of x."""
        return self.x.shape[:-1].numel()


@dataclass(frozen=True)
class RowChoice(Choice):
    """A launch in words."""

    tile_words: str
    programs_words: str

    @property
    def tile(self) -> str:
        return self.tile_words

    @property
    def programs(self) -> str:
        return self.programs_words


def describe(asked: Asked, folder: str, operator: Callable[[Tensor], object]) -> RowCall:
    """A question: x. operator: checks it on meta, where nothing else runs. Raises ShapeError, UnsupportedError."""
    if not (asked.shapes and asked.shapes[0]):
        raise ShapeError(f"explain {asked.operator}: shapes", got="none", allowed="x's")
    x = empty_on_meta(asked.shapes[0], asked.dtype)
    operator(x)
    if not asked.on_cpu and asked.dtype is torch.float64:
        got, allowed = "float64 on a GPU", "bfloat16, float16 or float32"
        raise UnsupportedError(f"{asked.operator}: dtype", got=got, allowed=allowed)
    return RowCall(x, folder, described=asked.device)


def choose(call: RowCall, why: Reason, tile: str, programs: str) -> Choice:
    """Return what runs on a CPU, or the operator's one kernel of a GPU with its tile and programs."""
    module = module_for(call.x.dtype, on_gpu=not call.on_cpu, on_cpu=call.on_cpu)
    if module == "triton_impl":
        kernel = f"{call.folder}/triton_impl.py: {call.folder}_kernel"
        return RowChoice("triton", module, kernel, (why,), tile, programs)
    backend, why = _REASONS[module]
    return Choice(backend, module, f"{call.folder}/{module}.py", (why,))
