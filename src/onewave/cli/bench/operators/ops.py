"""`onewave bench ops`: how fast the operators are one by one, beside PyTorch's."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onewave.base.errors import InvalidArgumentError, shown
from onewave.base.settings import Settings
from onewave.cli import options
from onewave.cli.bench.operators.attention import ATTENTION_OPERATORS, bench_attention, chosen_operators
from onewave.cli.bench.operators.ffn import FFN, LAYER, bench_ffn, count_ffn
from onewave.cli.bench.operators.host import bench_host
from onewave.cli.bench.operators.products import ManyRows, bench_products
from onewave.cli.bench.report import Reps, Results, Rows, ceiling_line, make_current, name_of, show_status
from onewave.engine.arguments import check_device, check_dtype
from onewave.weights.fetch import sources
from onewave.weights.fetch.aliases import DEFAULT_ALIAS

if TYPE_CHECKING:
    import torch

    from onewave.models.config.model_config import ModelConfig


# Default sequences, with --rows, of the steps that tiles are for: for one sequence the engine keeps matrices unpacked.
_SEQUENCES = 16


def ops(
    call: typer.Context,
    *,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Operators to measure. Default: a decode step's. Beside their peers: attention, attention-varlen, "
            "attention-fp8, decode-attention, masked_multihead_attention, linear-int8, linear-fp8; alone: ffn, "
            "post-attention."
        ),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="Whose shapes: anything `generate` takes, or a built-in configuration.")
    ] = DEFAULT_ALIAS,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Sequences of the decode step.")] = 1,
    context: Annotated[int, typer.Option("--context", min=1, help="Keys a sequence attends to.")] = 512,
    cpu_format: Annotated[str, typer.Option("--cpu-format", help="How a CPU keeps its matrices.")] = "Q4_1",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    reps: Reps = 20,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            help="Of attention: batch,heads[/kv_heads],length,head_dim; of ffn: rows,hidden,inner[,gated] or sweep; "
            "of post-attention: rows,attended,hidden,inner or sweep; with --rows: rows,cols. Several make a list.",
        ),
    ] = None,
    causal: Annotated[
        bool | None, typer.Option("--causal/--no-causal", help="Of attention: one mask only. Default: both.")
    ] = None,
    logits: Annotated[
        str | None,
        typer.Option("--logits", help="Of attention: adversarial scores: first, last (a huge key there) or x16."),
    ] = None,
    counters: Annotated[
        bool,
        typer.Option(
            "--counters",
            help="Of ffn and post-attention: bytes of device memory and L2 hit rate, by Nsight Compute (ncu).",
        ),
    ] = False,
    host: Annotated[
        bool,
        typer.Option(
            "--host-time", "--host", help="How long the host takes for an eager call, beside PyTorch's; any device."
        ),
    ] = False,
    many: ManyRows,
    out: Results,
) -> None:
    """Time each operator of a decode step on random operands that no cache holds, and the read ceiling beside them."""
    check_dtype(dtype)
    check_device(device)
    if many.rows is None and options.chosen(call, ("weight_format",)):
        raise InvalidArgumentError("--weight-format", got="no --rows", allowed="with --rows", next="Use --cpu-format.")
    if host:
        of_steps = ("batch_size", "context", "cpu_format", "rows", "shape", "causal", "logits", "counters")
        given = options.chosen(call, of_steps)
        if given:
            raise InvalidArgumentError(
                ", ".join(given), got="--host-time", allowed="--model, --dtype, --device, --reps"
            )
        where, location, config, kind = _model(model, dtype, device)
        bench_host(names or [], config, location.name, where, kind, rounds=reps, out=out)
        return
    if many.rows is not None:
        given = options.chosen(call, ("context", "cpu_format", "causal", "logits", "counters"))
        if names != ["linear"] or given:
            got = ", ".join(given) or ", ".join(names or ["no operator"])
            raise InvalidArgumentError("--rows", got=f"with {got}", allowed="linear alone, without options of a step")
        where, location, config, kind = _model(model, dtype, device)
        sequences = batch_size if options.chosen(call, ("batch_size",)) else _SEQUENCES
        named = location.name, config
        bench_products(many, shape, named, (where, kind), sequences=sequences, rounds=reps, out=out)
        return
    if names in ([FFN], [LAYER]):
        _refuse_step_options(call, names[0])
        if logits or causal is not None:
            raise InvalidArgumentError("--causal, --logits", got=names[0], allowed="with attention")
        kind, where = _attention_dtype(dtype, device)
        report = count_ffn if counters else bench_ffn
        report(names[0], shape, device=where, dtype=kind, reps=reps, out=out)
        return
    if counters:
        raise InvalidArgumentError(
            "--counters", got=", ".join(names or ["no operator"]), allowed=f"{FFN} or {LAYER} alone"
        )
    attentions, others = chosen_operators(names or [])
    if attentions:
        _refuse_step_options(call, ", ".join(attentions))
        kind, where = _attention_dtype(dtype, device)
        bench_attention(
            attentions,
            shapes=shape,
            causal=causal,
            device=where,
            dtype=kind,
            rounds=reps,
            out=out,
            logits=logits,
        )
        return
    if shape or logits or causal is not None:
        what = "--shape, --causal, --logits"
        raise InvalidArgumentError(what, got="no attention operator", next="Name attention first.")
    from onewave.bench.ceilings import read_bandwidth
    from onewave.bench.ops.operators import OPERATORS, check_weight_format, measure, trials
    from onewave.bench.ops.scaled import KINDS, scaled_trials
    from onewave.ops.linear.packed import FORMATS

    chosen = others or list(OPERATORS)
    for name in chosen:
        if name not in (*OPERATORS, *KINDS):
            known = [*sorted({*OPERATORS, *KINDS, *ATTENTION_OPERATORS}), f"{FFN} or {LAYER} alone"]
            raise InvalidArgumentError("operator", got=shown(name), allowed=", ".join(known))
    if cpu_format not in FORMATS:
        raise InvalidArgumentError("--cpu-format", got=shown(cpu_format), allowed=", ".join(FORMATS))
    where, location, config, kind = _model(model, dtype, device)
    if "linear" in chosen and where.type == "cpu":
        check_weight_format(config, cpu_format)
    show_status("measuring the read ceiling")
    ceiling = read_bandwidth(where)
    plan = chain(
        trials(config, where, kind, tokens=batch_size, context=context, weight_format=cpu_format),
        *(scaled_trials(name, config, where, kind, tokens=batch_size) for name in KINDS),
    )
    title = f"{location.name}, {name_of(kind)} on {where}, batch {batch_size}"
    columns = ("operator", "shape", "implementation", "us", "GB/s", "of ceiling")
    rows = Rows(out, where, title, *columns, left=3)
    found: list[dict[str, Any]] = []
    for trial in plan:
        if trial.operator not in chosen:
            continue
        show_status(f"{trial.operator} {trial.shape}: {trial.implementation}")
        result = measure(trial, where, reps=reps)
        line, rate = result.measurement(location.name, name_of(kind), ceiling), result.gigabytes_per_second
        measured = (f"{result.seconds.p50 * 1e6:.1f}", f"{rate:.1f}", f"{rate / ceiling.value:.1%}")
        rows.add((trial.operator, trial.shape, trial.implementation, *measured), [line])
        found.append({"operator": line.metric, "us": line.summary.p50, "gigabytes_per_second": rate, **line.extra})
    facts = {"model": location.name, "device": str(where), "ceiling_gb_s": ceiling.value, "trials": found}
    rows.finish(facts, ceiling_line(ceiling))


def _model(model: str, dtype: str, device: str) -> tuple[torch.device, sources.ModelLocation, ModelConfig, torch.dtype]:
    """The device, the model and the dtype that are meant."""
    from onewave.engine.load.choices import check_dtype_on, choose_device, choose_dtype
    from onewave.models.config.read import load_config

    where = choose_device(device)
    make_current(where)
    check_dtype_on(dtype, where)
    load_format = "dummy" if model in sources.builtin_names() else "auto"
    location = sources.resolve(model, Settings.from_env(), load_format=load_format)
    config = load_config(location)
    return where, location, config, choose_dtype(dtype, config, where)


def _refuse_step_options(call: typer.Context, operator: str) -> None:
    """Refuse what says a decode step's shapes where an operator has shapes of its own."""
    given = options.chosen(call, ("model", "batch_size", "context", "cpu_format"))
    if given:
        raise InvalidArgumentError(", ".join(given), got=operator, allowed="--shape, for shapes of its own")


def _attention_dtype(dtype: str, device: str) -> tuple[torch.dtype, torch.device]:
    """Return attention's dtype and device: bfloat16 on a GPU, float32 on a CPU, unless a type is named."""
    from onewave.engine.load.choices import choose_device, choose_operand_dtype

    where = choose_device(device)
    make_current(where)
    return choose_operand_dtype(dtype, where), where
