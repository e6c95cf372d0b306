"""The one timing protocol.

Warm up; then time many repetitions one by one and report their median, 20th and 80th percentile, mean and standard
deviation. On CUDA a repetition is one replay of a graph that holds every call given, between two events; the calls
should work on different buffers whose sum exceeds the L2 cache, so that it does not serve them. On a CPU a repetition
is every call in turn, by the performance counter.

A GPU slows down as it warms up and draws power: what is timed one after another is timed on different GPUs. What is
to be compared therefore takes turns, in an order drawn anew for each round (`time_in_rounds`).
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from onewave.gpu.scratch import recording_stream

# Long enough for a GPU's clocks to settle where its power lets them.
_SECONDS_A_TURN = {"cuda": 0.05, "cpu": 0.0}
_FEWEST_TURNS = 3


@dataclass(frozen=True)
class Summary:
    """Statistics of n samples, all in the samples' unit. sd is the sample standard deviation, 0 for one sample."""

    n: int
    p20: float
    p50: float
    p80: float
    mean: float
    sd: float

    def scaled(self, factor: float) -> "Summary":
        """The same in another unit; factor > 0."""
        return Summary(self.n, *(value * factor for value in (self.p20, self.p50, self.p80, self.mean, self.sd)))


def summarize(samples: Sequence[float]) -> Summary:
    """Statistics of at least one sample; percentiles are interpolated linearly."""
    assert samples, "nothing was measured"
    values = np.array(samples, dtype=np.float64)
    p20, p50, p80 = np.percentile(values, (20, 50, 80)).tolist()
    deviation = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return Summary(len(values), p20, p50, p80, float(values.mean()), deviation)


def time_calls(
    calls: Sequence[Callable[[], object]],
    device: torch.device,
    *,
    reps: int = 20,
    warmup: int = 3,
    graph: bool = True,
) -> Summary:
    """Seconds one call takes, averaged over `calls` within a repetition.

    calls: the same work on different buffers. graph: on CUDA, replay a captured graph; otherwise launch each call.
    """
    if device.type != "cuda":
        return summarize([_host_seconds(calls) for _ in range(warmup + reps)][warmup:])
    run = recorded(calls, device, graph=graph)
    for _ in range(warmup):
        run()
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(reps):
        pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        pair[0].record(torch.cuda.current_stream(device))
        run()
        pair[1].record(torch.cuda.current_stream(device))
        pairs.append(pair)
    torch.cuda.synchronize(device)
    return summarize([first.elapsed_time(last) * 1e-3 / len(calls) for first, last in pairs])


def recorded(
    calls: Sequence[Callable[[], object]], device: torch.device, *, graph: bool = True
) -> Callable[[], object]:
    """One function that makes every call: a CUDA graph's replay where that is wanted and possible."""
    if device.type != "cuda" or not graph:
        return lambda: _run(calls)
    stream = recording_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        # Compiles kernels and fills library workspaces, neither of which may happen while capturing.
        _run(calls)
    torch.cuda.current_stream(device).wait_stream(stream)
    recording = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recording, stream=stream):
        _run(calls)

    def replay() -> None:
        assert calls  # The recording reads their tensors, which have to live as long as it does.
        recording.replay()

    return replay


def time_in_rounds(
    runs: Mapping[str, tuple[Callable[[], object], int]], device: torch.device, *, rounds: int
) -> dict[str, Summary]:
    """Seconds a call of each of several things that are to be compared, over the medians of its turns.

    runs: by name, what makes the calls and how many it makes (see `recorded`). rounds: how often each has its turn, a
    20th of a second on a GPU; what is far too slow for that gets fewer, so as not to keep the others waiting.
    """
    turn = _SECONDS_A_TURN[device.type]
    reps: dict[str, int] = {}
    turns: dict[str, int] = {}
    for name, (run, _) in runs.items():
        estimate = time_calls([run], device, reps=1, warmup=1, graph=False).p50
        reps[name] = max(1, min(1000, round(turn / estimate)))
        turns[name] = min(rounds, _FEWEST_TURNS) if 0 < 2 * turn < estimate else rounds
    medians: dict[str, list[float]] = {name: [] for name in runs}
    order, draw = list(runs), random.Random(0)
    for number in range(rounds):
        draw.shuffle(order)
        for name in order:
            if number >= turns[name]:
                continue
            run, num_calls = runs[name]
            # Half a turn untimed: the clock at which a turn begins is the one that its predecessor's power left.
            warmup = max(1, reps[name] // 2)
            medians[name].append(time_calls([run], device, reps=reps[name], warmup=warmup, graph=False).p50 / num_calls)
    return {name: summarize(values) for name, values in medians.items()}


def _run(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _host_seconds(calls: Sequence[Callable[[], object]]) -> float:
    start = time.perf_counter()
    _run(calls)
    return (time.perf_counter() - start) / len(calls)
