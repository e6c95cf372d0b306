"""`onewave bench prefill`: what the engine's own attention is worth for a prompt."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from onewave.cli import options
from onewave.cli.bench.report import Reps, Results, Warmup, gpu_for, name_of, numbers, show_status
from onewave.cli.output import table
from onewave.cli.session import open_llm


def prefill(
    asked: options.ModelOptions,
    *,
    input_len: Annotated[str, typer.Option("--input-len", help="Tokens of the prompts; several: 512,8192.")] = "8192",
    reps: Reps = 7,
    warmup: Warmup = 2,
    keep_unpacked: options.KeepUnpacked = None,
    out: Results,
) -> None:
    """Time prompts through the engine with its own attention and with PyTorch's cuDNN and flash kernels in its place.

    They take turns, a prompt each. Beside each stands what the attention of all layers takes by itself.
    """
    lengths = numbers("--input-len", input_len, 1)
    from onewave.bench.engine.prefill import measure_prefill

    gpu_for("bench prefill", asked.device, next="Use bench latency.")
    more: dict[str, Any] = {"max_model_len": max(lengths) + 1, "max_num_seqs": 1, "keep_unpacked": keep_unpacked}
    llm = open_llm(**vars(asked), **more).llm
    results, notes = measure_prefill(llm, lengths, reps=reps, warmup=warmup, show=show_status)
    title = f"{llm.name}, {name_of(llm.dtype)} on {llm.device}, prompts one at a time"
    rows = table(title, "attention", "tokens", "ms", "tokens/s", "x onewave's time", "attention alone ms")
    ours = {result.tokens: result.seconds.p50 for result in results if result.attention == "onewave"}
    for result in results:
        seconds = result.seconds
        rows.add_row(
            result.attention,
            str(result.tokens),
            f"{seconds.p50 * 1e3:.2f} ± {seconds.sd * 1e3:.2f}",
            f"{result.tokens / seconds.p50:,.0f}",
            f"{seconds.p50 / ours[result.tokens]:.3f}" if result.tokens in ours else "-",
            f"{result.alone * 1e3:.2f}",
        )
    citations = out.record((result.measurement(llm) for result in results), llm.device)
    facts = {"model": llm.name, "results": [asdict(result) for result in results], "notes": notes}
    out.show(facts, citations, rows, *notes)
    llm.close()
