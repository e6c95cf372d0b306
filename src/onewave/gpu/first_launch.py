"""Prepares a process's first launches on a GPU, in threads beside the rest of a load.

Three things take tenths of a second each, mostly without Python's lock: the driver makes a context of the GPU; Triton
reads all of its own files, by whose digest compiled kernels are named; a C compiler makes what launches each kernel,
unless it is in Triton's cache. Triton's digest, and the hashes of our kernels' functions, are remembered for processes
that have the same files.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import secrets
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

# C compilers at once. More wait for processors; fewer, for one another.
_COMPILERS = 16
_begun: list[threading.Thread] = []
_looked_up = threading.Event()
_looked_up.set()  # nothing has begun, so there is nothing to wait for
_PACKAGE = Path(__file__).parents[1]
# Modules with kernels are imported with this one or later.
_IMPORTED_NS = time.time_ns()
# In the cache: {"files": a digest of their sizes and times, "triton": its digest, "hashes": those of functions}.
_FILE = "first-launch.json"


def begin_first_launch(index: int, cache_dir: Path, launchers: Sequence[Sequence[Any]] = ()) -> None:
    """Begin all that. No fork is safe afterwards.

    index: the GPU's number. cache_dir: where digest and hashes are remembered. launchers: types of the arguments of
    kernels that will be launched, as `make_launcher` takes them.
    """
    _start(lambda: _make_context(index))
    with suppress(ImportError):  # of which the launch complains
        # By one thread: another one would find half of it.
        import_module("triton")
        import_module("onewave.gpu.hashes")
    _looked_up.clear()
    reading = _start(lambda: _read_triton(cache_dir))
    if not reading:
        _looked_up.set()
    _begun.extend(reading)
    if launchers:
        _begun.extend(_start(lambda: _make_launchers(launchers)))


def await_hashes() -> None:
    """Wait until what another process has remembered is known."""
    _looked_up.wait()


def await_first_launch() -> None:
    """Wait for what names kernels and what launches them; else it would be done a second time beside it."""
    for thread in tuple(_begun):
        thread.join()
        with suppress(ValueError):  # another thread waited, too
            _begun.remove(thread)


def _start(act: Callable[[], object]) -> list[threading.Thread]:
    """Begin that in a thread. None where there are no more threads: then the load does it."""

    def quietly() -> None:
        with suppress(Exception):  # then the load does it, and says what is wrong
            act()

    thread = threading.Thread(target=quietly, name="first-launch", daemon=True)
    with suppress(RuntimeError):
        thread.start()
        return [thread]
    return []


def _make_context(index: int) -> None:
    """Make the context that PyTorch then takes; CUDA keeps it until the process ends."""
    cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
    if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), index) == 0:
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _read_triton(cache_dir: Path) -> None:
    """Have Triton's digest of its files, remembered with the hashes of our functions or found anew."""
    try:
        from triton.runtime import cache

        from onewave.gpu.hashes import remember

        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            kept: dict[str, Any] = json.loads((cache_dir / _FILE).read_text())
            if kept["files"] == _stamp():
                remember(kept["hashes"])
                digest = kept["triton"] + ""
                cache.triton_key = functools.cache(lambda: digest)
                return
    finally:
        _looked_up.set()
    cache.triton_key()


def keep_first_launch(cache_dir: Path) -> None:
    """Write down what this process has found out since the beginning, for the next one.

    A cache that can't be written is as good as none, and so is a Triton without such a digest.
    """
    with suppress(OSError, ValueError, ImportError, AttributeError):
        from triton.runtime import cache

        from onewave.gpu.hashes import all_hashes

        text = json.dumps({"files": _stamp(), "triton": cache.triton_key(), "hashes": all_hashes()})
        file, work = cache_dir / _FILE, cache_dir / f".first-launch-{secrets.token_hex(8)}"
        if file.exists() and file.read_text() == text:
            return
        cache_dir.mkdir(parents=True, exist_ok=True)
        try:
            work.write_text(text)
            os.replace(work, file)
        finally:
            work.unlink(missing_ok=True)


@functools.cache
def _stamp() -> str:
    """A digest of the names, sizes and times of Triton's files and of ours, and of Python's version.

    Where a file has changed since it was imported, no other process finds the same: what runs here is not what it says.
    """
    import triton

    folders = os.path.dirname(triton.__file__), str(_PACKAGE)
    seen = sorted(each for folder in folders for each in _seen(folder))
    if max(changed for *_, changed in seen) > _IMPORTED_NS:
        return secrets.token_hex(32)
    return hashlib.sha256(repr((sys.version, seen)).encode()).hexdigest()


def _seen(folder: str) -> Iterator[tuple[str, int, int, int]]:
    """Path, size and times of each module below a folder: of its contents, which installers may set, and of its inode.
    By scandir: globbing takes a third of a second."""
    for entry in os.scandir(folder):
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield from _seen(entry.path)
        elif entry.name.endswith((".py", ".so")):
            about = entry.stat()
            yield entry.path, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def _make_launchers(launchers: Sequence[Sequence[Any]]) -> None:
    """Compile launchers, and what Triton has of the driver, into Triton's cache, as triton.runtime.build does."""
    from triton.backends.nvidia import driver

    sources = dict.fromkeys(driver.make_launcher({}, dict(enumerate(types)), None) for types in launchers)
    names = ["cuda_utils", *["__triton_launcher"] * len(sources)]
    with ThreadPoolExecutor(_COMPILERS, thread_name_prefix="first-launch") as pool:
        list(pool.map(_compile, names, [Path(driver.dirname, "driver.c").read_text(), *sources]))


def _compile(name: str, source: str) -> None:
    """Not loaded: a launcher looks for Triton's types when it is, and finds them only then."""
    from triton.backends.nvidia import driver
    from triton.runtime import build, cache

    kept = cache.get_cache_manager(hashlib.sha256((source + build.platform_key()).encode()).hexdigest())
    made = name + sysconfig.get_config_var("EXT_SUFFIX")
    if kept.get_file(made) is not None:
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{name}.c")
        file.write_text(source)
        libraries = driver.library_dirs(), driver.include_dirs, driver.libraries
        built = build._build(name, str(file), folder, *libraries, [])  # pyright: ignore[reportPrivateUsage]
        kept.put(Path(built).read_bytes(), made, binary=True)
