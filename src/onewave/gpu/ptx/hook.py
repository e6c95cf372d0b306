"""Completes kernels' PTX between two stages of their compilation, through Triton's own hook for these (decisions 0008
and 0009).

For what PTX has and Gluon, as of Triton 3.6, has no word for. Which kernels, by their names; all others stay as they
are.
"""
# pyright: reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (Triton ships no type information.)

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from triton import knobs

__all__ = ["change_of", "changes", "complete_ptx", "completed", "is_in_front"]

# Triton 3.6 keeps compiled kernels by their source alone: a change in one of these compiles none anew by itself.
_CHANGES = ("hook.py", "evict_first.py", "shared_warpgroups.py", "per_thread_arrival.py", "partition_ids.py")

_completions: dict[str, Callable[[str], str]] = {}


def complete_ptx(kernel: str, change: Callable[[str], str]) -> None:
    """From now on have Gluon kernels of that name compiled from `change` of their PTX."""
    _completions[kernel] = change


@lru_cache
def changes() -> str:
    """A digest of all that may become of a kernel's PTX."""
    return hashlib.sha256(b"".join(Path(__file__).with_name(name).read_bytes() for name in _CHANGES)).hexdigest()


def change_of(kernel: str) -> str:
    """What becomes of a kernel's PTX, as a name: the same one, the same change."""
    change: Any = _completions.get(kernel)
    if change is None:
        return "none"
    function, given = getattr(change, "func", change), getattr(change, "keywords", {})
    return f"{function.__module__}.{function.__qualname__} {sorted(given.items())} {changes()}"


def is_in_front() -> bool:
    """Whether nobody has set another hook for a compilation's stages since, who wants to see them."""
    return knobs.runtime.add_stages_inspection_hook is _ours


def completed(before: Callable[..., Any] | None) -> Callable[..., Any]:
    """Triton's hook for a compilation's stages (knobs.runtime.add_stages_inspection_hook), behind the one before."""

    def hook(
        backend: Any = None, stages: dict[str, Callable[..., Any]] | None = None, options: Any = None,
        language: Any = None, capability: Any = None,
    ) -> tuple[str, str] | None:  # fmt: skip
        if stages is None:
            # Triton from 3.7 on asks before each launch what the hook does to a kernel, which is kept under that name.
            key, digest = ("", "") if before is None else before()
            return f"{key} onewave.gpu.ptx.hook", f"{digest}{changes()}"
        if before is not None:
            before(backend, stages, options, language, capability)
        make = stages.get("ptx")
        if make is not None and getattr(language, "name", "") == "GLUON":

            def make_completed(source: Any, metadata: dict[str, Any]) -> str:
                ptx = make(source, metadata)
                change = _completions.get(metadata.get("name", ""))
                return ptx if change is None else change(ptx)

            stages["ptx"] = make_completed
        return None

    return hook


# Once, when the first of these kernels' modules is imported.
_ours = completed(knobs.runtime.add_stages_inspection_hook)
knobs.runtime.add_stages_inspection_hook = _ours
