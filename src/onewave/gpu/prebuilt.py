"""Prebuilt kernels: compiled kernels that ship with the package (decision 0011).

Before Triton would compile one of these, its binary is put into Triton's cache on disk, under the name that Triton
itself gives it. Which binary belongs to which launch is told by a digest of all that it is compiled from: source,
arguments' types, constants, options, what is changed in the PTX, Triton's version and its assembler's. What differs in
any of them compiles as ever, and so does everything once Triton is asked for more than its usual compilation.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import driver

from onewave.base.settings import takes_prebuilt
from onewave.gpu.ptx.hook import install, is_in_front
from onewave.gpu.ptx.passes import describe_passes

FOLDER, INDEX = "prebuilt", "index.json"
"""In an operator's folder: {"triton": version, "kernels": {name: {"key", "sha256", "at", "bytes", "metadata"}}}.

The binary of that digest lies at `at`, so many bytes long, in archive_of(name), where binaries lie one after another,
compressed together, as they are much alike. metadata is what Triton keeps beside it, but for the launch's options.
"""


@dataclass(frozen=True)
class Launch:
    """A launch of a Triton or Gluon kernel: arguments in order and by name, the launch's options with them, and blocks
    along each axis."""

    function: Any
    args: Sequence[Any]
    named: Mapping[str, Any]
    grid: tuple[int, ...]


@dataclass(frozen=True)
class _Entry:
    """A kernel's entry in the index, without its key."""

    name: str
    sha256: str
    at: int
    bytes: int
    metadata: dict[str, Any]


def archive_of(name: str) -> str:
    """The file that holds a kernel of that name in the index."""
    return f"{name.partition('/')[0]}.xz"


def folder_of(function: Any) -> Path:
    """The folder of a kernel's binaries, if it has any: in that above its file's own."""
    return Path(function.fn.__code__.co_filename).parents[1] / FOLDER


def has_prebuilt(room: str) -> bool:
    """Return whether a folder of the package has binaries that this Triton is given."""
    return bool(_compiled(Path(__file__).parents[1] / room / FOLDER)) and _wanted()


def take_prebuilt(launch: Launch) -> bool:
    """Put what a launch needs into Triton's cache, if it is there compiled. Returns whether Triton will find it."""
    folder = folder_of(launch.function)
    kernels = _compiled(folder)
    if not kernels or not _wanted():
        return False
    target: Any = driver.active.get_current_target()
    source, options = compiled_from(launch, target)
    found = kernels.get(key_of(source, options, target))
    if found is None:
        return False
    kept = _Kept(source, options, target)
    if kept.is_there():
        return True
    file = folder / archive_of(found.name)
    binary = _unpacked(file)[found.at : found.at + found.bytes]
    if hashlib.sha256(binary).hexdigest() != found.sha256:
        what = f"{file} is missing or damaged: its kernel is compiled here instead, in seconds. Install onewave again."
        warnings.warn(what, stacklevel=2)
        return False
    kept.put(binary, found.metadata)
    return True


def _wanted() -> bool:
    """Return whether only the usual binary is asked for: no dump, override, forced compilation or other hook."""
    # Not every Triton has this.
    from triton._C.libtriton import get_cache_invalidating_env_vars

    install()  # or a question before a kernel's module is imported finds no hook in front
    asked = knobs.compilation.always_compile or knobs.compilation.override or knobs.compilation.dump_ir
    return takes_prebuilt() and is_in_front() and not asked and not get_cache_invalidating_env_vars()


@lru_cache
def _compiled(folder: Path) -> dict[str, _Entry]:
    """By key the entry of each kernel in a folder, of which there need be none."""
    index = folder / INDEX
    if not index.exists():
        return {}
    try:
        kept: dict[str, Any] = json.loads(index.read_text())
        if kept["triton"] != triton.__version__:
            return {}
        return {
            each["key"]: _Entry(name, each["sha256"], int(each["at"]), int(each["bytes"]), dict(each["metadata"]))
            for name, each in kept["kernels"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        what = f"{index} is damaged: kernels are compiled here instead, in seconds each. Install onewave again."
        warnings.warn(what, stacklevel=3)
        return {}


@lru_cache(maxsize=4)
def _unpacked(archive: Path) -> bytes:
    """An archive's binaries; nothing where it can't be read. The last ones are kept: a load takes kernels in turn from
    those of a few rooms."""
    try:
        return lzma.decompress(archive.read_bytes())
    except (OSError, lzma.LZMAError):
        return b""


def compiled_from(launch: Launch, target: GPUTarget) -> tuple[ASTSource, Any]:
    """Return the source that Triton compiles for a launch on such a GPU, and its options."""
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import create_function_from_signature

    function, backend = launch.function, make_backend(target)
    asked = {
        **launch.named,
        "debug": function.debug or knobs.runtime.debug,
        "instrumentation_mode": knobs.compilation.instrumentation_mode,
    }
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound, properties, others = bind(*launch.args, **asked)
    options, signature, constants, attributes = function._pack_args(backend, asked, bound, properties, others)
    kind = GluonASTSource if function.is_gluon() else ASTSource
    return kind(function, signature, constants, attributes), backend.parse_options(dict(options.__dict__))


def key_of(source: ASTSource, options: Any, target: GPUTarget) -> str:
    """A digest of all that a binary is compiled from. Functions are hashed in order by then (hash_in_order)."""
    passes = describe_passes(source.fn.__module__, source.name)
    words = (triton.__version__, make_backend(target).hash(), passes, source.hash(), options.hash())
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


class _Kept:
    """A kernel's place in Triton's cache, in Triton's own form."""

    def __init__(self, source: ASTSource, options: Any, target: GPUTarget):
        from triton.runtime.cache import get_cache_key, get_cache_manager

        self._source, self._options, self._target = source, options, target
        words = get_cache_key(source, make_backend(target), options, env_vars={})
        self._digest = hashlib.sha256(words.encode()).hexdigest()
        self._cache = get_cache_manager(self._digest)
        self._about = f"{source.name}.json"

    def is_there(self) -> bool:
        """Whether Triton finds it."""
        return self._about in (self._cache.get_group(self._about) or {})

    def put(self, binary: bytes, metadata: dict[str, Any]) -> None:
        """Leave a binary there."""
        name, cache = f"{self._source.name}.cubin", self._cache
        known = {"hash": self._digest, "target": self._target, "triton_version": triton.__version__}
        whole = {**known, **self._options.__dict__, **metadata}
        about = json.dumps(whole, default=vars)
        group = {name: cache.put(binary, name), self._about: cache.put(about, self._about, binary=False)}
        cache.put_group(self._about, group)
