"""`onewave bench startup` and `onewave bench warm`: how long the first answer, and a kernel's first call, take."""

import os
from dataclasses import asdict
from typing import Annotated

import typer

from onewave.base.settings import Settings
from onewave.cli import options
from onewave.cli.bench.report import Reps, Results, gpu_for, name_of, show_status
from onewave.cli.output import table
from onewave.engine.arguments import EngineOptions, check_device
from onewave.weights.fetch import sources


def startup(
    asked: options.ModelOptions,
    *,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", "--batch-size", help="Sequences that run together.")
    ] = 1,
    reps: Reps = 3,
    max_model_len: options.MaxModelLen = None,
    graphs: Annotated[
        bool, typer.Option("--graphs/--no-graphs", help="Beside the wave, loading for CUDA graphs of plain operators.")
    ] = True,
    out: Results,
) -> None:
    """Time a model's loading and first answer in new processes, with empty and with filled caches.

    Caches are those of compiled kernels and of the wave's programs. Where the model decodes with the wave, loading for
    CUDA graphs of plain operators is timed beside it.
    """
    chosen = "dummy" if asked.model in sources.builtin_names() else asked.load_format
    told = {name: value for name, value in vars(asked).items() if name not in ("model", "revision")}
    told |= {"load_format": chosen, "max_model_len": max_model_len, "max_num_seqs": max_num_seqs}
    EngineOptions(**told)
    from onewave.bench.engine.startup import Job, measure_startup
    from onewave.engine.load import choices
    from onewave.models.config.read import load_config

    where = choices.choose_device(asked.device)
    choices.check_dtype_on(asked.dtype, where)
    choices.choose_decode(asked.decode, enforce_eager=False, device=where)
    location = sources.resolve(asked.model, Settings.from_env(), revision=asked.revision, load_format=chosen)
    config = load_config(location)
    length = choices.choose_max_model_len(max_model_len, config)
    # For a process whose cache of models is empty. A link says more than what it leads to.
    named = location.kind == "builtin" or location.path is None
    told["model"] = location.name if named else os.path.abspath(str(location.path))
    job = Job.of(told, vocab_size=config.vocab_size, max_model_len=length)
    results = measure_startup(job, reps=reps, graphs=graphs and where.type != "cpu", show=show_status)
    extra = {
        "dtype": name_of(choices.choose_dtype(asked.dtype, config, where)),
        "batch_size": max_num_seqs,
        "max_model_len": length,
        "quantization": asked.quantization,
        "load_format": chosen,
        "prompt_tokens": len(job.prompt),
    }
    title = f"{location.name} on {where}, starts of each kind: {reps}"
    columns = ("import s", "load s", "first answer s", "GPU memory, most", "kept", "KV cache", "load, by phase")
    rows = table(title, "caches", "decoding", *columns, left=2)
    for result in results:
        rows.add_row(
            result.caches,
            result.decode_path + (", compact" if result.compact else ""),
            *(f"{each.p50:.2f} ± {each.sd:.2f}" for each in (result.import_s, result.load_s, result.first_answer_s)),
            *(
                "-" if size is None else f"{size / 2**30:.2f} GiB"
                for size in (result.peak_bytes, result.kept_bytes, result.cache_bytes)
            ),
            ", ".join(f"{name} {seconds:.2f}" for name, seconds in result.phases.items() if seconds >= 0.005),
        )
    lines = [line for result in results for line in result.measurements(location.name, extra)]
    starts = [asdict(result) for result in results]
    facts = {"model": location.name, "device": str(where), "starts": starts}
    out.show(facts, out.record(lines, where), rows)


def warm(
    *,
    reps: Reps = 3,
    device: options.Device = "auto",
    every: Annotated[
        bool, typer.Option("--every", help="Calls of `onewave warm --every`; prebuilt kernels are taken.")
    ] = False,
    out: Results,
) -> None:
    """Time the first calls of attention's kernels in new processes: what `onewave warm` does, and one after another;
    with prebuilt kernels, with filled caches, and with every kernel compiled."""
    check_device(device)
    from onewave.bench.engine.startup import measure_warm

    where = gpu_for("bench warm", device, next="A CPU's kernels need none.")
    results = measure_warm(str(where), reps=reps, every=every, show=show_status)
    kinds = [f"{r.order}, {f'{r.caches} caches' if r.prebuilt else 'compiled'}" for r in results]
    title = f"first calls of attention on {where}, seconds, processes of each kind: {reps}"
    rows = table(title, "call", *kinds)
    for name in results[0].calls:
        rows.add_row(name, *(f"{result.calls[name].p50:.2f}" for result in results))
    rows.add_section()
    rows.add_row("all of them", *(f"{result.seconds.p50:.2f} ± {result.seconds.sd:.2f}" for result in results))
    lines = [line for result in results for line in result.measurements()]
    facts = {"device": str(where), "runs": [asdict(result) for result in results]}
    out.show(facts, out.record(lines, where), rows)
