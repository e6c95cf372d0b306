"""A pass over PTX, and a digest of all passes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import triton


@dataclass(frozen=True)
class PtxPass:
    """One change of a kernel's PTX between two stages of its compilation.

    name: the same name, the same change (with `sources_digest`). triton: the version whose PTX it reads, such as "3.6";
    with any other the kernel compiles without the pass.
    """

    name: str
    triton: str
    change: Callable[[str], str]

    def applies(self) -> bool:
        """Whether this pass knows the installed Triton."""
        return triton.__version__.startswith(f"{self.triton}.")


@lru_cache
def sources_digest() -> str:
    """Return the SHA-256 of every source file in this folder. Triton 3.6 keys compiled kernels by their own source, so
    a store of binaries needs this digest as well."""
    folder = Path(__file__).parent
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))).hexdigest()
