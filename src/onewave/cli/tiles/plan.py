"""`onewave tiles plan`: a decode step's plan as a file."""

from pathlib import Path
from typing import Annotated

import typer

from onewave.base.errors import InvalidArgumentError, shown
from onewave.cli.output import write_file
from onewave.cli.tiles import options as given
from onewave.models.config.read import find_config
from onewave.models.llama_plan import DecodeStep, deal_decode, workers_for
from onewave.models.step_plan import plan_of


def plan_command(
    program: Annotated[str, typer.Argument(metavar="decode", help="The only program with a plan of its own.")],
    model: given.Model,
    workers: given.Workers = 132,
    batch_size: given.BatchSize = 1,
    weight_format: given.WeightFormat = "compact",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write it here, not to the screen.")
    ] = None,
) -> None:
    """Write the plan of a decode step that the engine launches by itself, as JSON.

    Its queues are each worker's tasks in order; onewave.models.step_plan tells what they and the other entries mean.
    Edit it; then `tiles verify FILE` proves it, `tiles simulate FILE` predicts it, `bench wave --plan FILE` runs it,
    and `generate --plan FILE` decodes with it. Example: plan decode llama-3.1-8b --batch-size 1 -o plan.json.
    """
    if program != "decode":
        raise InvalidArgumentError("plan", got=shown(program), allowed="decode MODEL")
    form = given.format_of(weight_format)
    step = DecodeStep(find_config(model), batch_size, form)
    made = plan_of(deal_decode(step, workers=workers_for(step, available=workers)), model=model)
    if out is None:
        print(made.to_json(), end="")
        return
    write_file("--out", out, made.to_json())
    print(f"{out}: {sum(map(len, made.queues)):,} tasks on {made.workers} workers")
