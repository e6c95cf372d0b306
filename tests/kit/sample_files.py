"""Small weight files for the tests, byte by byte, so that any field can be made wrong."""

import json
import struct
from collections.abc import Iterable, Mapping

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}

Pair = tuple[str, int, object]
"""Key, value type, value; an array's value is (element type, elements)."""
Tensor = tuple[str, tuple[int, ...], int, bytes]
"""Name, dimensions in GGUF's order (fastest first), type id, bytes."""


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(type_id: int, content: object) -> bytes:
    if type_id == STRING:
        return text(content)
    if type_id == ARRAY:
        element_type, elements = content
        head = struct.pack("<IQ", element_type, len(elements))
        return head + b"".join(value(element_type, element) for element in elements)
    return struct.pack("<" + _FORMS[type_id], content)


def pair(key: str, type_id: int, content: object) -> bytes:
    return text(key) + struct.pack("<I", type_id) + value(type_id, content)


def tensor_entry(name: str, dimensions: Iterable[int], type_id: int, offset: int) -> bytes:
    dimensions = tuple(dimensions)
    return (
        text(name)
        + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        + struct.pack("<IQ", type_id, offset)
    )


def gguf_bytes(
    pairs: Iterable[Pair] = (),
    tensors: Iterable[Tensor] = (),
    *,
    alignment: int = 32,
    offsets: Mapping[str, int] | None = None,
) -> bytes:
    """Build a GGUF file. offsets: of tensors, other ones than the right ones."""
    pairs, tensors = list(pairs), list(tensors)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    head += b"".join(pair(*entry) for entry in pairs)
    data = b""
    for name, dimensions, type_id, raw in tensors:
        offset = (offsets or {}).get(name, len(data))
        head += tensor_entry(name, dimensions, type_id, offset)
        data += raw + bytes(-len(raw) % alignment)
    return head + bytes(-len(head) % alignment) + data


def small_gguf() -> bytes:
    """Return a valid GGUF with every kind of metadata value and plain and quantised tensors."""
    pairs = [
        ("general.architecture", STRING, "llama"),
        ("general.alignment", U32, 32),
        ("an.int", I64, -5),
        ("a.float", F32, 0.5),
        ("a.flag", BOOL, 1),
        ("some.words", ARRAY, (STRING, ["a", "Ġb", ""])),
        ("some.numbers", ARRAY, (I32, [1, -2, 3])),
        ("some.lists", ARRAY, (ARRAY, [(U8, [1, 2]), (U8, [])])),
    ]
    return gguf_bytes(pairs, small_gguf_tensors())


def small_gguf_tensors() -> list[Tensor]:
    rng = np.random.default_rng(0)
    return [
        ("norm.weight", (4,), 0, np.arange(4, dtype="<f4").tobytes()),
        ("half.weight", (4, 3), 1, np.arange(12, dtype="<f2").tobytes()),
        ("q4_1.weight", (64, 3), 3, quantized_bytes(rng, 6, 20, 2)),
        ("q8_0.weight", (32, 2), 8, quantized_bytes(rng, 2, 34, 1)),
    ]


def quantized_bytes(rng: np.random.Generator, blocks: int, block_bytes: int, num_halves: int) -> bytes:
    """Return random blocks that begin with `num_halves` finite float16 scales."""
    raw = rng.integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
    scales = rng.normal(size=(blocks, num_halves)).astype("<f2")
    raw[:, : 2 * num_halves] = scales.view(np.uint8)
    return raw.tobytes()


def safetensors_bytes(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Build a safetensors file from a header (an object to dump, or raw bytes) and its data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def small_safetensors() -> bytes:
    """Return a valid safetensors file with two tensors."""
    header = {
        "__metadata__": {"format": "pt"},
        "a.weight": entry("F32", [2, 3], 0, 24),
        "b.weight": entry("F16", [4], 24, 32),
    }
    return safetensors_bytes(header, bytes(range(24)) + bytes(8))
