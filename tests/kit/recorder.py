"""Records what our host code launches for a call, on a device that is not there."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

from kit.no_device import pretended_device
from kit.source_digest import digest_of_files, digest_of_function
from onewave.gpu.launch import launches_nowhere
from onewave.gpu.prebuilt import Launch, compiled_from
from onewave.gpu.ptx.passes import passes_of


@dataclass(frozen=True)
class Recorded:
    """A launch, and what Triton compiles for it: the kernel with its types, constants and options.

    asked: the launch's arguments as the host code gave them. grid: its blocks. result: what the whole call returned.
    """

    asked: Launch
    grid: tuple[int, ...]
    result: Any
    source: Any
    options: Any
    target: GPUTarget

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return self.asked.function.__name__

    @property
    def given(self) -> dict[str, Any]:
        """All arguments by name, constants included."""
        return dict(zip(self.asked.function.arg_names, self.asked.args, strict=False)) | dict(self.asked.named)

    def words(self) -> str:
        """All that the binary is compiled from, as text: neither lines nor paths."""
        source, options = self.source, self.options
        constants = sorted((str(path), repr(value)) for path, value in source.constants.items())
        attributes = sorted((str(path), str(value)) for path, value in source.attrs.items())
        parts = (
            digest_of_function(self.asked.function), list(source.signature.items()), constants, attributes,
            options.hash(), make_backend(self.target).hash(), _passes(self.asked.function), triton.__version__,
        )  # fmt: skip
        return "\n".join(map(str, parts))


def _passes(function: Any) -> str:
    """The passes of a kernel's PTX, and a digest of all passes."""
    passes = passes_of(function.__module__, function.__name__)
    return f"{[each.name for each in passes]} {_code_of_passes()}" if passes else "none"


@cache
def _code_of_passes() -> str:
    return digest_of_files(Path(inspect.getfile(passes_of)).parent.glob("*.py"))


def record(call: Callable[[], object], capability: tuple[int, int] = (9, 0), **device: int) -> list[Recorded]:
    """Make a call on a device of that capability that is not there; return its launches in order, each kind once.

    device: see pretended_device.
    """
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    with launches_nowhere() as made:
        with pretended_device(capability, **device):
            result = call()
        found = [Recorded(launch, launch.grid, result, *compiled_from(launch, target), target) for launch in made]
    kinds: dict[tuple[Any, ...], Recorded] = {}
    for each in found:
        kinds.setdefault((each.kernel, str(each.source.signature), str(each.source.constants), str(each.options)), each)
    return list(kinds.values())
