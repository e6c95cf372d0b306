"""The ledger: every measurement a JSON line, with what it ran on, so that a figure in the docs can cite one.

A line of `ledger/<device>.jsonl`:

    schema      1
    commit      of the sources, "-dirty" appended when they had changed; "unknown" where nothing says
    date        UTC, ISO 8601
    device      the file's name: h200, cpu. device_name: in full. driver: of the GPU, or null
    onewave, torch, triton, python     versions; null for what isn't installed
    command     the command line
    model       what was measured, metric: which of its quantities, unit: of the statistics
    n, p20, p50, p80, mean, sd         of the samples
    ceiling     {name, value, unit, method} measured in the same run, or null
    extra       what else is needed to repeat it: batch size, lengths, dtype, ...

Lines are appended, never changed: a citation `ledger/h200.jsonl:12` stays true.
"""

import io
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, cast

from onewave.base.errors import InvalidArgumentError, shown
from onewave.base.settings import Settings
from onewave.bench import machine
from onewave.bench.ceilings import Ceiling
from onewave.bench.clock import Summary

_TEXTS = ("commit", "date", "device", "device_name", "onewave", "python", "command", "model", "metric", "unit")
_TEXTS_OR_NULL = ("driver", "torch", "triton")
_NUMBERS = ("p20", "p50", "p80", "mean", "sd")
_FIELDS = {"schema", "n", "ceiling", "extra", *_TEXTS, *_TEXTS_OR_NULL, *_NUMBERS}


@dataclass(frozen=True)
class Measurement:
    """One measured quantity. summary is in `unit`; extra must be plain JSON, where NaN and infinities become null."""

    model: str
    metric: str
    unit: str
    summary: Summary
    ceiling: Ceiling | None = None
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


def as_record(measurement: Measurement, *, device_name: str, command: str, settings: Settings) -> dict[str, Any]:
    """Put a measurement and what it ran on into a ledger line's form. device_name: "cpu", or the GPU's name."""
    ceiling, ran_on = measurement.ceiling, _ran_on(device_name, settings)
    return {
        "schema": 1,
        "commit": ran_on["commit"],
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **ran_on,
        "command": command,
        "model": measurement.model,
        "metric": measurement.metric,
        "unit": measurement.unit,
        **asdict(measurement.summary),
        "ceiling": None
        if ceiling is None
        else {"name": ceiling.name, "value": ceiling.value, "unit": ceiling.unit, "method": ceiling.method},
        # JSON has no NaN and no infinity.
        "extra": {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in measurement.extra.items()
        },
    }


@cache
def _ran_on(device_name: str, settings: Settings) -> dict[str, Any]:
    """Asked once: programs are run for it, which takes longer than many rows take to be measured."""
    on_gpu = device_name != "cpu"
    gpus = [gpu for gpu in machine.gpus() if gpu.name == device_name] if on_gpu else []
    return {
        "commit": machine.source_commit(settings),
        "device": machine.device_slug(device_name),
        "device_name": device_name if on_gpu else machine.cpu_name(),
        "driver": gpus[0].driver if gpus else None,
        "onewave": machine.package_version("onewave") or "source",
        "torch": machine.package_version("torch"),
        "triton": machine.package_version("triton"),
        "python": platform.python_version(),
    }


def append(directory: Path, record: Mapping[str, Any]) -> str:
    """Append a record to its device's file, safely beside other processes. Returns its citation, `name.jsonl:line`.

    Raises InvalidArgumentError when the directory can't be written.
    """
    validate(record, "a new line")
    path = directory / f"{record['device']}.jsonl"
    # An argument that is not UTF-8 reaches us with half a surrogate pair a byte, which JSON can only write escaped.
    line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with path.open("ab+", buffering=0) as file:
            _lock(file.fileno())
            file.seek(0)
            before = file.read()
            # A line that an interrupted writer left open must not run into ours.
            gap = b"" if not before or before.endswith(b"\n") else b"\n"
            _append_whole(file, gap + line + b"\n", len(before))
            number = (before + gap).count(b"\n") + 1
            return f"{path.name}:{number}"
    except OSError as error:
        raise InvalidArgumentError(f"ledger {path}", got=f"can't be written ({error.strerror or error})") from None


def _append_whole(file: io.FileIO, data: bytes, length: int) -> None:
    """Write behind a file's first `length` bytes, or, where the disk is full, leave it at those."""
    try:
        while data:
            data = data[file.write(data) :]
    except BaseException:
        file.truncate(length)
        raise


def validate(record: Mapping[str, Any], where: str) -> None:
    """Check a record's fields. Raises InvalidArgumentError naming the field."""
    if odd := record.keys() ^ _FIELDS:
        raise InvalidArgumentError(f"{where}: fields missing or unknown", got=", ".join(sorted(odd)))
    for name in (*_TEXTS, *_TEXTS_OR_NULL):
        value = record[name]
        if not (isinstance(value, str) and value) and not (value is None and name in _TEXTS_OR_NULL):
            raise InvalidArgumentError(f"{where}: {name}", got=shown(value), allowed="text")
    for name in _NUMBERS:
        if not _is_number(record[name]):
            raise InvalidArgumentError(f"{where}: {name}", got=shown(record[name]), allowed="a finite number")
    if record["schema"] != 1 or not isinstance(record["n"], int) or record["n"] < 1:
        got = f"{record['schema']!r}, {record['n']!r}"
        raise InvalidArgumentError(f"{where}: schema, n", got=got, allowed="1, 1..")
    if not record["p20"] <= record["p50"] <= record["p80"] or record["sd"] < 0:
        raise InvalidArgumentError(f"{where}: p20, p50, p80, sd", got="out of order, or sd below 0")
    try:
        datetime.strptime(record["date"], "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        raise InvalidArgumentError(f"{where}: date", got=record["date"], allowed="YYYY-MM-DDTHH:MM:SSZ") from None
    ceiling: object = record["ceiling"]
    entry = cast("dict[str, object]", ceiling) if isinstance(ceiling, dict) else {}
    whole = entry.keys() == {"name", "value", "unit", "method"} and _is_number(entry["value"])
    if ceiling is not None and not whole:
        raise InvalidArgumentError(
            f"{where}: ceiling", got=shown(record["ceiling"]), allowed="name, value, unit and method"
        )
    if not isinstance(record["extra"], dict):
        raise InvalidArgumentError(f"{where}: extra", got=shown(record["extra"]), allowed="an object")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _lock(descriptor: int) -> None:
    """Wait until no other process appends; the lock falls with the descriptor."""
    try:
        import fcntl
    except ImportError:  # Windows: one short append is all there is
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX)
