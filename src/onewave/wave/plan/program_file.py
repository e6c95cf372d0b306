"""A wave program as the bytes of an .npz file: NumPy arrays, no pickles.

Arrays: those of WaveProgram under their own names; stream and counts, the stream's entries of all weights and how many
each weight has; text, UTF-8 JSON of everything else; table, the task table's words, or none.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onewave.wave.plan.layout import STEP_WORDS, TileShape
from onewave.wave.plan.program import WaveProgram
from onewave.wave.plan.regions import Region

_ARRAYS = ("steps", "lanes", "waits", "totals", "slack", "key_tasks")
_NUMBERS = ("stream_tiles", "set_words", "max_slices", "flight", "num_scales")


def program_bytes(program: WaveProgram, *, table: NDArray[np.int32] | None = None) -> bytes:
    """Write a program out. table: words of the task table that it was laid out from, to be kept beside it."""
    text = {
        "shape": vars(program.shape),
        "weights": list(program.stream),
        "regions": [vars(region) for region in program.regions],
        "names": program.names,
        "phases": program.phases,
        "numbers": {name: getattr(program, name) for name in _NUMBERS},
        "first_scale": dict(program.first_scale),
    }
    buffer = io.BytesIO()
    np.savez(
        buffer,
        table=np.zeros(0, np.int32) if table is None else table,
        text=np.frombuffer(json.dumps(text).encode(), dtype=np.uint8),
        counts=np.array([len(entries) for entries in program.stream.values()], dtype=np.int64),
        stream=np.concatenate([np.zeros((0, 3)), *program.stream.values()]).astype(np.int32),
        **{name: getattr(program, name) for name in _ARRAYS},
    )
    return buffer.getvalue()


def read_program(data: bytes) -> WaveProgram:
    """Read what program_bytes wrote. Raises ValueError for anything else."""
    try:
        return _program(_arrays(data))
    except (KeyError, TypeError) as error:
        raise ValueError("no wave program") from error


def read_table(data: bytes) -> NDArray[np.int32]:
    """Read the task table's words that program_bytes kept. Raises ValueError where there are none."""
    table = _arrays(data).get("table")
    if table is None or table.dtype != np.int32 or len(table) == 0:
        raise ValueError("no task table")
    return table


def _arrays(data: bytes) -> dict[str, NDArray[Any]]:
    try:
        with np.load(io.BytesIO(data)) as arrays:  # refuses pickles
            return {name: arrays[name] for name in arrays.files}
    except (TypeError, AttributeError, zipfile.BadZipFile, OSError, EOFError) as error:
        raise ValueError("no .npz file") from error


def _program(arrays: Mapping[str, NDArray[Any]]) -> WaveProgram:
    text = json.loads(arrays["text"].tobytes())
    ends = np.cumsum(arrays["counts"])[:-1]
    pieces = np.split(arrays["stream"].astype(np.int64), ends)
    if arrays["steps"].shape[1] != STEP_WORDS or len(text["weights"]) != len(pieces):
        raise ValueError("a program of another layout")
    return WaveProgram(
        shape=TileShape(**text["shape"]),
        stream=dict(zip(text["weights"], pieces, strict=True)),
        regions=tuple(Region(**region) for region in text["regions"]),
        names=tuple(text["names"]),
        phases=tuple(text["phases"]),
        first_scale=text["first_scale"],
        **{name: arrays[name] for name in _ARRAYS},
        **{name: text["numbers"][name] for name in _NUMBERS},
    )
