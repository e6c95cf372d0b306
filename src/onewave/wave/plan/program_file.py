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


def program_bytes(program: WaveProgram, *, table: NDArray[np.int32] | None = None) -> bytes:
    """Write a program out. table: words of the task table that it was laid out from, to be kept beside it."""
    weights = list(program.stream)
    text = {
        "shape": vars(program.shape),
        "weights": weights,
        "regions": [vars(region) for region in program.regions],
        "names": program.names,
        "phases": program.phases,
        "numbers": [program.stream_tiles, program.set_words, program.max_slices, program.num_scales],
        "first_scale": dict(program.first_scale),
    }
    buffer = io.BytesIO()
    np.savez(
        buffer,
        table=np.zeros(0, np.int32) if table is None else table,
        text=np.frombuffer(json.dumps(text).encode(), dtype=np.uint8),
        steps=program.steps,
        lanes=program.lanes,
        waits=program.waits,
        totals=program.totals,
        slack=program.slack,
        key_tasks=program.key_tasks,
        counts=np.array([len(program.stream[name]) for name in weights], dtype=np.int64),
        stream=np.concatenate([np.zeros((0, 3)), *program.stream.values()]).astype(np.int32),
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
    stream_tiles, set_words, max_slices, num_scales = text["numbers"]
    return WaveProgram(
        shape=TileShape(**text["shape"]),
        steps=arrays["steps"],
        lanes=arrays["lanes"],
        waits=arrays["waits"],
        totals=arrays["totals"],
        slack=arrays["slack"],
        key_tasks=arrays["key_tasks"],
        stream=dict(zip(text["weights"], pieces, strict=True)),
        stream_tiles=stream_tiles,
        set_words=set_words,
        regions=tuple(Region(**region) for region in text["regions"]),
        names=tuple(text["names"]),
        phases=tuple(text["phases"]),
        max_slices=max_slices,
        first_scale=text["first_scale"],
        num_scales=num_scales,
    )
