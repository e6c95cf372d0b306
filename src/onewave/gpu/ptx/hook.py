"""Runs the passes over PTX (`passes.PASSES`) through Triton's hook for a compilation's stages (decisions 0008 to 0012).

A kernel is known by its module and name. The hook sees neither, so it reads the file and the name of the entry function
from the locations in the kernel's MLIR. A kernel of the same name from another module passes untouched.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache, reduce
from typing import Any

from triton import knobs

from onewave.gpu.ptx.passes import PASSES, passes_of
from onewave.gpu.ptx.ptx_pass import PtxPass, sources_digest

_ENTRY = re.compile(r"^  tt\.func public @(\w+)\(.*?^  \} loc\((#\w+)\)$", re.MULTILINE | re.DOTALL)


def is_in_front() -> bool:
    """Return whether no other hook was set after ours: one that was would want to see the stages."""
    return knobs.runtime.add_stages_inspection_hook is install()


def passes_for(mlir: str) -> tuple[PtxPass, ...]:
    """Return the passes of the kernel that this MLIR, with locations, describes."""
    entry = _ENTRY.search(mlir)
    place = entry and re.search(rf'^{entry[2]} = loc\("(.*)":\d+:\d+\)$', mlir, re.MULTILINE)
    if not entry or not place:
        return ()
    modules = (module for module, kernel in PASSES if kernel == entry[1])
    module = next((each for each in modules if getattr(sys.modules.get(each), "__file__", None) == place[1]), None)
    return passes_of(module, entry[1]) if module else ()


def run_passes_after(before: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a hook for a compilation's stages that calls the hook `before`, then adds the passes to the PTX stage.

    Triton takes it as knobs.runtime.add_stages_inspection_hook.
    """

    def hook(
        backend: Any = None, stages: dict[str, Callable[..., Any]] | None = None, options: Any = None,
        language: Any = None, capability: Any = None,
    ) -> tuple[str, str] | None:  # fmt: skip
        if stages is None:
            # Triton from 3.7 on asks before each launch what the hook does, and keys binaries by the answer.
            key, digest = ("", "") if before is None else before()
            return f"{key} {__name__}", f"{digest}{sources_digest()}"
        if before is not None:
            before(backend, stages, options, language, capability)
        lower, make_ptx = stages.get("ttgir"), stages.get("ptx")
        if lower is None or make_ptx is None or getattr(language, "name", "") != "GLUON":
            return None
        passes: list[PtxPass] = []

        def lower_and_look(source: Any, metadata: dict[str, Any]) -> Any:
            passes.extend(passes_for(str(source)))
            return lower(source, metadata)

        def make_and_change(source: Any, metadata: dict[str, Any]) -> str:
            return reduce(lambda ptx, each: each.change(ptx), passes, make_ptx(source, metadata))

        stages["ttgir"], stages["ptx"] = lower_and_look, make_and_change
        return None

    return hook


@cache
def install() -> Callable[..., Any]:
    """Set the hook, once a process, and return it. The module of each kernel in `PASSES` calls this."""
    hook = knobs.runtime.add_stages_inspection_hook = run_passes_after(knobs.runtime.add_stages_inspection_hook)
    return hook
