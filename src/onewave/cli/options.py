"""Options that several commands share, under vLLM's names where it has them."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from onewave.weights.fetch.aliases import DEFAULT_ALIAS

Model = Annotated[
    str,
    typer.Option("--model", "-m", help="Directory, GGUF file, alias, built-in configuration, or Hugging Face id."),
]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, bfloat16, float16 or, on a CPU, float32.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda (cuda:1 for the second GPU).")]
MaxModelLen = Annotated[
    int | None, typer.Option("--max-model-len", help="Most tokens of prompt and answer together. Default: the model's.")
]
LoadFormat = Annotated[
    str,
    typer.Option(
        "--load-format",
        help="auto: the checkpoint's weights (bench wave and startup: of a built-in configuration, random ones); dummy:"
        " seeded random ones.",
    ),
]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a Hugging Face id.")]
Tokenizer = Annotated[str | None, typer.Option("--tokenizer", help="Take the tokenizer from this model instead.")]
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")]
Decode = Annotated[
    str,
    typer.Option("--decode", help="auto; or wave (one launch a token), graph or eager, which never fall back."),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        "--quantization",
        help="int8 or fp8 (a scale a row) or int4 (a scale for 128 columns): what to round the matrices to; w8a8 or"
        " fp8-w8a8: to int8 or fp8, and activations with them, by token.",
    ),
]
KvCacheDtype = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        help="auto: keys and values in the model's dtype; int8 or fp8: in 8 bits, by the checkpoint's scales or"
        " measured ones.",
    ),
]
Compact = Annotated[
    bool | None,
    typer.Option(
        "--compact/--no-compact",
        help="With the wave: bfloat16 matrices in 13 bits a weight, the same numbers. Default: wherever it can be.",
    ),
]
Plan = Annotated[
    Path | None,
    typer.Option("--plan", metavar="FILE", help="Decode by this plan of a step, which `tiles plan` has written."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Stats = Annotated[bool, typer.Option("--stats", help="Print load time, time to first token and tokens/s on stderr.")]
Ledger = Annotated[
    Path | None,
    typer.Option("--ledger", metavar="[DIR]", help="Append the measurements to DIR (default: ./ledger)."),
]


@dataclass(frozen=True)
class ModelOptions:
    """A model and how it is loaded: LLM's arguments that most commands share."""

    model: Model = DEFAULT_ALIAS
    dtype: Dtype = "auto"
    device: Device = "auto"
    load_format: LoadFormat = "auto"
    revision: Revision = None
    decode: Decode = "auto"
    quantization: Quantization = None
    kv_cache_dtype: KvCacheDtype = "auto"
    compact: Compact = None


@dataclass(frozen=True)
class Loading(ModelOptions):
    """All of LLM's arguments that `generate` and `chat` take."""

    max_model_len: MaxModelLen = None
    tokenizer: Tokenizer = None
    enforce_eager: EnforceEager = False
    plan: Plan = None


def chosen(call: typer.Context, names: Collection[str] | None = None) -> dict[str, Any]:
    """The options that the command line sets, with their values: "--batch-size": 8. names: only of these parameters."""
    return {
        parameter.opts[0]: call.params[parameter.name]
        for parameter in call.command.params
        if parameter.name and (names is None or parameter.name in names)
        if getattr(call.get_parameter_source(parameter.name), "name", "DEFAULT") != "DEFAULT"
    }
