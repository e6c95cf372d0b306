"""PTX's numbers as NumPy's, for ptx_in_numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

KINDS: dict[str, Any] = {
    "s16": np.int16, "u16": np.uint16, "b16": np.uint16, "s32": np.int32, "u32": np.uint32, "b32": np.uint32,
    "f32": np.float32, "f64": np.float64, "s64": np.int64, "u64": np.uint64, "b64": np.uint64, "pred": np.bool_,
}  # fmt: skip


def widened(kind: str, bits: np.ndarray) -> np.ndarray:
    """16-bit floats as float32."""
    if kind == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(kind: str, values: np.ndarray) -> np.ndarray:
    """float32 to 16 bits, to the nearest even."""
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    raw = values.view(np.uint32)
    up = (raw + np.uint32(0x7FFF) + ((raw >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), up).astype(np.uint16)


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    wider = np.float64 if a.dtype == np.float32 else np.longdouble
    return (a.astype(wider) * b + c).astype(a.dtype)


def ones(x: np.ndarray) -> np.ndarray:
    """How many bits of each are set."""
    return np.unpackbits(x.view(np.uint8).reshape(len(x), -1), axis=1).sum(1).astype(x.dtype)
