"""Record what a serving run asks PyTorch for, block by block."""

import random
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch._C._profiler import _EventType  # pyright: ignore[reportPrivateUsage]
from torch.profiler import ProfilerActivity, profile

from onewave.base.errors import InvalidArgumentError
from onewave.engine.llm import LLM
from onewave.engine.params import SamplingParams
from onewave.memory.trace import Event, Trace

_SEED = 20261129
# A sixteenth of the positions is the longest answer.
_LEAST_POSITIONS = 16
# Entries of a recorded history: later ones push the first out.
_MAX_ENTRIES = 1_000_000


def record_serving(llm: LLM, *, num_requests: int) -> Trace:
    """Serve requests of many lengths, more than run together, and return the trace of the device's memory.

    Prompts are random ids, half of them beginning alike; the same in every run. Requests run before it is recorded, all
    of them on a GPU, so that kernels are compiled, graphs captured, and what is kept is there. Sizes are PyTorch's: a
    GPU's are multiples of 512 bytes. Raises InvalidArgumentError for a model of too few positions.
    """
    if llm.max_model_len < _LEAST_POSITIONS:
        raise InvalidArgumentError("max_model_len", got=str(llm.max_model_len), allowed=f"{_LEAST_POSITIONS} or more")
    draw = random.Random(_SEED)
    longest = min(256, llm.max_model_len // 2)
    shared = [draw.randrange(llm.config.vocab_size) for _ in range(longest // 4)]
    prompts: list[Any] = []
    params: list[SamplingParams] = []
    for number in range(num_requests):
        ids = [draw.randrange(llm.config.vocab_size) for _ in range(draw.randint(1, longest - len(shared)))]
        prompts.append({"prompt_token_ids": (shared if number % 2 else []) + ids})
        length, warm = draw.randint(1, longest // 8), 0.8 if number % 3 else 0.0
        params.append(SamplingParams(max_tokens=length, temperature=warm, ignore_eos=True, detokenize=False))
    source = f"{llm.name}, {num_requests} requests, {llm.decode_path}"
    if llm.device.type == "cuda":
        llm.generate(prompts, params)
        return _history_of(lambda: llm.generate(prompts, params), llm.device, source)
    llm.generate(prompts[:1], params[:1])
    # Memory is reported to a profiler of the thread that asks for it.
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    _on_its_thread(llm, profiler.start)
    try:
        llm.generate(prompts, params)
    finally:
        _on_its_thread(llm, profiler.stop)
    return trace_of(profiler, llm.device, source)


def _history_of(work: Callable[[], object], device: torch.device, source: str) -> Trace:
    """Trace a GPU's allocator during `work`, in any thread: PyTorch's memory profilers see only their own thread."""
    memory: Any = torch.cuda.memory
    memory._record_memory_history("all", context=None, max_entries=_MAX_ENTRIES, device=device)
    try:
        work()
        torch.cuda.synchronize(device)
        entries: list[dict[str, Any]] = memory._snapshot(device)["device_traces"][device.index or 0]
    finally:
        memory._record_memory_history(None, device=device)
    signs = {"alloc": 1, "free_completed": -1}
    known = (entry for entry in entries if entry["action"] in signs)
    found = [(1000 * e["time_us"], e["addr"], signs[e["action"]] * e["size"]) for e in known]
    return trace_from(found, device, source)


def _on_its_thread(llm: LLM, work: Callable[[], object]) -> None:
    done: SimpleQueue[None] = SimpleQueue()

    def job(_: object) -> None:
        try:
            work()
        finally:
            done.put(None)

    llm.run_between_steps(job)
    done.get()


def trace_of(profiler: profile, device: torch.device, source: str) -> Trace:
    """Return the trace of a device's blocks that a memory profiler saw."""
    results: Any = profiler.profiler
    found = sorted(_allocations(results.kineto_results.experimental_event_tree(), device.type))
    return trace_from(found, device, source)


def trace_from(found: Sequence[tuple[int, int, int]], device: torch.device, source: str) -> Trace:
    """A trace of (nanoseconds, address, bytes) in order, bytes below zero where a block ends."""
    trace = Trace(str(device), source)
    live: dict[int, int] = {}
    count = 0
    for nanoseconds, address, num_bytes in found:
        us = (nanoseconds - found[0][0]) // 1000
        if num_bytes > 0:
            live[address] = count
            trace.events.append(Event(count, num_bytes, us))
            count += 1
        elif address in live:  # else it began before the run
            trace.events.append(Event(live.pop(address), None, us))
    return trace


def _allocations(events: list[Any], device_type: str) -> Iterator[tuple[int, int, int]]:
    """(time, address, bytes) of each allocation, and of each end with its bytes below zero."""
    left = list(events)
    while left:
        event = left.pop()
        left += event.children
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == device_type:
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
