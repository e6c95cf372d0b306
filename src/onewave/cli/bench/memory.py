"""`onewave bench memory`: a serving run's allocations through several allocators."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from onewave.base.errors import InvalidArgumentError
from onewave.cli import options
from onewave.cli.bench.report import Reps, Results, Rows, make_current, open_llm, show_status


def memory(
    asked: options.ModelOptions,
    *,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests of the serving run.")] = 16,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Replay this trace; no model is loaded.")
    ] = None,
    record: Annotated[Path | None, typer.Option("--record", metavar="FILE", help="Write the run's trace.")] = None,
    reps: Reps = 5,
    max_model_len: options.MaxModelLen = 2048,
    out: Results,
) -> None:
    """Record what a serving run allocates, and replay it through the engine's pooled allocator, PyTorch's, and the
    device's own calls (cudaMalloc; malloc on a CPU).

    Beside them stands a static plan, with every lifetime known beforehand.
    """
    if trace is not None and record is not None:
        raise InvalidArgumentError("--record", got="with --trace", allowed="one of them")
    from onewave.bench.memory.replay import replay_all
    from onewave.engine.load.choices import choose_device
    from onewave.memory.trace import Trace

    where = choose_device(asked.device)
    make_current(where)
    if trace is not None:
        replayed = Trace.read(trace)
    else:
        from onewave.bench.memory.record import record_serving

        with open_llm(asked, max_model_len=max_model_len).llm as llm:
            show_status("serving")
            replayed = record_serving(llm, num_requests=requests)
        if record is not None:
            replayed.write(record)
    results = replay_all(replayed, where, reps=reps, show=show_status)
    count, peak = replayed.num_allocations, replayed.peak_bytes
    title = (
        f"{replayed.source or trace}: {count} blocks of {replayed.device}, {peak / 2**20:.1f} MiB at once, on {where}"
    )
    columns = ("allocator", "reserved MiB", "unused at peak", "calls", "again", "us a block", "again")
    rows = Rows(out, where, title, *columns)
    for result in results:
        first, again = result.us_first, result.us_again
        cells = (
            result.allocator,
            "-" if result.reserved_bytes is None else f"{result.reserved_bytes / 2**20:.1f}",
            "-" if result.fragmentation is None else f"{result.fragmentation:.1%}",
            *("-" if calls is None else str(calls) for calls in (result.calls_first, result.calls_again)),
            *("-" if us is None else f"{us.p50:.2f} ± {us.sd:.2f}" for us in (first, again)),
        )
        line = result.measurement(replayed)
        rows.add(cells, [] if line is None else [line])
    facts = {"trace": replayed.source, "device": str(where), "allocations": count, "peak_bytes": peak}
    facts |= {"results": [asdict(result) | {"fragmentation": result.fragmentation} for result in results]}
    rows.finish(facts)
