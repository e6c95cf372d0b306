"""Scratch memory for partial results that kernels of one operator hand off, and arrival counters.

Taken from the device's pool and kept from call to call, one block for each use and stream, so that a steady state
allocates nothing. Calls recorded into CUDA graphs share one block a use and device, which eager calls before the
recording have made: graphs of one device must not run side by side on two streams. Blocks only grow; what a recorded
graph may point at is never freed.

Launches on one stream run one after another, so one that takes and leaves its scratch as it likes needs no more. What
one launch leaves there for the next is safe from other threads' launches between the two while `held`.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from onewave.gpu.tape import taken
from onewave.memory.tensors import pool_of

# By device, stream (or _GRAPHS) and use; the last of a list is the largest.
_blocks: dict[tuple[torch.device, int, str], list[Tensor]] = {}
_locks: dict[tuple[torch.device, int], threading.RLock] = {}
_growing = threading.Lock()
_recording: dict[tuple[int, int], torch.cuda.Stream] = {}
_GRAPHS = -1
_LEAST_FLOATS = 1 << 20
_LEAST_COUNTERS = 1 << 12


def scratch(device: torch.device, num_floats: int, use: str = "partials") -> Tensor:
    """At least num_floats of float32, any contents, for the current stream or for the graph that is being recorded.

    use: whose; another use has other memory."""
    return taken(partial(_kept, use, device, num_floats, _LEAST_FLOATS, torch.float32))


def counters(device: torch.device, number: int) -> Tensor:
    """At least `number` zeros, int32, for the current stream or graph; a kernel leaves them as zeros."""
    return taken(partial(_kept, "counters", device, number, _LEAST_COUNTERS, torch.int32))


def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a GPU and a thread for what is to be recorded into a CUDA graph and for the eager calls before it.

    Without one, torch.cuda.graph records on the one stream that it made on whichever GPU came first. One for several
    threads would have the eager calls of one in the graph of another.
    """
    index = torch.empty(0, device=device).get_device()  # "cuda" is the current one
    with _growing:
        key = index, threading.get_ident()
        if key not in _recording:
            _recording[key] = torch.cuda.Stream(index)
        return _recording[key]


def held(device: torch.device) -> AbstractContextManager[object]:
    """While this lasts no other thread launches between ours what holds the same stream's scratch, too: for what one
    launch leaves there for the next."""
    if device.type != "cuda":
        return nullcontext()
    return _locks.setdefault((device, _owner(device)), threading.RLock())


def _owner(device: torch.device) -> int:
    """The current stream, or whatever is being recorded."""
    if torch.cuda.is_current_stream_capturing():
        return _GRAPHS
    return torch.cuda.current_stream(device).cuda_stream


def _kept(use: str, device: torch.device, size: int, least: int, dtype: torch.dtype) -> Tensor:
    if device.type != "cuda":
        return _new(device, size, dtype, pooled=False)
    owner = _owner(device)
    with _growing:
        if owner == _GRAPHS:
            kept = _blocks.get((device, _GRAPHS, use))
            if kept and kept[-1].numel() >= size:
                return kept[-1]
            # No eager call of this size came first: the graph owns its own, and makes it anew at every replay.
            return _new(device, size, dtype, pooled=False)
        return [_grown(device, each, use, max(size, least), dtype) for each in (_GRAPHS, owner)][1]


def _grown(device: torch.device, owner: int, use: str, size: int, dtype: torch.dtype) -> Tensor:
    kept = _blocks.setdefault((device, owner, use), [])
    if not kept or kept[-1].numel() < size:
        kept.append(_new(device, max(size, 2 * kept[-1].numel() if kept else 0), dtype, pooled=True))
    return kept[-1]


def _new(device: torch.device, size: int, dtype: torch.dtype, *, pooled: bool) -> Tensor:
    """Floats of any value, or zeros as whole numbers."""
    made = pool_of(device).take((size,), dtype) if pooled else torch.empty(size, dtype=dtype, device=device)
    return made if dtype.is_floating_point else made.zero_()
