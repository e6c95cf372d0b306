"""`onewave profile`: what bounds each part of a model's prompts and decode steps, predicted and, on a GPU, measured."""

from __future__ import annotations

import csv
import io
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onewave.base.errors import InvalidArgumentError, UnsupportedError
from onewave.cli import options
from onewave.cli.bench.report import numbers, show_progress, show_status
from onewave.cli.output import amount, answer, percent, show, table, write_file
from onewave.cli.tiles import options as given

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

    import torch
    from rich.table import Table

    from onewave.base.gpus import GPU
    from onewave.bench.counters import Counters
    from onewave.bench.energy import BoardEnergy
    from onewave.bench.profile.measure import DecodeSteps, MeasuredStep
    from onewave.models.config.model_config import ModelConfig
    from onewave.models.profile import Part, Verdict

_STAIRS = tuple(range(64, 2049, 64))
_FFN_ROWS = 16


@dataclass(frozen=True)
class Row:
    """One part: predicted and measured seconds, counters, the board's energy, and a verdict by the measured time
    if there is one, else the predicted."""

    part: Part
    predicted: float
    measured: float | None
    counters: Counters | None
    energy: BoardEnergy | None
    verdict: Verdict

    @property
    def seconds(self) -> float:
        """Measured, or predicted."""
        return self.predicted if self.measured is None else self.measured

    def facts(self) -> dict[str, Any]:
        """As JSON and CSV have it."""
        part, found = self.part, self.counters
        return {
            "phase": part.phase,
            "part": part.name,
            "rows": part.rows,
            "context": part.context,
            "flops": part.flops,
            "memory_bytes": part.memory_bytes,
            "l2_bytes": part.l2_bytes,
            "intensity": part.intensity,
            "predicted_us": self.predicted * 1e6,
            "measured_us": None if self.measured is None else self.measured * 1e6,
            "compute_share": self.verdict.compute,
            "memory_share": self.verdict.memory,
            "counted_bytes": None if found is None else found.dram_bytes * part.count,
            "l2_hit_rate": None if found is None else found.l2_hit_rate,
            "energy_mj": part.energy_mj,
            "board_mj": None if self.energy is None else self.energy.millijoules,
            "board_above_idle_mj": None if self.energy is None else self.energy.above_idle,
            "bound": self.verdict.bound,
            "reason": self.verdict.reason,
        }


def profile(
    model: given.Model,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="Predict for this GPU and measure nothing: H200, H100, A100, A40, ...")
    ] = None,
    input_len: Annotated[
        str, typer.Option("--input-len", "--tokens", help="Tokens of prompts; several: 512,2048. 0: none.")
    ] = ("512,2048,8192"),
    batch_size: Annotated[str, typer.Option("--batch-size", help="Of decode steps; several: 1,8. 0: none.")] = "1,8",
    context: Annotated[int, typer.Option("--context", min=0, help="Tokens in each cache of a decode step.")] = 512,
    weight_format: given.WeightFormat = "compact",
    counters: Annotated[
        bool,
        typer.Option("--counters", help="By ncu: bytes of device memory and L2 hit rate of prompts' parts, of steps."),
    ] = False,
    energy: Annotated[
        bool, typer.Option("--energy", help="What a decode step takes of the board, by NVML's counter over 2 s.")
    ] = False,
    staircase: Annotated[
        bool, typer.Option("--staircase", help="Also the time of the gate and up product over its rows.")
    ] = False,
    roofline: Annotated[Path | None, typer.Option("--roofline", metavar="SVG", help="Draw the roofline here.")] = None,
    dispatch: Annotated[
        Path | None, typer.Option("--dispatch", metavar="SVG", help="Draw which thread block ran where, and when.")
    ] = None,
    cluster: Annotated[int, typer.Option("--cluster", min=1, max=8, help="With --dispatch: blocks a cluster.")] = 1,
    reps: Annotated[int, typer.Option("--reps", min=1, help="Measured repetitions.")] = 20,
    as_csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the rows as CSV.")] = None,
    as_json: options.Json = False,
) -> None:
    """Say of each part of prompts and decode steps what it computes, moves and takes, and what bounds it.

    On a GPU the parts are measured, beside the prediction; elsewhere, or with --gpu, they are predicted for that GPU
    (default: H200). A prompt's parts are all layers' operators, each timed by itself; a decode step is the wave's, as
    `bench wave` times it, its parts shared out by a trace. Example: profile llama-3.1-8b --gpu A100 --batch-size 1.
    """
    from onewave.base.gpus import find_gpu
    from onewave.models.config.read import find_config
    from onewave.models.llama_plan import check_context
    from onewave.models.profile import DECODE, PREFILL, STEP, Predictor, verdict

    form = given.format_of(weight_format)
    config = find_config(model)
    prompts = [count for count in numbers("--input-len", input_len) if count]
    batches = [count for count in numbers("--batch-size", batch_size) if count]
    device = None if gpu is not None else _device()
    asked = {"--counters": counters, "--energy": energy, "--dispatch": dispatch is not None}
    for name in (name for name, wanted in asked.items() if wanted and device is None):
        raise UnsupportedError(name, got="no GPU" if gpu is None else f"--gpu {gpu}", allowed="on a CUDA GPU")
    if cluster > 1 and dispatch is None:
        raise InvalidArgumentError("--cluster", got=str(cluster), allowed="with --dispatch")
    check_context(context)
    cases = [(PREFILL, rows, 0) for rows in prompts] + [(DECODE, rows, context) for rows in batches]
    if not cases:
        raise InvalidArgumentError("--input-len, --batch-size", got="0", allowed="prompts, decode steps or both")
    rows: list[Row] = []
    with _processes(device) as pool:  # before this process uses the GPU
        known = _known_gpu(device) if device is not None else find_gpu("H200" if gpu is None else gpu)
        title = f"{model} on {known.name}, {'measured' if device is not None else 'PREDICTED, not measured'}"
        predictor = Predictor(config, known, form)
        # A step's takes seconds of a CPU.
        guesses = {} if pool is None else {case: pool.submit(predictor.seconds, *case) for case in cases}
        counted: dict[tuple[str, int, str], Counters] = {}
        measured: DecodeSteps | None = None
        if device is not None:
            from onewave.bench.profile.counters import Counted, count
            from onewave.bench.profile.measure import DecodeSteps

            measured = DecodeSteps(model, config, context, weight_format, device)
            steps = [batch for batch in batches if measured.are_measured(batch)]
            show_status("compiling for decode steps")
            measured.make_ready(steps, pool)
            if counters and (prompts or steps):  # first, as they may be refused
                show_status("reading counters")
                counted = count(Counted(model, prompts, steps, context, weight_format), show=show_status)
        for case in cases:
            phase, rows_of, before = case
            found = None if measured is None else _measured(measured, phase, rows_of, reps=reps, energy=energy)
            show_progress(f"predicting {phase} of {rows_of}")
            predicted = guesses[case].result() if case in guesses else predictor.seconds(*case)
            shown = len(rows)
            for part in predictor.parts(phase, rows_of, before):
                seconds, guess = None if found is None else found.seconds.get(part.name), predicted.get(part.name, 0.0)
                spent = found.energy if found is not None and part.name == STEP else None
                read = counted.get((phase, rows_of, part.name))
                rows.append(Row(part, guess, seconds, read, spent, verdict(part, seconds or guess or 1e-9, known)))
            if device is not None and not as_json:
                show(_table(f"{title}, {phase} of {rows_of}", rows[shown:]))
    if roofline is not None:
        from onewave.models.roofline import roofline as drawn

        write_file("--roofline", roofline, drawn(known, [(row.part, row.seconds) for row in rows]).svg)
    stairs = _stairs(config, known, device, reps) if staircase else []
    told = _dispatched(device, dispatch, cluster) if device is not None and dispatch is not None else []
    facts: dict[str, Any] = {
        "model": model,
        "gpu": known.name,
        "measured": device is not None,
        "rows": [row.facts() for row in rows],
        "ffn": _ffn(config, known, device, reps),
        "staircase": stairs,
    }
    if as_csv is not None:
        write_file("--csv", as_csv, _csv(facts["rows"]))
    whole = [_table(title, rows)] if device is None else []
    extra = [_stairs_table(config, stairs)] if stairs else []
    answer(as_json, facts, *whole, _ffn_table(facts["ffn"], known), *extra, *told)


def _device() -> torch.device | None:
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else None


def _known_gpu(device: torch.device) -> GPU:
    """Return the known figures of the GPU, with its own number of SMs."""
    import torch

    from onewave.base.device import num_sms
    from onewave.base.gpus import GPUS

    name = torch.cuda.get_device_name(device)
    known = next((gpu for each, gpu in GPUS.items() if re.search(rf"{each}(?!\d)", name)), None)  # an A4000 is no A40
    if known is None:
        raise UnsupportedError("profile", got=name, allowed=", ".join(GPUS), next="Use --gpu.")
    return replace(known, sms=num_sms(device))


def _processes(device: torch.device | None) -> AbstractContextManager[ProcessPoolExecutor | None]:
    """Processes that plan, predict and compile, where something is measured."""
    if device is None:
        return nullcontext()
    from onewave.bench.engine.ahead import PROCESSES
    from onewave.gpu.compile_pool import processes

    return processes(PROCESSES)


def _measured(steps: DecodeSteps, phase: str, rows: int, *, reps: int, energy: bool) -> MeasuredStep | None:
    """Measure a prompt or a step; None for one that does not run as one wave."""
    import torch

    from onewave.bench.profile.measure import MeasuredStep, measure_decode, measure_prompt
    from onewave.engine.load.stopwatch import phases_told
    from onewave.models.profile import PREFILL

    if phase == PREFILL:
        torch.cuda.set_device(steps.device)
        show_status(f"measuring {phase} of {rows}")
        return MeasuredStep(measure_prompt(steps.config, rows, steps.device, reps=reps), None)
    show_status(f"loading for {phase} of {rows}")
    with phases_told(show_status):
        made = steps.load(rows)
    if made is None:
        return None
    torch.cuda.set_device(steps.device)
    show_status(f"measuring {phase} of {rows}")
    found = measure_decode(made, rows, steps.context, reps=reps, energy=energy)
    del made
    torch.cuda.empty_cache()
    return found


def _ffn(config: ModelConfig, gpu: GPU, device: torch.device | None, reps: int) -> list[dict[str, Any]]:
    """The two products of the feed-forward block for 16 rows, by tiles of 64 and of 128 rows and columns."""
    found: list[dict[str, Any]] = []
    hidden, inner = config.hidden_size, config.intermediate_size
    for name, rows, cols in (("up", inner, hidden), ("down", hidden, inner)):
        for side, tile in ((64, (1, 64)), (128, (2, 128))):
            tiles = -(-_FFN_ROWS // side) * -(-rows // side)
            rounds = -(-tiles // gpu.sms)
            sizes = {"product": name, "m": _FFN_ROWS, "n": rows, "k": cols, "tile": side}
            counts = {"tiles": tiles, "waves": rounds, "sms_used": tiles / (rounds * gpu.sms)}
            times = {
                "by_tiles_us": gpu.tile_us(tile, _FFN_ROWS, rows, cols),
                "by_bytes_us": gpu.bytes_us(_FFN_ROWS, rows, cols),
                "predicted_us": gpu.product_by_us(tile, _FFN_ROWS, rows, cols),
                "measured_us": None,
            }
            if device is not None:
                from onewave.bench.profile.measure import measure_tile

                show_status(f"measuring the feed-forward product {name} by tiles of {side}")
                seconds = measure_tile(tile, _FFN_ROWS, rows, cols, device, reps=reps)
                times["measured_us"] = None if seconds is None else seconds * 1e6
            found.append(sizes | counts | times)
    return found


def _stairs(config: ModelConfig, gpu: GPU, device: torch.device | None, reps: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    rows, cols = 2 * config.intermediate_size, config.hidden_size
    for tokens in _STAIRS:
        measured = None
        if device is not None:
            import torch

            from onewave.bench.clock import time_calls
            from onewave.ops.linear import linear

            show_status("measuring the staircase")
            x, weight = (torch.randn(n, cols, device=device, dtype=torch.bfloat16) for n in (tokens, rows))
            with torch.inference_mode():
                measured = time_calls([lambda x=x, weight=weight: linear(x, weight)], device, reps=reps).p50 * 1e6
        found.append({"m": tokens, "predicted_us": gpu.product_us(tokens, rows, cols), "measured_us": measured})
    return found


def _dispatched(device: torch.device, file: Path, cluster: int) -> list[str]:
    from onewave.base.device import num_sms
    from onewave.bench.profile.dispatch_impl import probe
    from onewave.bench.profile.pictures import dispatch_picture

    blocks = 3 * num_sms(device) // cluster * cluster
    found = probe(device, blocks=blocks, cluster=cluster)
    write_file("--dispatch", file, dispatch_picture(found).svg)
    order = "in the order of their numbers" if found.in_order else "not in the order of their numbers"
    first = ", ".join(map(str, found.sm[:8]))
    return [f"{blocks} thread blocks in clusters of {cluster} began {order}; the first ran on SMs {first}; {file}"]


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _table(title: str, rows: list[Row]) -> Table:
    shown: dict[str, list[str]] = {
        "part": [f"{row.part.phase} {row.part.name}" for row in rows],
        "rows": [str(row.part.rows) for row in rows],
        "GFLOP": [f"{row.part.flops * 1e-9:,.2f}" for row in rows],
        "bytes": [amount(row.part.memory_bytes) for row in rows],
        "FLOP/B": [f"{row.part.intensity:,.1f}" for row in rows],
        "predicted us": [f"{row.predicted * 1e6:,.1f}" for row in rows],
        "measured us": ["" if row.measured is None else f"{row.measured * 1e6:,.1f}" for row in rows],
        "FLOPs": [percent(row.verdict.compute) for row in rows],
        "bandwidth": [percent(row.verdict.memory) for row in rows],
        "L2 hits": ["" if row.counters is None else percent(row.counters.l2_hit_rate) for row in rows],
        "mJ by bytes": [f"{row.part.energy_mj:,.0f}" for row in rows],
        "mJ": ["" if row.energy is None else f"{row.energy.millijoules:,.0f}" for row in rows],
        "bound": [row.verdict.bound for row in rows],
    }
    return _filled(title, shown)


def _filled(title: str, columns: dict[str, list[str]]) -> Table:
    """A table of the columns in which something stands."""
    filled = {name: column for name, column in columns.items() if any(column)}
    made = table(title, *filled)
    for row in zip(*filled.values(), strict=True):
        made.add_row(*row)
    return made


def _ffn_table(found: list[dict[str, Any]], gpu: GPU) -> Table:
    shown: dict[str, list[str]] = {
        "product": [each["product"] for each in found],
        "M x N x K": [f"{each['m']} x {each['n']} x {each['k']}" for each in found],
        "tile": [str(each["tile"]) for each in found],
        "tiles": [str(each["tiles"]) for each in found],
        "waves": [str(each["waves"]) for each in found],
        "SMs used": [percent(each["sms_used"]) for each in found],
        "by tiles us": [f"{each['by_tiles_us']:.1f}" for each in found],
        "by bytes us": [f"{each['by_bytes_us']:.1f}" for each in found],
        "predicted us": [f"{each['predicted_us']:.1f}" for each in found],
        "measured us": ["" if each["measured_us"] is None else f"{each['measured_us']:.1f}" for each in found],
    }
    return _filled(f"feed-forward products of {_FFN_ROWS} rows by tile, on {gpu.sms} SMs", shown)


def _stairs_table(config: ModelConfig, stairs: list[dict[str, Any]]) -> Table:
    size = f"{2 * config.intermediate_size} x {config.hidden_size}"
    made = table(f"gate and up, {size}, over rows", "M", "predicted us", "measured us")
    for stair in stairs:
        measured = stair["measured_us"]
        made.add_row(str(stair["m"]), f"{stair['predicted_us']:.1f}", "" if measured is None else f"{measured:.1f}")
    return made
