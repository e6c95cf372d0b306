"""Compiling attention's kernels before their first call: side by side, into Triton's cache on disk."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import torch

from onewave.base.device import current_device
from onewave.base.errors import InvalidArgumentError, UnsupportedError, shown
from onewave.gpu.compile_pool import compile_in, processes
from onewave.ops import checks
from onewave.ops.attention.op import attention, attention_varlen

_HEADS = 16
# Sequences and their tokens: few enough for causal tiles to be dealt in turns, enough for a table or a sorted queue.
_SHORT, _LONG = (1, 512), (12, 1024)
# Up to this head_dim, full attention of few tiles and causal attention of long sequences have kernels of their own.
_TWO_HEIGHTS, _LONGEST = 64, (1, 4096)
_WINDOW = (255, 0)


@dataclass(frozen=True)
class Warmed:
    """One kind of call, and the seconds until its first one came back: compiling, mostly, beside the others."""

    name: str
    seconds: float


def warm(
    device: torch.device | str = "cuda",
    *,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    head_dims: Sequence[int] = (64, 128),
    threads: int | None = None,
    every: bool = False,
) -> tuple[Warmed, ...]:
    """Make the first call of each common kind of prefill attention: full, and causal in batches and packed.

    Triton compiles a kernel when it is first called, in several seconds; from then on it finds it in its cache
    directory (`TRITON_CACHE_DIR`), in any process. These calls run in `threads` threads, one a processor by default, on
    operands of their own, up to 50 MB each, and compile in as many processes, unless this one uses CUDA already or has
    other threads: then in the threads, which takes longer. dtypes: bfloat16, float16. head_dims: as `attention` takes
    them. every: also full packed calls and sliding windows, and all of these once more with the LSE; not softcaps,
    sinks or pages.

    Returns what was called, in order. Raises UnsupportedError without a CUDA GPU and for what attention refuses, and
    InvalidArgumentError.
    """
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError, OverflowError, ValueError) as error:
        raise InvalidArgumentError("warm: device", got=shown(device), allowed="cuda, cuda:N") from error
    if where.type != "cuda" or not torch.cuda.is_available():
        got = str(where) if where.type != "cuda" else "no CUDA GPU that PyTorch finds"
        raise UnsupportedError("warm", got=got, allowed="a CUDA GPU", next="A CPU's kernels need none.")
    if threads is not None and threads < 1:
        raise InvalidArgumentError("threads", got=str(threads), allowed="1 or more")
    for head_dim in head_dims:
        checks.head_dim("warm", head_dim, on_cpu=False)
    if ":" not in str(where):
        where = torch.device("cuda", current_device())
    calls = _calls(where, dtypes, head_dims, every)
    count = max(1, min(threads or os.cpu_count() or 1, len(calls)))
    import_module("onewave.ops.attention.hopper.launch")  # once, before the processes are forked
    with processes(count) as pool, compile_in(pool) as give_up:
        return side_by_side(calls, where, count, interrupted=give_up)


def _calls(
    device: torch.device, dtypes: Sequence[torch.dtype], head_dims: Sequence[int], every: bool
) -> dict[str, Callable[[], object]]:
    calls: dict[str, Callable[[], object]] = {}
    for dtype, head_dim, lse in product(dtypes, head_dims, (False, True) if every else (False,)):
        kind = f"{str(dtype).removeprefix('torch.')}, head_dim {head_dim}"
        make = partial(_call, head_dim=head_dim, dtype=dtype, device=device, return_lse=lse)
        end = ", LSE" * lse
        calls[f"attention, {kind}, full{end}"] = partial(make, _LONG)
        if head_dim <= _TWO_HEIGHTS:
            calls[f"attention, {kind}, full, few tiles{end}"] = partial(make, _SHORT)
            calls[f"attention, {kind}, causal, long sequences{end}"] = partial(make, _LONGEST, causal=True)
        for tiles, some in (("few tiles", _SHORT), ("many tiles", _LONG)):
            causal = partial(make, some, causal=True)
            calls[f"attention, {kind}, causal, {tiles}{end}"] = causal
            calls[f"attention_varlen, {kind}, causal, {tiles}{end}"] = partial(causal, packed=True)
            if every:
                calls[f"attention, {kind}, window, {tiles}{end}"] = partial(causal, window=_WINDOW)
                calls[f"attention_varlen, {kind}, window, {tiles}{end}"] = partial(causal, window=_WINDOW, packed=True)
                calls[f"attention_varlen, {kind}, full, {tiles}{end}"] = partial(make, some, packed=True)
    return calls


def side_by_side(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    threads: int,
    *,
    interrupted: Callable[[], None] = lambda: None,
) -> tuple[Warmed, ...]:
    """Make each call once, in threads that all work on the device. The first error of any is raised when all are
    done. interrupted: called on Ctrl-C, before what is under way is waited for."""

    def timed(name: str) -> Warmed:
        start = time.perf_counter()
        # A stream each: operators that hand scratch from one launch to the next wait for others on theirs.
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with torch.inference_mode(), torch.cuda.stream(stream):
            calls[name]()
        return Warmed(name, time.perf_counter() - start)

    with ThreadPoolExecutor(min(threads, max(1, len(calls)))) as pool:
        waiting = [pool.submit(timed, name) for name in calls]
        try:
            wait(waiting)
        except KeyboardInterrupt:
            interrupted()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    done = tuple(each.result() for each in waiting)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return done


def _call(
    some: tuple[int, int], *, head_dim: int, dtype: torch.dtype, device: torch.device, packed: bool = False,
    **options: Any,
) -> None:  # fmt: skip
    sequences, tokens = some
    if packed:
        q = torch.zeros(sequences * tokens, _HEADS, head_dim, dtype=dtype, device=device)
        starts = torch.arange(sequences + 1, dtype=torch.int32, device=device) * tokens
        attention_varlen(q, q, q, starts, starts, tokens, tokens, **options)
    else:
        q = torch.zeros(sequences, _HEADS, tokens, head_dim, dtype=dtype, device=device)
        attention(q, q, q, **options)
