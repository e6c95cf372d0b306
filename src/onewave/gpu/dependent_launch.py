"""Kernels that begin while the one before them on the stream ends: programmatic dependent launch, sm_90 and newer.

A kernel launched so gets its places as soon as every program of the one before has let it, or has ended. `after_last`
comes before all that touches memory: nothing that an earlier kernel wrote may be read before it, nothing that one reads
be written; an L2 prefetch may come before it, a copy by TMA not even of nothing, as the wait does not hold behind one
(docs/log/correctness.md). What to request may be read before it as well, past L1, if it is read again behind it
(decode_attention/stream_parts_impl.py). Every program waits, so a kernel ends after the one before
it, and waiting for it is waiting for all. `after_last` lets the next one in after that wait and not before, as
kernels two or more ahead would take places and gain nothing. (A wave, which has a place on every SM, lets it in before
it waits itself.)
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from onewave.base.device import capability


@triton.jit
def after_last(PDL: tl.constexpr):
    """Wait for the last kernel's end, then let the next one begin as places get free. Nothing without PDL."""
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


def has_dependent_launch(tensor: Tensor) -> bool:
    """Whether kernels on this tensor's device can be launched before their predecessor has ended."""
    return tensor.is_cuda and capability(tensor.device) >= (9, 0)


def overlapping(overlaps: bool) -> dict[str, bool]:
    """Arguments of a launch: the kernel's constant PDL and, where it is True, the option."""
    return {"PDL": True, "launch_pdl": True} if overlaps else {"PDL": False}


def dependent_launch(tensor: Tensor) -> dict[str, bool]:
    """Such arguments on this tensor's device."""
    return overlapping(has_dependent_launch(tensor))
