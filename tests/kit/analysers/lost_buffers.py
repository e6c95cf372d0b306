"""Which shared memory a kernel fills for nobody.

A block may ask TMA for something before its partitions part. Triton's allocator knows of uses, not of
copies under way: a buffer that no partition takes is over when they part, and its place goes to others, first of all to
what the partitions are passed. The copy then lands on that.
"""

from __future__ import annotations

import re


def lost_buffers(ttgir: str) -> list[str]:
    """Shared memory of a kernel with partitions that none of them uses; of one without, none."""
    before, _, after = ttgir.partition("ttg.warp_specialize")
    if not after:
        return []
    names = re.findall(r"(%\w+) = ttg.local_alloc", before)
    return [name for name in names if not re.search(re.escape(name) + r"\b", after)]
