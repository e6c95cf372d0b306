"""A strict reader of safetensors headers.

The safetensors library maps the file and hands out tensors; this check runs before it, so that every kind of damage
is answered by one WeightsError that names the file and the tensor. Source: huggingface/safetensors, README "Format".
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, cast

from onewave.base.errors import WeightsError
from onewave.base.json_files import parse_json_object
from onewave.weights.store import TensorInfo, quote

DTYPE_BYTES: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
"""Bytes per element of every dtype that is read."""

_LENGTH_BYTES = 8
# The safetensors library's own limit.
_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS = 64  # of a torch tensor
_FETCH_AGAIN = "The file is truncated or corrupt; fetch it again."


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read and check one file's header.

    Returns its tensors by name, in the order of their bytes. Raises WeightsError.
    """
    try:
        if not path.is_file():
            _fail(path, "not a file" if path.exists() else "no such file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
                _fail(path, f"a file of {size} bytes whose header should have {length}", next=_FETCH_AGAIN)
            if length > _MAX_HEADER_BYTES:
                _fail(path, f"a header of {length} bytes", allowed=f"up to {_MAX_HEADER_BYTES}")
            text = file.read(length)
    except OSError as error:
        _fail(path, f"can't be read ({error.strerror or error})")
    if not text.startswith(b"{"):
        _fail(path, "the header is not a JSON object", next=_FETCH_AGAIN)
    header = parse_json_object(text, str(path), WeightsError, strict=True)
    _check_metadata(path, header.pop("__metadata__", {}))
    spans = [_tensor(path, name, entry) for name, entry in header.items()]
    return _place(path, spans, size - _LENGTH_BYTES - length)


def _check_metadata(path: Path, metadata: object) -> None:
    entries = cast("dict[str, object]", metadata) if isinstance(metadata, dict) else {"": None}
    if not all(isinstance(value, str) for value in entries.values()):
        _fail(path, "__metadata__ is not an object of strings")


def _tensor(path: Path, name: str, entry: object) -> tuple[int, int, TensorInfo]:
    """Return (first byte, end byte, description) of one header entry."""
    what = f"tensor {quote(name)}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _fail(path, f"{what} is not described by dtype, shape and data_offsets alone")
    fields = cast("dict[str, object]", entry)
    dtype, shape, offsets = fields["dtype"], _whole_numbers(fields["shape"]), _whole_numbers(fields["data_offsets"])
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        _fail(path, f"{what} has dtype {quote(str(dtype))}", allowed=", ".join(DTYPE_BYTES))
    if shape is None or math.prod(filter(None, shape)) >= 1 << 63:
        _fail(
            path,
            f"{what} has shape {quote(str(fields['shape']))}",
            allowed=f"up to {_MAX_DIMENSIONS} whole numbers from 0",
        )
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        _fail(path, f"{what} has data_offsets {quote(str(fields['data_offsets']))}", allowed="[begin, end]")
    nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
    begin, end = offsets
    if end - begin != nbytes:
        _fail(
            path, f"{what} takes {end - begin} bytes", allowed=f"{nbytes}, as its shape {list(shape)} of {dtype} says"
        )
    return begin, end, TensorInfo(name, shape, dtype, nbytes, path)


def _whole_numbers(value: object) -> tuple[int, ...] | None:
    """Return a JSON list of sizes or offsets as a tuple, or None when it is anything else."""
    if not isinstance(value, list):
        return None
    items = cast("Sequence[object]", value)
    if len(items) > _MAX_DIMENSIONS:
        return None
    numbers = tuple(item for item in items if type(item) is int and 0 <= item < 1 << 63)
    return numbers if len(numbers) == len(items) else None


def _place(path: Path, spans: list[tuple[int, int, TensorInfo]], data_bytes: int) -> dict[str, TensorInfo]:
    """Check that the tensors tile the data section without a gap and return them in that order."""
    expected = 0
    tensors: dict[str, TensorInfo] = {}
    for begin, end, tensor in sorted(spans, key=lambda span: span[:2]):
        what = f"tensor {quote(tensor.name)}"
        if end > data_bytes:
            _fail(path, f"{what} ends at byte {end} of the data, but there are {data_bytes}", next=_FETCH_AGAIN)
        if begin != expected:
            problem = "overlaps the tensor before it" if begin < expected else "leaves a gap before it"
            _fail(path, f"{what} begins at byte {begin} of the data and {problem}", allowed=str(expected))
        expected = end
        tensors[tensor.name] = tensor
    if expected != data_bytes:
        _fail(path, f"{data_bytes} bytes of data", allowed=f"{expected}, as the header says", next=_FETCH_AGAIN)
    return tensors


def _fail(path: Path, problem: str, *, allowed: str | None = None, next: str | None = None) -> NoReturn:
    raise WeightsError(str(path), got=problem, allowed=allowed, next=next)
