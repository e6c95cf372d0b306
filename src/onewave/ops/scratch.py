"""Scratch memory that kernels of one operator hand partial results through.

Kept from call to call, one block a stream, so that a steady state allocates nothing. Calls recorded into CUDA graphs
share one block a device, which eager calls before the recording have made: graphs of one device must not run side by
side on two streams. Blocks only grow; what a recorded graph may point at is never freed.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["scratch"]

_blocks: dict[tuple[torch.device, int], list[Tensor]] = {}
_GRAPHS = -1
_LEAST_FLOATS = 1 << 20


def scratch(device: torch.device, num_floats: int) -> Tensor:
    """At least num_floats of float32, any contents, for the current stream or for the graph that is being recorded."""
    if device.type != "cuda":
        return torch.empty(num_floats, dtype=torch.float32, device=device)
    if torch.cuda.is_current_stream_capturing():
        kept = _blocks.get((device, _GRAPHS))
        if kept and kept[-1].numel() >= num_floats:
            return kept[-1]
        # No eager call of this size came first: the graph owns its own.
        return torch.empty(num_floats, dtype=torch.float32, device=device)
    _grown((device, _GRAPHS), num_floats)
    return _grown((device, torch.cuda.current_stream(device).cuda_stream), num_floats)


def _grown(key: tuple[torch.device, int], num_floats: int) -> Tensor:
    kept = _blocks.setdefault(key, [])
    if not kept or kept[-1].numel() < num_floats:
        size = max(num_floats, _LEAST_FLOATS, 2 * kept[-1].numel() if kept else 0)
        kept.append(torch.empty(size, dtype=torch.float32, device=key[0]))
    return kept[-1]
