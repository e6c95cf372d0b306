"""Launches on a device that is not there, through Triton's own wrapper of a launcher: what would be passed is kept.

Kernels are bound as Triton binds them and not compiled. While `launches_kept` lasts, a launch adds the arguments that
the compiled launcher would get to a list: addresses as numbers, TMA's descriptors as what they are made from.
"""

import itertools
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from onewave.gpu import launch as launching
from onewave.gpu.prebuilt import Launch, compiled_from

TARGET = GPUTarget("cuda", 90, 32)
_numbers = itertools.count(1)


class _Compiled(CompiledKernel):
    """Triton's compiled kernel, stood in for. Its launcher keeps what it is given."""

    def __init__(self, source: Any, kept: list[tuple[Any, ...]]) -> None:
        signature = dict(source.signature)
        descriptors = [kind for kind in signature.values() if isinstance(kind, str) and kind.startswith("tensordesc")]
        about = {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [64, 64], "fp4_padded": False}
        run = CudaLauncher.__new__(CudaLauncher)
        run.__dict__.update(
            num_ctas=1, global_scratch_size=0, profile_scratch_size=0, global_scratch_align=1, profile_scratch_align=1,
            launch_cooperative_grid=0, launch_pdl=1,
            launch=wrap_handle_tensordesc(partial(_keep, kept), signature, [about] * len(descriptors)),
        )  # fmt: skip
        self.src, self.name, self.module, self.function, self._run = source, source.name, True, next(_numbers), run
        self.metadata: Any = SimpleNamespace(global_scratch_size=0, profile_scratch_size=0)
        self.packed_metadata = (4, 1, 0)

    def __del__(self) -> None:
        pass


def _keep(kept: list[tuple[Any, ...]], *args: Any) -> None:
    # Without metadata and hooks, of which a prepared call passes none.
    kept.append(tuple(each.data_ptr() if isinstance(each, Tensor) else each for each in (*args[:10], *args[13:])))


@contextmanager
def launches_kept() -> Generator[list[tuple[Any, ...]]]:
    """Keep what launchers are given, in order. Within `pretended_device`."""
    kept: list[tuple[Any, ...]] = []

    def run(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> _Compiled:
        source, _ = compiled_from(Launch(self, args, options, grid), TARGET)
        made = _Compiled(source, kept)
        made[(*grid, 1, 1)[:3]](*args)
        return made

    active = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 1,
        get_current_target=lambda: TARGET,
        utils=SimpleNamespace(fill_tma_descriptor=lambda *about: ("descriptor", *about)),
    )
    with (
        patch.object(JITFunction, "run", run),
        patch.object(launching, "take_prebuilt", lambda _: False),
        patch.object(launching, "hash_in_order", lambda _: None),
        patch.object(launching, "_kernels", {}),
        patch.object(driver, "_active", active),
    ):
        yield kept
