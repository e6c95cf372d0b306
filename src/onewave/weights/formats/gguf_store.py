"""The weights of a GGUF model: one file, or the pieces of a split one."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from onewave.base.blocks import BLOCK_FORMATS, open_blocks
from onewave.base.errors import WeightsError
from onewave.base.gguf_types import PLAIN_TYPES, TYPES_BY_NAME
from onewave.base.grouped import GroupedMatrix, GroupFormat
from onewave.base.quantized import QuantizedRows, dequantize_rows
from onewave.weights.formats.gguf_file import GGUFFile, GGUFTensor, Headers
from onewave.weights.formats.gguf_pieces import piece_paths
from onewave.weights.store import WeightStore, quote

# BF16 has no NumPy type: its bits travel as int16.
_PLAIN_DTYPES: dict[str, tuple[str, torch.dtype]] = {
    "F64": ("<f8", torch.float64),
    "F32": ("<f4", torch.float32),
    "F16": ("<f2", torch.float16),
    "BF16": ("<i2", torch.bfloat16),
    "I64": ("<i8", torch.int64),
    "I32": ("<i4", torch.int32),
    "I16": ("<i2", torch.int16),
    "I8": ("<i1", torch.int8),
}
assert _PLAIN_DTYPES.keys() == PLAIN_TYPES
# PyTorch warns once a process of an array that is read-only, as a mapped file is: nothing writes to those here.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.as_tensor(np.frombuffer(b"\0", np.uint8))


class GGUFStore(WeightStore):
    """Mapped GGUF files.

    metadata: the first file's metadata, which describes the whole model.
    """

    def __init__(self, files: list[GGUFFile]) -> None:
        self._files = {file.path: file for file in files}
        self._found = {name: tensor for file in files for name, tensor in file.tensors.items()}
        self.tensors = self._found
        self.metadata: Mapping[str, object] = files[0].metadata
        self.description = str(files[0].path)

    @classmethod
    def open(cls, path: str | os.PathLike[str], headers: Headers | None = None) -> "GGUFStore":
        """Open a model by the path of its file, or of any of its pieces. headers: as of GGUFFile.open. Raises
        WeightsError."""
        paths = piece_paths(Path(path))
        first = GGUFFile.open(paths[0], headers)
        count = first.metadata.get("split.count", 0)
        if isinstance(count, int) and count <= 1:
            return cls([first])
        if count != len(paths):
            raise WeightsError(
                str(path),
                got=f"is one of {quote(str(count))} pieces",
                next="Keep all pieces in one directory under their names NAME-00001-of-0000N.gguf.",
            )
        files = [first, *(GGUFFile.open(piece, headers) for piece in paths[1:])]
        _check_pieces(files)
        return cls(files)

    def load(self, name: str) -> torch.Tensor:
        """Return a copy of one tensor; a quantised one becomes float32. Raises WeightsError, UnsupportedError."""
        tensor = self._find(name)
        raw = self._files[tensor.file].raw(tensor)
        if tensor.dtype in _PLAIN_DTYPES:
            numpy_dtype, torch_dtype = _PLAIN_DTYPES[tensor.dtype]
            return torch.as_tensor(raw.view(numpy_dtype).copy()).view(torch_dtype).reshape(tensor.shape)
        return torch.as_tensor(dequantize_rows(_as_rows(raw, tensor), tensor.dtype)).reshape(tensor.shape)

    def load_quantized(self, name: str) -> QuantizedRows | None:
        """Return a quantised 2-D tensor's blocks as a read-only view of the mapped file, or None."""
        tensor = self._find(name)
        if tensor.dtype in _PLAIN_DTYPES or len(tensor.shape) != 2:
            return None
        rows, cols = tensor.shape
        return QuantizedRows(tensor.dtype, _as_rows(self._files[tensor.file].raw(tensor), tensor), (rows, cols))

    def load_grouped(self, name: str, device: torch.device | None = None) -> GroupedMatrix | None:
        """Return a 2-D tensor of BLOCK_FORMATS in groups, or None."""
        rows = self.load_quantized(name)
        if rows is None or rows.qtype not in BLOCK_FORMATS:
            return None
        return open_blocks(rows.data if device is None else torch.as_tensor(rows.data).to(device), rows.qtype)

    def group_format(self, name: str) -> GroupFormat | None:
        """Return the format of what `load_grouped` returns, without reading it."""
        tensor = self._find(name)
        return BLOCK_FORMATS.get(tensor.dtype) if len(tensor.shape) == 2 else None

    def close(self) -> None:
        """Unmap the files once no view of them is in use."""
        for file in self._files.values():
            file.close()

    def _find(self, name: str) -> GGUFTensor:
        self.find(name)
        return self._found[name]


def _as_rows(
    raw: np.ndarray[tuple[int], np.dtype[np.uint8]], tensor: GGUFTensor
) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """View a quantised tensor's bytes as [rows, bytes per row]; leading dimensions are flattened into rows."""
    kind = TYPES_BY_NAME[tensor.dtype]
    return raw.reshape(-1, tensor.shape[-1] // kind.block_elements * kind.block_bytes)


def _check_pieces(files: list[GGUFFile]) -> None:
    owners: dict[str, Path] = {}
    for number, file in enumerate(files):
        if file.metadata.get("split.no") != number or file.metadata.get("split.count") != len(files):
            raise WeightsError(
                str(file.path),
                got=f"calls itself piece {quote(str(file.metadata.get('split.no')))} (from 0)",
                allowed=f"piece {number} of {len(files)}",
                next="Fetch it again.",
            )
        for name in file.tensors:
            if name in owners:
                raise WeightsError(str(file.path), got=f"tensor {quote(name)} is also in {owners[name].name}")
            owners[name] = file.path
    expected = files[0].metadata.get("split.tensors.count", len(owners))
    if expected != len(owners):
        raise WeightsError(
            str(files[0].path), got=f"{len(owners)} tensors in its pieces", allowed=f"{quote(str(expected))} as it says"
        )
