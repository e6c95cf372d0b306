"""Options that several `onewave tiles` commands share."""

from typing import Annotated

import typer

from onewave.base.errors import InvalidArgumentError, check_one_of
from onewave.base.json_files import in_file
from onewave.base.weight_formats import WEIGHT_BYTES, find_format
from onewave.base.weight_formats import WeightFormat as Format
from onewave.models.config.model_config import ModelConfig
from onewave.models.config.read import find_config
from onewave.models.step_plan import StepPlan, open_plan
from onewave.tiles.graph.programs import parse_bytes
from onewave.tiles.sim.machine import CacheLevel

POLICIES = ("lru", "fifo", "belady")

Tile = Annotated[str | None, typer.Option("--tile", help="Rows x columns x K step of a tile, as 128x128x64.")]
Dtype = Annotated[
    str, typer.Option("--dtype", help="Of all tensors: bf16, fp16, fp32, fp8, int8, int4; decode: bf16, fp16.")
]
Order = Annotated[
    str | None,
    typer.Option("--order", help="As row, snake, grouped:8, hilbert, bpt, explicit:FILE; a wrong one lists all."),
]
Cache = Annotated[
    str | None, typer.Option("--cache", help="Of the shared cache: 50MB, 48MiB, or 64tiles (of the largest tile).")
]
CachePanels = Annotated[
    int | None, typer.Option("--cache-panels", help="gemm only: count whole panels of A and B with room for so many.")
]
Workers = Annotated[int, typer.Option("--workers", help="SMs that share what the machine has.")]
Queues = Annotated[
    str | None,
    typer.Option(
        "--queues",
        help="ticket: a free worker takes the next task; static: dealt out. Default: ticket; decode: as it runs.",
    ),
]
MODEL = "A built-in name, a config.json, its directory, or a GGUF file."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL)]
BatchSize = Annotated[int, typer.Option("--batch-size", "--batch", help="decode: sequences at once.")]
Context = Annotated[int, typer.Option("--context", help="decode: tokens in each cache.")]
WeightFormat = Annotated[
    str, typer.Option("--weight-format", help="decode: of the weight stream: 16-bit, compact, int8, fp8 or int4.")
]


def format_of(name: str) -> Format | None:
    """The format of the stream's weights; None for 16 bits. Raises InvalidArgumentError."""
    return find_format(check_one_of("weight format", name, WEIGHT_BYTES))


def plan_and_config(file: str) -> tuple[StepPlan, ModelConfig]:
    """Read a decode step's plan, and its model's sizes. Raises InvalidArgumentError, ConfigError."""
    plan = open_plan(file)
    with in_file(file):
        return plan, find_config(plan.model)


def policy_of(text: str) -> str:
    """A cache's policy; opt is belady. Raises InvalidArgumentError."""
    return check_one_of("policy", {"opt": "belady"}.get(text.lower(), text.lower()), POLICIES)


def levels_of(texts: list[str], policies: tuple[str, ...] = POLICIES) -> list[CacheLevel]:
    """Read caches as NAME=SIZE[:POLICY][:private]. policies: those that may be named. Raises InvalidArgumentError."""
    found: list[CacheLevel] = []
    for text in texts:
        name, _, rest = text.partition("=")
        size, *words = rest.split(":")
        policy = [word for word in words if word != "private"]
        if not name or not rest or len(policy) > 1 or not {*policy} <= {*policies}:
            allowed = f"NAME=SIZE{'[:POLICY]' if policies else ''}[:private]"
            allowed += f"; policies: {', '.join(policies)}" if policies else ""
            raise InvalidArgumentError("--level", got=repr(text[:40]), allowed=allowed)
        found.append(CacheLevel(name, parse_bytes(size), policy=[*policy, "lru"][0], private="private" in words))
    return found
