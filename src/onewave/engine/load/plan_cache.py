"""Decode programs kept on disk: planning and proving a large model's step takes seconds, reading it back tens of ms.

A file is named after everything that the program follows from: the model's configuration, batch, workers, and the
sources that plan, prove and lower it, so that a program of other code is never found. Its first 32 bytes are the
SHA-256 of the rest (NumPy arrays, no pickles); what does not match is planned anew. It moves into place by one rename,
and only a table that `verify` has proved gets there. A cache that can't be written or read is as good as none.

A program in the cache also says that its kernels are compiled, so its name holds the whole configuration and the
kernels' sources. Programs of the built-in models' shapes ship with the package (`tools/programs.py`): their names hold
what planning looks at, and its sources.
"""

import hashlib
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from onewave.base.weight_formats import MixedFormat
from onewave.models.llama_plan import DecodeStep, planned_facts
from onewave.wave.plan.program import WaveProgram
from onewave.wave.plan.program_file import program_bytes, read_program
from onewave.weights.fetch.sources import BUILTIN_DIR

_PACKAGE = Path(__file__).parents[2]
_SOURCES = ("tiles/**/*.py", "wave/**/*.py", "models/llama_plan.py", "engine/load/plan_cache.py")
PLANNING_SOURCES = (
    "models/llama_plan.py", "tiles/graph/builders.py", "tiles/graph/graph.py", "tiles/order/policies.py",
    "tiles/order/schedule.py", "tiles/proof/happens_before.py", "tiles/proof/table.py", "tiles/proof/verify.py",
    "wave/plan/*.py",
)  # fmt: skip
"""The modules that a program follows from: what llama_plan imports, but for errors and formats' sizes."""
SHIPPED = BUILTIN_DIR / "programs"
"""Programs that ship with the package."""
LAUNCHERS = _PACKAGE / "wave" / "prebuilt" / "launchers.json"
"""{"launchers": [types of a kernel's arguments], "loads": {launchers_key: numbers of its launchers}}."""
_DIGEST_BYTES = 32
# Each file has some megabytes; the oldest go.
_MAX_FILES = 16
_UNFINISHED = ".program-"
# Writing one takes a moment.
_STALE_SECONDS = 3600.0


def program_path(step: DecodeStep, *, workers: int, cache_dir: Path) -> Path:
    """Where the cache keeps the program of a step, whether or not it is there."""
    return cache_dir / "wave" / f"{_key(step)}-{workers}.program"


def shipped_path(step: DecodeStep, *, workers: int) -> Path:
    """Where the package keeps the program of a step, whether or not it is there."""
    return SHIPPED / f"{_shipped_key(step)}-{workers}.program"


def is_shipped(step: DecodeStep) -> bool:
    """Say whether the package has a step's program, for any number of workers."""
    return any(SHIPPED.glob(f"{_shipped_key(step)}-*.program"))


def shipped_launchers(step: DecodeStep) -> list[tuple[Any, ...]]:
    """Return the types of the arguments of each kernel that a load launches, where the package knows them
    (tools/launchers.py): for C compilers to make what launches them. None is needed for a load to be right."""
    try:
        kept: dict[str, Any] = json.loads(LAUNCHERS.read_text())
        numbers: list[int] = kept["loads"].get(launchers_key(step), [])
        return [_as_tuples(kept["launchers"][number]) for number in numbers]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        return []


def launchers_key(step: DecodeStep) -> str:
    """The name of a load in LAUNCHERS."""
    facts: dict[str, object] = {"config": planned_facts(step.config)}
    if isinstance(step.weight_format, MixedFormat):  # whose kernels are others than of a format of the same bytes
        facts["format"] = step.weight_format.number
    return _digest_of(facts, step)


def _as_tuples(types: Any) -> Any:
    """JSON's lists as what they were."""
    return tuple(_as_tuples(each) for each in cast("list[Any]", types)) if isinstance(types, list) else types


def planned_before(step: DecodeStep, *, cache_dir: Path) -> bool:
    """Say whether the cache keeps a step's program, for any number of workers, without asking a GPU for theirs."""
    try:
        return any((cache_dir / "wave").glob(f"{_key(step)}-*.program"))
    except (OSError, ValueError):  # a directory that may not be searched, or no path at all
        return False


def _key(step: DecodeStep) -> str:
    facts = {"config": asdict(step.config), "sources": _sources_digest(_SOURCES)}
    return _digest_of(facts, step)


def _shipped_key(step: DecodeStep) -> str:
    facts = {"config": planned_facts(step.config), "sources": _sources_digest(PLANNING_SOURCES)}
    return _digest_of(facts, step)


def _digest_of(facts: Mapping[str, object], step: DecodeStep) -> str:
    whole = {**facts, "batch": step.padded, "weight_bytes": step.weight_bytes, "digits": step.digits}
    if step.widths:
        whole["widths"] = step.widths
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:32]


def save_program(program: WaveProgram, path: Path, *, keep_all: bool = False) -> bool:
    """Write a program; False if that can't be done. keep_all: the oldest in its folder do not make room."""
    data = program_bytes(program)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not tempfile's, which one user alone may read: a cache may be for all users of a machine.
        work = path.with_name(f"{_UNFINISHED}{secrets.token_hex(8)}")
        try:
            with work.open("xb") as file:
                file.write(hashlib.sha256(data).digest())
                file.write(data)
            os.replace(work, path)
        except BaseException:
            with suppress(OSError):
                work.unlink(missing_ok=True)
            raise
    except (OSError, ValueError):
        return False
    if not keep_all:
        _make_room(path.parent)
    return True


def _make_room(directory: Path) -> None:
    """Remove the oldest programs, and what processes that ended while they wrote have left."""
    with suppress(OSError):  # another process may be tidying up
        files = sorted((_written(file), file) for file in directory.glob("*.program"))
        left = [(_written(file), file) for file in directory.glob(f"{_UNFINISHED}*")]
        stale = [file for written, file in left if written < time.time() - _STALE_SECONDS]
        for file in [*(file for _, file in files[:-_MAX_FILES]), *stale]:
            file.unlink(missing_ok=True)


def _written(file: Path) -> float:
    """When it was last changed, in seconds; 0 for one that is gone."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def load_program(path: Path) -> WaveProgram | None:
    """Read a program back; None when there is none, or none that is whole."""
    try:
        data = path.read_bytes()
    except (OSError, ValueError):
        return None
    if len(data) <= _DIGEST_BYTES or hashlib.sha256(data[_DIGEST_BYTES:]).digest() != data[:_DIGEST_BYTES]:
        return None
    try:
        return read_program(data[_DIGEST_BYTES:])
    except ValueError:
        return None


def _sources_digest(patterns: Sequence[str]) -> str:
    """A digest of the code that a program follows from."""
    digest = hashlib.sha256()
    for pattern in patterns:
        for file in sorted(_PACKAGE.glob(pattern)):
            digest.update(str(file.relative_to(_PACKAGE)).encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
