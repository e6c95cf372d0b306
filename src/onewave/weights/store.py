"""The interface of every source of weights: named tensors, described at once and read when asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onewave.base.errors import WeightsError

if TYPE_CHECKING:
    import torch

    from onewave.base.grouped import GroupedMatrix, GroupFormat
    from onewave.base.quantized import QuantizedRows

_LONGEST_NAME_SHOWN = 200


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file describes it.

    shape: in torch's order (a GGUF's dimensions reversed). dtype: the file's own name for it ("BF16", "Q4_1").
    nbytes: bytes it takes in the file. file: the file that holds it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: Path


class WeightStore(ABC):
    """Named tensors, read when asked for. Stores are read-only and may be used from several threads.

    description: where the tensors come from, for messages: a path. tensors: every tensor by the file's own name.
    """

    description: str
    tensors: Mapping[str, TensorInfo]

    def find(self, name: str) -> TensorInfo:
        """Describe a tensor. Raises WeightsError where there is none of that name."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise WeightsError(self.description, got=f"has no tensor {quote(name)}")
        return tensor

    @abstractmethod
    def load(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU in the file's dtype; a quantised one in float32. Treat it as read-only.

        Raises WeightsError when there is no such tensor or it can't be read, UnsupportedError for a dtype that needs
        a library which is not there.
        """

    def load_quantized(self, name: str) -> QuantizedRows | None:
        """Return the packed blocks of a quantised 2-D tensor, or None when the tensor is anything else."""
        self.find(name)

    def load_grouped(self, name: str, device: torch.device | None = None) -> GroupedMatrix | None:
        """Return a quantised matrix as codes with scales by group, or None when it is no such matrix.

        device: it is opened there and has tensors; None: on the CPU, and it has NumPy arrays.
        """
        self.find(name)

    def group_format(self, name: str) -> GroupFormat | None:
        """Return the format of what `load_grouped` returns; None without one, and where its columns are reordered."""
        matrix = self.load_grouped(name)
        return None if matrix is None or matrix.columns is not None else matrix.format

    @abstractmethod
    def close(self) -> None:
        """Let go of the files. Tensors that were handed out stay valid."""


def quote(name: str) -> str:
    """Quote a name taken from a file so that it prints anywhere and stays short."""
    text = ascii(name)
    return text if len(text) <= _LONGEST_NAME_SHOWN else f"{text[:_LONGEST_NAME_SHOWN]}..."
