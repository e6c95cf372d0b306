"""A strict, fast reader of GGUF headers.

The gguf library's own reader takes seconds on a 49k-token vocabulary, because it makes one array per string, and it
trusts the counts that it reads. This one takes milliseconds, checks every count and offset against the file's size
before acting on it, and answers every malformed file with one WeightsError. Source: ggml's docs/gguf.md.
"""

import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from onewave.base.errors import WeightsError
from onewave.base.gguf_types import GGUF_TYPES
from onewave.weights.formats.gguf_pieces import GGUF_MAGIC
from onewave.weights.store import TensorInfo, quote

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
# llama.cpp has no nested arrays at all; nothing legitimate goes deeper than a list of lists.
_MAX_ARRAY_DEPTH = 4
# Values of all metadata together: real vocabularies have some 300,000 tokens.
_MAX_VALUES = 1 << 24
_MAX_NAME_BYTES = 65_535
_KV_MIN_BYTES = 8 + 4 + 1
_TENSOR_MIN_BYTES = 8 + 4 + 4 + 8

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
# Value types of the metadata: id -> NumPy dtype.
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True)
class GGUFTensor(TensorInfo):
    """A tensor and where its bytes begin, counted from the start of the file."""

    offset: int


Headers = dict[tuple[Path, int], tuple[dict[str, object], dict[str, GGUFTensor]]]
"""Metadata and tensors of files, by path and size. A vocabulary of 128k tokens takes 0.13 s to read."""


class GGUFFile:
    """One mapped GGUF file: its metadata and its table of tensors.

    metadata: plain Python values (int, float, bool, str, and lists of them) by key.
    """

    def __init__(
        self, path: Path, data: mmap.mmap, metadata: Mapping[str, object], tensors: Mapping[str, GGUFTensor]
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._data = data

    @classmethod
    def open(cls, path: str | os.PathLike[str], headers: Headers | None = None) -> "GGUFFile":
        """Map a file and read its header. headers: those that were read before, and this one from now on; None: none
        are remembered. Raises WeightsError naming the file, and the tensor where one is at fault."""
        path = Path(path)
        data = _map_file(path)
        headers = {} if headers is None else headers
        key = path, len(data)
        try:
            if key not in headers:
                headers[key] = _HeaderReader(path, data).read()
        except BaseException:
            data.close()
            raise
        return cls(path, data, *headers[key])

    def raw(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """Return a tensor's bytes as they are in the file: uint8 [nbytes], a read-only view of the mapping."""
        return np.frombuffer(self._data, np.uint8, count=tensor.nbytes, offset=tensor.offset)

    def close(self) -> None:
        """Unmap the file, unless views of it are still in use; then it goes with the last of them."""
        try:
            self._data.close()
        except BufferError:
            return


def _map_file(path: Path) -> mmap.mmap:
    try:
        if not path.is_file():
            raise WeightsError(str(path), got="not a file" if path.exists() else "no such file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 4:
                raise WeightsError(str(path), got=f"{size} bytes", next="This is not a GGUF file, or it is truncated.")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise WeightsError(str(path), got=f"can't be read ({error})") from None


class _HeaderReader:
    """Reads a header front to back; `pos` never passes the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._size, self._pos = path, data, len(data), 0
        self._values = 0

    def read(self) -> tuple[dict[str, object], dict[str, GGUFTensor]]:
        num_tensors, num_pairs = self._preamble()
        metadata: dict[str, object] = {}
        for index in range(num_pairs):
            key = self._name(f"metadata key {index}")
            if key in metadata:
                self._fail(f"metadata key {quote(key)} appears twice")
            metadata[key] = self._value(self._u32(key), key, 0)
        alignment = self._alignment(metadata)
        entries = [self._tensor_entry(index) for index in range(num_tensors)]
        data_start = -(-self._pos // alignment) * alignment
        return metadata, self._place(entries, data_start, alignment)

    # The pieces of a header, in the order of the file.

    def _preamble(self) -> tuple[int, int]:
        if self._data[:4] != GGUF_MAGIC:
            self._fail(f"starts with {self._data[:4]!r}, not {GGUF_MAGIC!r}: this is not a GGUF file")
        self._pos = 4
        version = self._u32("version")
        if version not in _VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in range(1, 1 << 16):
                self._fail("is a big-endian GGUF", "Only little-endian files are read; convert it.")
            self._fail(f"has GGUF version {version}; allowed: {', '.join(map(str, _VERSIONS))}", "Convert it anew.")
        num_tensors, num_pairs = self._u64("tensor count"), self._u64("metadata count")
        self._check_room(num_tensors, _TENSOR_MIN_BYTES, "tensors")
        self._check_room(num_pairs, _KV_MIN_BYTES, "metadata pairs")
        return num_tensors, num_pairs

    def _alignment(self, metadata: Mapping[str, object]) -> int:
        value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(value) is not int or not 1 <= value < 1 << 32 or value & (value - 1):
            self._fail(f"general.alignment is {quote(str(value))}; allowed: a power of two")
        return value

    def _tensor_entry(self, index: int) -> tuple[str, tuple[int, ...], str, int, int]:
        """Return (name, shape in torch's order, type name, bytes, offset within the data section)."""
        name = self._name(f"name of tensor {index}")
        what = f"tensor {quote(name)}"
        rank = self._u32(what)
        if rank > _MAX_DIMENSIONS:
            self._fail(f"{what} has {rank} dimensions; allowed: up to {_MAX_DIMENSIONS}")
        dimensions = [self._u64(what) for _ in range(rank)]
        type_id, offset = self._u32(what), self._u64(what)
        kind = GGUF_TYPES.get(type_id)
        if kind is None:
            names = ", ".join(t.name for t in GGUF_TYPES.values())
            self._fail(f"{what} has unknown type {type_id}; allowed: {names}", "Convert the model to one of them.")
        if 0 in dimensions or math.prod(dimensions) >= 1 << 63:
            self._fail(f"{what} has shape {dimensions[::-1]}, which no tensor can have")
        cols = dimensions[0] if dimensions else 1
        if cols % kind.block_elements:
            self._fail(f"{what} has rows of {cols} elements, but {kind.name} packs {kind.block_elements} to a block")
        nbytes = math.prod(dimensions) // kind.block_elements * kind.block_bytes
        return name, tuple(reversed(dimensions)), kind.name, nbytes, offset

    def _place(
        self, entries: list[tuple[str, tuple[int, ...], str, int, int]], data_start: int, alignment: int
    ) -> dict[str, GGUFTensor]:
        """Check every tensor's place in the data section and return the table."""
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_name, nbytes, offset in entries:
            what = f"tensor {quote(name)}"
            if name in tensors:
                self._fail(f"{what} appears twice")
            if offset % alignment:
                self._fail(f"{what} begins at offset {offset}, which is not a multiple of the alignment {alignment}")
            if data_start + offset + nbytes > self._size:
                self._fail(
                    f"{what} ends at byte {data_start + offset + nbytes}, but the file has {self._size}",
                    "The file is truncated or corrupt; fetch it again.",
                )
            tensors[name] = GGUFTensor(name, shape, type_name, nbytes, self._path, data_start + offset)
        end, previous = data_start, ""
        for tensor in sorted(tensors.values(), key=lambda t: t.offset):
            if tensor.offset < end:
                self._fail(f"tensors {quote(previous)} and {quote(tensor.name)} overlap")
            end, previous = tensor.offset + tensor.nbytes, tensor.name
        return tensors

    # Values of the metadata.

    def _value(self, type_id: int, what: str, depth: int) -> object:
        if type_id == _STRING:
            return self._texts(1, what)[0]
        if type_id == _ARRAY:
            return self._array(what, depth)
        return self._numbers(type_id, 1, what)[0]

    def _array(self, what: str, depth: int) -> list[object]:
        if depth >= _MAX_ARRAY_DEPTH:
            self._fail(f"{quote(what)} nests arrays deeper than {_MAX_ARRAY_DEPTH}")
        type_id, count = self._u32(what), self._u64(what)
        if type_id == _STRING:
            return list(self._texts(count, what))
        if type_id == _ARRAY:
            self._check_room(count, 4 + 8, f"arrays in {quote(what)}")
            self._count(count, what)
            return [self._array(what, depth + 1) for _ in range(count)]
        return self._numbers(type_id, count, what)

    def _numbers(self, type_id: int, count: int, what: str) -> list[object]:
        dtype = np.dtype("u1") if type_id == _BOOL else np.dtype(_SCALARS.get(type_id, "V1"))
        if dtype.kind == "V":
            self._fail(f"{quote(what)} has unknown value type {type_id}; allowed: 0 to 12")
        self._check_room(count, dtype.itemsize, f"values in {quote(what)}")
        self._count(count, what)
        values = np.frombuffer(self._data[self._pos : self._pos + count * dtype.itemsize], dtype)
        self._pos += count * dtype.itemsize
        if type_id == _BOOL:
            if values.size and values.max() > 1:
                self._fail(f"{quote(what)} holds a truth value that is neither 0 nor 1")
            values = values.astype(bool)
        return values.tolist()

    def _texts(self, count: int, what: str, errors: str = "replace") -> list[str]:
        """Read `count` strings; bytes that are not UTF-8 become U+FFFD, or with errors="strict" fail.

        This loop is most of a header's cost, hence the local names."""
        self._check_room(count, 8, f"strings in {quote(what)}")
        self._count(count, what)
        data, pos, size, length_at = self._data, self._pos, self._size, _U64.unpack_from
        texts: list[str] = []
        append = texts.append
        try:
            for _ in range(count):
                (length,) = length_at(data, pos)
                pos += 8
                end = pos + length
                if end > size:
                    self._truncated(what)
                append(data[pos:end].decode("utf-8", errors))
                pos = end
        except struct.error:
            self._truncated(what)
        except UnicodeDecodeError:
            self._fail(f"{quote(what)} holds a string that is not UTF-8")
        self._pos = pos
        return texts

    def _name(self, what: str) -> str:
        """Read a key or a tensor's name."""
        start = self._pos
        (name,) = self._texts(1, what, "strict")
        if not name or self._pos - start - 8 > _MAX_NAME_BYTES:
            self._fail(f"{what} is empty or longer than {_MAX_NAME_BYTES} bytes")
        return name

    def _u32(self, what: str) -> int:
        return self._integer(_U32, what)

    def _u64(self, what: str) -> int:
        return self._integer(_U64, what)

    def _integer(self, form: struct.Struct, what: str) -> int:
        if self._pos + form.size > self._size:
            self._truncated(what)
        (value,) = form.unpack_from(self._data, self._pos)
        self._pos += form.size
        return value

    def _count(self, count: int, what: str) -> None:
        """Count values to be made, each of which takes many times its bytes in the file."""
        self._values += count
        if self._values > _MAX_VALUES:
            self._fail(f"its metadata hold {self._values} values up to {quote(what)}; allowed: up to {_MAX_VALUES}")

    def _check_room(self, count: int, each: int, what: str) -> None:
        if count * each > self._size - self._pos:
            self._fail(
                f"claims {count} {what}, more than the {self._size - self._pos} bytes left can hold",
                "The file is truncated or corrupt; fetch it again.",
            )

    def _truncated(self, what: str) -> NoReturn:
        self._fail(f"the header ends inside {quote(what)}", "The file is truncated; fetch it again.")

    def _fail(self, problem: str, next: str | None = None) -> NoReturn:
        raise WeightsError(str(self._path), got=problem, next=next)
