"""Marks copies of what a kernel reads once as the first that the second-level cache lets go (decision 0008).

The wave reads every weight once a step, and all of them are many times what that cache holds. Unmarked they push out
what is read again: hand-offs' words, before they are read or, dirty, to memory; activations; records; cached keys and
values. PTX's copies take such a mark, but Gluon, as of Triton 3.6, has no word for it, so ptx_hook puts it there. A
mark changes no result, only what is cached.
"""

from __future__ import annotations

import re
from functools import partial

from onewave.gpu.ptx.hook import complete_ptx

__all__ = ["mark_read_once", "marked"]

_COPY = re.compile(
    r"(@!?%p\d+ )?(cp\.async\.bulk\.tensor\.\dd\.shared::cluster\.global\.mbarrier::complete_tx::bytes)"
    r"( \[[^\]]+\], \[(%rd\d+), [^;]+);"
)


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
    """From now on have Gluon kernels of that name compiled with `marked`."""
    complete_ptx(kernel, partial(marked, descriptors=descriptors))
