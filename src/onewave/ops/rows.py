"""What runs an operator that works row by row (rms_norm, add_rms_norm, swiglu), where only a device and a dtype decide.

The launch asks `module_for` and the operator's own tile, and so does explain.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onewave.base.errors import ShapeError, UnsupportedError
from onewave.ops.backends import module_for
from onewave.ops.choice import Asked, Call, Choice, Reason, because

_REASONS = {
    "numba_impl": ("cpu", because("compiled loops take it: float32")),
    "reference": ("reference", because("compiled loops take only float32")),
}


@dataclass(frozen=True, eq=False)
class RowCall(Call):
    """A question about one of these operators. folder: of its implementations. x: [..., columns] on meta."""

    x: Tensor
    folder: str

    @property
    def first(self) -> Tensor:
        return self.x

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


def shape_of(asked: Asked) -> Sequence[int]:
    """Return x's shape. Raises ShapeError."""
    if not (asked.shapes and asked.shapes[0]):
        raise ShapeError(f"explain {asked.operator}: shapes", got="none", allowed="x's")
    return asked.shapes[0]


def check_on_gpu(asked: Asked) -> None:
    """Raise UnsupportedError for what only a CPU takes."""
    if not asked.on_cpu and asked.dtype is torch.float64:
        got, allowed = "float64 on a GPU", "bfloat16, float16 or float32"
        raise UnsupportedError(f"{asked.operator}: dtype", got=got, allowed=allowed)


def choose_module(call: RowCall) -> Choice | None:
    """Return what runs on a CPU, None for a GPU."""
    module = module_for(call.x.dtype, on_gpu=not call.on_cpu, on_cpu=call.on_cpu)
    if module == "triton_impl":
        return None
    backend, why = _REASONS[module]
    return Choice(backend, module, f"{call.folder}/{module}.py", (why,))


def on_gpu(call: RowCall, why: Reason, tile: str, programs: str) -> RowChoice:
    """Return the choice of the operator's one kernel."""
    kernel = f"{call.folder}/triton_impl.py: {call.folder}_kernel"
    return RowChoice("triton", "triton_impl", kernel, (why,), tile, programs)
