"""Marks TMA copies of data that a kernel reads once as L2 evict-first (decision 0008).

The wave reads every weight once a step, many times what L2 holds. Unmarked, weights evict hand-off words, activations,
task records and cached keys and values, which are read again. PTX copies take such a mark; Gluon, as of Triton 3.6, has
no word for it. A mark changes no result, only what is cached.
"""

from __future__ import annotations

import re
from functools import partial

from onewave.gpu.ptx.ptx_pass import PtxPass

_COPY = re.compile(
    r"(@!?%p\d+ )?(cp\.async\.bulk\.tensor\.\dd\.shared::cluster\.global\.mbarrier::complete_tx::bytes)"
    r"( \[[^\]]+\], \[(%rd\d+), [^;]+);"
)


def marked(ptx: str, descriptors: int) -> str:
    """Mark every copy of a kernel's PTX that uses one of its first `descriptors` tensor descriptors."""
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


def evict_first(descriptors: int) -> PtxPass:
    """Return the pass that marks copies by a kernel's first `descriptors` tensor descriptors."""
    return PtxPass(f"evict_first({descriptors})", "3.6", partial(marked, descriptors=descriptors))
