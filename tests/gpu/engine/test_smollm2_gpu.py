"""A real model's 4-bit file on the wave: the CPU's greedy tokens but for ties, and the same beside batch-mates."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kit.models.smollm2 import GREEDY, PROMPTS, transformers_model
from kit.operands.on_gpu import GPU, ON_WAVE
from onewave import LLM, RequestOutput
from onewave.base.errors import OnewaveError

pytestmark = ON_WAVE
_WITH_LOGPROBS = replace(GREEDY, logprobs=0)


@pytest.fixture(scope="module")
def path(request: pytest.FixtureRequest) -> Path:
    try:
        return request.getfixturevalue("smollm2_path")
    except OnewaveError as error:
        pytest.skip(f"SmolLM2's file cannot be fetched: {error}")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, device="cuda", decode="wave", max_num_seqs=8, max_model_len=512) as model:
        yield model


@pytest.fixture(scope="module")
def together(llm: LLM) -> list[RequestOutput]:
    return llm.generate(PROMPTS, _WITH_LOGPROBS)


def logprobs(output: RequestOutput) -> list[float]:
    """The log-probability of each generated token."""
    answer = output.outputs[0]
    assert answer.logprobs is not None
    return [place[token].logprob for token, place in zip(answer.token_ids, answer.logprobs, strict=True)]


def test_64_greedy_tokens_of_ten_prompts_are_right_to_the_error_of_16_bits(
    path: Path, together: list[RequestOutput]
) -> None:
    """The CPU's are exactly those of float32 (tests/engine/test_smollm2.py)."""
    ours, plain, behind = [], [], []
    exact, rounded = transformers_model(path).to(GPU), transformers_model(path).to(GPU, torch.bfloat16)
    largest = 0.0
    for output in together:
        ids, answer = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(answer) == 64
        tokens, places = torch.tensor([ids + answer], device=GPU), slice(len(ids) - 1, -1)
        with torch.inference_mode():
            logits, of_16_bits = (model(tokens).logits[0, places].double() for model in (exact, rounded))
        chosen = torch.tensor(answer, device=GPU)[:, None]
        true = logits.log_softmax(-1).gather(1, chosen)[:, 0]
        ours.append(torch.tensor(logprobs(output), device=GPU, dtype=torch.float64) - true)
        plain.append(of_16_bits.log_softmax(-1).gather(1, chosen)[:, 0] - true)
        behind.append(logits.amax(-1) - logits.gather(1, chosen)[:, 0])
        largest = max(largest, float((of_16_bits - logits).abs().max()))
    # Two logits apart by less than both errors may change places.
    assert torch.cat(behind).max() <= 2 * largest
    assert torch.cat(ours).square().mean().sqrt() <= 1.1 * torch.cat(plain).square().mean().sqrt()


def test_batch_mates_change_no_bit(llm: LLM, together: list[RequestOutput]) -> None:
    for prompt, expected in zip(PROMPTS, together, strict=True):
        (alone,) = llm.generate([prompt], _WITH_LOGPROBS)
        assert alone.outputs[0].token_ids == expected.outputs[0].token_ids
        assert logprobs(alone) == logprobs(expected)
