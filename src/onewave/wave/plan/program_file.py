"""A wave program as bytes: a compressed .npz file of NumPy arrays, no pickles.

Arrays: those of WaveProgram under their own names; stream and counts, the stream's entries of all weights and how many
each weight has; names, of each step its opcode's place in a list, its task's number and its phase's place in another;
text, UTF-8 JSON of everything else; table, the task table's words, or none. Tables are kept as differences from row to
row, column by column: one worker's steps are much like the next one's, so 9 MB of an 8B's program take 20 KB.
"""

from __future__ import annotations

import io
import json
import lzma
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onewave.wave.plan.layout import STEP_WORDS, TileShape
from onewave.wave.plan.program import WaveProgram
from onewave.wave.plan.regions import Region

_ARRAYS = ("steps", "lanes", "waits", "totals", "slack", "key_tasks")
_NUMBERS = ("stream_tiles", "set_words", "max_slices", "flight", "num_scales")
# The fastest: what is left to compress is nearly all zeros.
_PRESET = 0


def program_bytes(program: WaveProgram, *, table: NDArray[np.int32] | None = None) -> bytes:
    """Write a program out. table: words of the task table that it was laid out from, to be kept beside it."""
    opcodes, numbers = zip(*(name.rsplit("#", 1) for name in program.names), strict=True) if program.names else ((), ())
    of_opcode, opcode = _numbered(opcodes)
    of_phase, phase = _numbered(program.phases)
    text = {
        "shape": vars(program.shape),
        "weights": list(program.stream),
        "regions": [vars(region) for region in program.regions],
        "opcodes": of_opcode,
        "phases": of_phase,
        "numbers": {name: getattr(program, name) for name in _NUMBERS},
        "first_scale": dict(program.first_scale),
        "widths": dict(program.widths),
    }
    tables: dict[str, Any] = {name: _differences(getattr(program, name)) for name in _ARRAYS}
    buffer = io.BytesIO()
    np.savez(
        buffer,
        table=np.zeros(0, np.int32) if table is None else table,
        text=np.frombuffer(json.dumps(text).encode(), dtype=np.uint8),
        counts=np.array([len(entries) for entries in program.stream.values()], dtype=np.int64),
        stream=_differences(np.concatenate([np.zeros((0, 3)), *program.stream.values()]).astype(np.int32)),
        names=_differences(np.array([opcode, list(map(int, numbers)), phase], dtype=np.int32).T),
        **tables,
    )
    return lzma.compress(buffer.getvalue(), preset=_PRESET)


def _numbered(values: Sequence[str]) -> tuple[list[str], list[int]]:
    """The values, each once, and the place of each among them."""
    places = {value: place for place, value in enumerate(dict.fromkeys(values))}
    return list(places), [places[value] for value in values]


def _differences(words: NDArray[np.int32]) -> NDArray[np.int32]:
    """Differences from row to row, a row for each column. They wrap around as sums do."""
    return np.ascontiguousarray(np.diff(words, axis=0, prepend=np.zeros_like(words[:1])).T)


def _sums(differences: NDArray[np.int32]) -> NDArray[np.int32]:
    """Undo _differences."""
    return np.ascontiguousarray(np.cumsum(differences, axis=-1, dtype=np.int32).T)


def read_program(data: bytes) -> WaveProgram:
    """Read what program_bytes wrote. Raises ValueError for anything else."""
    try:
        return _program(_arrays(data))
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError("no wave program") from error


def read_table(data: bytes) -> NDArray[np.int32]:
    """Read the task table's words that program_bytes kept. Raises ValueError where there are none."""
    table = _arrays(data).get("table")
    if table is None or table.dtype != np.int32 or len(table) == 0:
        raise ValueError("no task table")
    return table


def _arrays(data: bytes) -> dict[str, NDArray[Any]]:
    try:
        with np.load(io.BytesIO(lzma.decompress(data))) as arrays:  # refuses pickles
            return {name: arrays[name] for name in arrays.files}
    except (TypeError, AttributeError, zipfile.BadZipFile, OSError, EOFError, lzma.LZMAError) as error:
        raise ValueError("no .npz file") from error


def _program(arrays: Mapping[str, NDArray[Any]]) -> WaveProgram:
    text = json.loads(arrays["text"].tobytes())
    ends = np.cumsum(arrays["counts"])[:-1]
    pieces = np.split(_sums(arrays["stream"]).astype(np.int64), ends)
    tables = {name: _sums(arrays[name]) for name in _ARRAYS}
    if tables["steps"].shape[1] != STEP_WORDS or len(text["weights"]) != len(pieces):
        raise ValueError("a program of another layout")
    opcodes, phases = text["opcodes"], text["phases"]
    names: list[list[int]] = _sums(arrays["names"]).tolist()
    return WaveProgram(
        shape=TileShape(**text["shape"]),
        stream=dict(zip(text["weights"], pieces, strict=True)),
        regions=tuple(Region(**region) for region in text["regions"]),
        names=tuple(f"{opcodes[opcode]}#{number}" for opcode, number, _ in names),
        phases=tuple(phases[phase] for _, _, phase in names),
        first_scale=text["first_scale"],
        widths=text["widths"],
        **tables,
        **{name: text["numbers"][name] for name in _NUMBERS},
    )
