"""Marks copies of what a kernel reads once as the first that the second-level cache lets go (decision 0008).

The wave reads every weight once a step, and all of them are many times what that cache holds. Unmarked they push out
what is read again: hand-offs' words, before they are read or, dirty, to memory; activations; records; cached keys and
values. PTX's copies take such a mark, but Gluon, as of Triton 3.6, has no word for it. So the PTX is completed between
two stages of the compilation, through Triton's own hook for these. A mark changes no result, only what is cached.
"""
# pyright: reportMissingTypeStubs=false, reportAttributeAccessIssue=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (Triton ships no type information.)

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from triton import knobs

__all__ = ["completed", "mark_read_once", "marked"]

# Triton 3.6 keeps compiled kernels by their source alone: a change here compiles none anew by itself.
_COPY = re.compile(
    r"(@!?%p\d+ )?(cp\.async\.bulk\.tensor\.\dd\.shared::cluster\.global\.mbarrier::complete_tx::bytes)"
    r"( \[[^\]]+\], \[(%rd\d+), [^;]+);"
)

_descriptors: dict[str, int] = {}


def marked(ptx: str, descriptors: int) -> str:
    """A kernel's PTX with the mark on every copy by one of its first so many tensor descriptors."""
    parameters = re.findall(r"\.param \.align \d+ \.b8 (\w+)\[128\]", ptx)[:descriptors]
    addresses = re.findall(rf"mov\.b64\s+(%rd\d+), (?:{'|'.join(parameters)});", ptx)
    registers = set(re.findall(rf"cvta\.param\.u64\s+(%rd\d+), (?:{'|'.join(addresses)});", ptx))

    def mark(copy: re.Match[str]) -> str:
        predicate, instruction, operands, register = copy.groups(default="")
        if register not in registers:
            return copy[0]
        policy = ".reg .b64 once; createpolicy.fractional.L2::evict_first.b64 once, 1.0;"
        return f"{{ {policy} {predicate}{instruction}.L2::cache_hint{operands}, once; }}"

    return _COPY.sub(mark, ptx)


def mark_read_once(kernel: str, descriptors: int) -> None:
    """From now on have Gluon kernels of that name compiled with `marked`; all others stay as they are."""
    _descriptors[kernel] = descriptors


@lru_cache
def _own_digest() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def completed(before: Callable[..., Any] | None) -> Callable[..., Any]:
    """Triton's hook for a compilation's stages (knobs.runtime.add_stages_inspection_hook), behind the one before."""

    def hook(
        backend: Any = None, stages: dict[str, Callable[..., Any]] | None = None, options: Any = None,
        language: Any = None, capability: Any = None,
    ) -> tuple[str, str] | None:  # fmt: skip
        if stages is None:
            # Triton from 3.7 on asks before each launch what the hook does to a kernel, which is kept under that name.
            key, digest = ("", "") if before is None else before()
            return f"{key} onewave.wave.read_once", f"{digest}{_own_digest()}"
        if before is not None:
            before(backend, stages, options, language, capability)
        make = stages.get("ptx")
        if make is not None and getattr(language, "name", "") == "GLUON":

            def make_marked(source: Any, metadata: dict[str, Any]) -> str:
                ptx = make(source, metadata)
                name = metadata.get("name", "")
                return marked(ptx, _descriptors[name]) if name in _descriptors else ptx

            stages["ptx"] = make_marked
        return None

    return hook


# Once, when the first of these kernels' modules is imported.
knobs.runtime.add_stages_inspection_hook = completed(knobs.runtime.add_stages_inspection_hook)
