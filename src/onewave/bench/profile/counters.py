"""Device memory's bytes and the L2 cache's hits of prompts' parts, a layer of each, and of decode steps, read by ncu
(see counters.py)."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from onewave.base.errors import UnsupportedError
from onewave.bench.clock import recorded
from onewave.bench.counters import Counters, collect, count_cold
from onewave.bench.profile.measure import DecodeSteps, PromptOperands, step_of
from onewave.models.config.read import find_config
from onewave.models.profile import DECODE, PREFILL, STEP, Part, parts


@dataclass(frozen=True)
class Counted:
    """The work of a model to count. tokens: of prompts. batches: of decode steps, `context` tokens in each cache, with
    weights in the format of that name."""

    model: str
    tokens: list[int]
    batches: list[int]
    context: int
    weights: str


def count(asked: Counted, *, show: Callable[[str], None] = lambda text: None) -> dict[tuple[str, int, str], Counters]:
    """Count by phase, rows and part: a layer of each part of a prompt, and whole decode steps as STEP.

    show: told what runs. Raises UnsupportedError without ncu, and for a step that does not run as one wave.
    """
    found = collect(__name__, [json.dumps(asdict(asked))], show=show)
    names = [(PREFILL, tokens, part.name) for tokens in asked.tokens for part in _parts(asked.model, tokens)]
    names += [(DECODE, batch, STEP) for batch in asked.batches]
    if len(found) != len(names):
        raise UnsupportedError("--counters: ncu", got=f"{len(found)} counted ranges of {len(names)}")
    return dict(zip(names, found, strict=True))


def _parts(model: str, tokens: int) -> list[Part]:
    return parts(find_config(model), PREFILL, tokens, 0)[:-1]


@torch.inference_mode()
def main(asked: Counted) -> None:
    """Run each part under ncu: once for warming up, then once in a range, with an L2 cache that lacks it."""
    device, config = torch.device("cuda", 0), find_config(asked.model)
    for tokens in asked.tokens:
        operands = PromptOperands(config, tokens, device)
        for part in _parts(asked.model, tokens):
            count_cold(recorded(operands.calls(part)[:1], device), device)
            torch.cuda.empty_cache()
    steps = DecodeSteps(asked.model, config, asked.context, asked.weights, device)
    for batch in asked.batches:
        # Bytes and hits are those of any weights; ncu runs all this once for each pass.
        made = steps.blank(batch)
        if made is None:
            raise UnsupportedError("--counters", got=f"{asked.model}, {batch} at once", allowed="steps of one wave")
        wave, step = step_of(made, batch, asked.context)
        count_cold(recorded([step], device), device)
        wave.wave.check()
        del made, wave, step
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(Counted(**json.loads(sys.argv[1])))
