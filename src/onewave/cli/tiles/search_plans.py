"""`onewave tiles search decode`: plans of a decode step that are predicted to be faster than the wave's own."""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from onewave.base.errors import InvalidArgumentError
from onewave.cli.bench.report import show_progress
from onewave.cli.output import make_directory, show, table, write_file
from onewave.cli.tiles import options as given
from onewave.engine.arguments import number
from onewave.models.config.read import find_config
from onewave.models.llama_plan import DecodeStep
from onewave.models.plan_search import Asked, FoundPlan, PlanSearch, search_plans
from onewave.tiles.graph.programs import exactly
from onewave.tiles.search.search import check_time_limit


@dataclass(frozen=True)
class DecodeSearch:
    """Options of `search decode` alone."""

    workers: given.Workers = 132
    batch_size: given.BatchSize = 1
    context: given.Context = 512
    weight_format: given.WeightFormat = "compact"
    other_bits: Annotated[
        bool, typer.Option("--other-bits", help="decode: also plans that round otherwise than the wave's own.")
    ] = False
    keep: Annotated[int, typer.Option("--keep", min=1, max=64, help="decode: plans to keep.")] = 5
    apart: Annotated[
        float, typer.Option("--apart", help="decode: percent by which plans that are kept differ in time.")
    ] = 0.3
    seed: Annotated[int, typer.Option("--seed", min=0, help="decode: of the search.")] = 0
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="decode: write the plans that are kept here.")
    ] = None

    def run(self, sizes: list[str], time_limit: float, as_json: bool) -> None:
        """Search, write and print. Raises OnewaveError."""
        [model] = exactly("decode", sizes, ("MODEL",))
        check_time_limit(time_limit)
        apart = number("apart", self.apart, 0, 100, "0 to 100 percent") / 100
        weight_format = given.format_of(self.weight_format)
        asked = Asked(
            step=DecodeStep(find_config(str(model)), self.batch_size, weight_format),
            model=str(model),
            workers=self.workers,
            context=self.context,
            same_bits=not self.other_bits,
        )
        if self.out is not None:  # before the minutes of the search
            make_directory("--out", self.out)
            there = sorted(self.out.glob("*.json"))
            if there:  # `bench wave --plans` would run them too
                next = "Move them away, or name another directory."
                raise InvalidArgumentError("--out", got=str(there[0]), allowed="a directory without plans", next=next)
        result = search_plans(
            asked, time_limit=time_limit, keep=self.keep, apart=apart, seed=self.seed, show=show_progress
        )
        names = [f"plan{number}" for number in range(1, len(result.found) + 1)]
        if self.out is not None:
            for name, found in zip(names, result.found, strict=True):
                write_file("--out", self.out / f"{name}.json", found.plan.to_json())
        if as_json:
            print(json.dumps(_facts(result, names)))
        else:
            _print(result, names, f"{model}, {self.batch_size} at once, {self.weight_format} weights")


def _facts(result: PlanSearch, names: list[str]) -> dict[str, Any]:
    return {
        "own_ms": result.own.candidate.seconds * 1e3,
        "tried": result.tried,
        "refused": result.refused,
        "seconds": result.seconds,
        "plans": [
            {"plan": name, "predicted_ms": found.candidate.seconds * 1e3, "workers": found.candidate.workers}
            | {"same_bits": found.plan.rounds_as(result.own.plan), "changes": asdict(found.candidate.changes)}
            for name, found in zip(names, result.found, strict=True)
        ],
    }


def _print(result: PlanSearch, names: list[str], title: str) -> None:
    rows = table(f"{title}: predicted", "plan", "ms", "x own", "bits", "changes", left=1)
    own = result.own.candidate.seconds
    rows.add_row("the wave's own", f"{own * 1e3:.4f}", "1.0000", "", "")
    for name, found in zip(names, result.found, strict=True):
        seconds = found.candidate.seconds
        bits = "the same" if found.plan.rounds_as(result.own.plan) else "others"
        rows.add_row(name, f"{seconds * 1e3:.4f}", f"{seconds / own:.4f}", bits, _changes(found, result.own))
    show(rows, f"{result.tried:,} tried, {result.refused:,} refused, in {result.seconds:.0f} s")


def _changes(found: FoundPlan, own: FoundPlan) -> str:
    moves = Counter(stage for stage, source, target in found.candidate.changes.moves if source != target)
    said = [f"{count} moves of {stage}" for stage, count in moves.items()]
    if found.candidate.changes.turn:
        said.append(f"attention {found.candidate.changes.turn} workers on")
    for name in ("workers", "splits", "slices", "held", "ring"):
        mine, theirs = getattr(found.plan, name), getattr(own.plan, name)
        if mine != theirs:
            said.append(f"{name} {mine}")
    return ", ".join(said) or "none"
