"""Compiles recorded launches ahead of time, for devices that are not there."""

from __future__ import annotations

import hashlib
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory

import triton
from triton import knobs

from kit.recorder import Recorded
from onewave.gpu.hashes import hash_in_order
from onewave.gpu.launch import without_collection

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Built:
    """A compiled kernel. registers: of a thread at the launch; stack, shared: bytes; threads: of a block.

    sass: instructions as nvdisasm prints them; ttgir, ptx: the compiler's text.
    """

    registers: int
    stack: int
    shared: int
    threads: int
    sass: str
    ttgir: str
    ptx: str

    @property
    def ptx_digest(self) -> str:
        """A digest of the PTX, whatever the source's lines and files are called."""
        code = self.ptx.partition("\t.section\t.debug")[0]
        lines = [line.partition("//")[0].rstrip() for line in code.splitlines()]
        kept = [line for line in lines if line and not re.match(r"\s*\.(loc|file)\b|\$L__tmp\d+:", line)]
        return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]

    def count(self, word: str) -> int:
        """How many instructions begin with a word."""
        return len(re.findall(rf"\b{re.escape(word)}", self.sass))


def build(recorded: Recorded) -> Built:
    """Compile what a launch was recorded for. Triton's cache is not asked."""
    hash_in_order(recorded.asked.function)
    with knobs.compilation.scope(), knobs.cache.scope(), TemporaryDirectory() as cache, without_collection():
        knobs.compilation.always_compile = True
        knobs.cache.dir = cache  # what a call patches is nobody else's
        made = triton.compile(recorded.source, target=recorded.target, options=recorded.options.__dict__)
    registers, stack, sass = disassembled(made.asm["cubin"])
    threads = recorded.target.warp_size * int(made.metadata.num_warps)
    ttgir, ptx = str(made.asm["ttgir"]), str(made.asm["ptx"])
    return Built(registers, stack, int(made.metadata.shared), threads, sass, ttgir, ptx)


def disassembled(cubin: bytes) -> tuple[int, int, str]:
    """Return registers of a thread at the launch, bytes of its stack, and the instructions as nvdisasm prints them."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([_TOOLS / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found[1]), int(found[2]), code
