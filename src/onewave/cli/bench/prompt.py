"""`onewave bench prompt`: the time to the first token."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from typing import Annotated, Any

import typer

from onewave.base.settings import Settings
from onewave.cli import options
from onewave.cli.bench.report import Reps, Results, Warmup, gpu_for, name_of, numbers, show_status
from onewave.cli.output import table
from onewave.cli.session import open_llm


def prompt(
    asked: options.ModelOptions,
    *,
    batch_size: Annotated[str, typer.Option("--batch-size", help="Prompts at once; several: 1,8.")] = "1",
    input_len: Annotated[
        str, typer.Option("--input-len", help="Tokens of each prompt; several: 64,8192.")
    ] = "8,64,256,512,2048,8192",
    reps: Reps = 7,
    peer: Annotated[
        bool, typer.Option("--peer", help="Beside it: transformers, plain and compiled, on random weights.")
    ] = False,
    warmup: Warmup = 2,
    out: Results,
) -> None:
    """Time prompts to the first token of all: with the engine's own attention, and with PyTorch's cuDNN and flash
    kernels in its place. --peer: also transformers' static cache, as it is and compiled.

    They take turns. Beside each stand the GPU's and the host's time of the passes, and what the attention of all layers
    takes by itself.
    """
    batches = numbers("--batch-size", batch_size, 1)
    lengths = numbers("--input-len", input_len, 1)
    from onewave.bench.engine.prompt import measure_prompts
    from onewave.bench.engine.transformers_peer import measure_transformers_prompts, random_transformers
    from onewave.weights.fetch.sources import resolve

    gpu_for("bench prompt", asked.device, next="Use bench latency.")
    more: dict[str, Any] = {
        "max_model_len": max(lengths) + 1,
        "max_num_seqs": max(batches),
    }
    llm = open_llm(**vars(asked), **more, enable_prefix_caching=False).llm
    results, notes = measure_prompts(llm, list(product(batches, lengths)), reps=reps, warmup=warmup, show=show_status)
    llm.close()
    if peer:
        location = resolve(asked.model, Settings.from_env(), revision=asked.revision, load_format="dummy")
        model = random_transformers(location, llm.device, llm.dtype, asked="bench prompt --peer")
        sizes = list(product(batches, lengths))
        results += measure_transformers_prompts(model, sizes, reps=reps, warmup=warmup, show=show_status)
    title = f"{llm.name}, {name_of(llm.dtype)} on {llm.device}, first tokens"
    rows = table(
        title, "attention", "batch", "tokens", "ms", "GPU ms", "host ms", "x onewave's time", "attention alone ms"
    )
    ours = {(result.batch, result.tokens): result.seconds.p50 for result in results if result.attention == "onewave"}
    for result in results:
        seconds = result.seconds
        rows.add_row(
            result.attention,
            str(result.batch),
            str(result.tokens),
            f"{seconds.p50 * 1e3:.2f} ± {seconds.sd * 1e3:.2f}",
            f"{result.gpu * 1e3:.2f}",
            f"{result.host * 1e3:.2f}",
            f"{seconds.p50 / ours[result.batch, result.tokens]:.3f}",
            "-" if result.alone is None else f"{result.alone * 1e3:.2f}",
        )
    citations = out.record((result.measurement(llm) for result in results), llm.device)
    facts = {"model": llm.name, "results": [asdict(result) for result in results], "notes": notes}
    out.show(facts, citations, rows, *notes)
