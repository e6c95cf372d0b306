"""Ragged requests under load with a cache that is too small, and the same requests alone."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kit.serving.blocks import check_pool
from onewave.engine.engine import Engine
from onewave.engine.params import SamplingParams
from onewave.engine.request import Request
from onewave.engine.runner import ModelRunner
from onewave.memory.block_pool import PrefixCaching
from onewave.models.llama import Llama


@dataclass(frozen=True)
class Asked:
    """A request, and how many steps it comes after the one before."""

    prompt: list[int]
    params: SamplingParams
    wait: int
    priority: int


def ragged(count: int, *, vocab_size: int, block_size: int, max_new: int) -> list[Asked]:
    """Prompts of up to six blocks, half of them with one of three beginnings; greedy and sampled."""
    draw = random.Random(0)
    beginnings = [[draw.randrange(vocab_size) for _ in range(5 * block_size)] for _ in range(3)]
    found: list[Asked] = []
    for number in range(count):
        prompt = [draw.randrange(vocab_size) for _ in range(draw.randrange(1, block_size))]
        if number % 2:
            prompt = draw.choice(beginnings)[: draw.randrange(1, 5 * block_size)] + prompt
        params = SamplingParams(
            max_tokens=draw.randrange(1, max_new),
            temperature=draw.choice((0.0, 0.8)),
            repetition_penalty=draw.choice((1.0, 1.2)),
            n=draw.choice((1, 1, 1, 3)),
            seed=number,
            logprobs=3,
            ignore_eos=True,
            detokenize=False,
        )
        found.append(Asked(prompt, params, draw.choice((0, 0, 1, 4)), draw.choice((0, 0, 1))))
    return found


def alone(runner: ModelRunner, asked: Sequence[Asked]) -> list[Request]:
    """One after the other, nothing cached."""
    engine = Engine(runner, prefixes=PrefixCaching(enabled=False))
    found: list[Request] = []
    for each in asked:
        found.append(engine.add(None, each.prompt, each.params))
        while engine.has_work:
            engine.step()
    return found


def together(runner: ModelRunner, asked: Sequence[Asked]) -> tuple[list[Request], Counter[str]]:
    """As they come. Also counts what happened: cached (tokens), preempted, chunks that are no whole prompt, copies."""
    engine, counts = Engine(runner), Counter[str]()
    scheduler: Any = engine._scheduler
    plan = scheduler.plan

    def counted() -> Any:
        made = plan()
        counts["preempted"] += len(made.preempted)
        counts["copies"] += len(made.copies)
        counts["chunks"] += sum(tokens < sequence.left for sequence, tokens in made.chunks)
        return made

    scheduler.plan = counted
    found: list[Request] = []
    for each in asked:
        for _ in range(each.wait):
            engine.step()
        found.append(engine.add(None, each.prompt, each.params, priority=each.priority))
    while engine.has_work:
        engine.step()
    check_pool(scheduler.pool)
    counts["cached"] = sum(request.num_cached_tokens or 0 for request in found)
    return found, counts


def runner_of(model: Llama, *, blocks: int | None = None, tokens: int, **given: Any) -> ModelRunner:
    """For 8 sequences. blocks: of the cache, None for all that they may need; tokens: of a pass."""
    made = ModelRunner(model, max_num_seqs=8, max_model_len=model.max_model_len, max_num_batched_tokens=tokens, **given)
    if blocks is not None:
        made.num_blocks = min(blocks, made.num_blocks)
    return made
