"""A real model: SmolLM2-135M-Instruct from its Q4_1 file, against transformers on the same dequantised weights."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kit.models.smollm2 import GREEDY, PROMPTS, transformers_model
from onewave import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(smollm2_path, device="cpu") as model:
        yield model


@pytest.mark.slow
def test_64_greedy_tokens_for_ten_prompts_equal_transformers(llm: LLM, smollm2_path: Path) -> None:
    oracle = transformers_model(smollm2_path)
    outputs = llm.generate(PROMPTS, GREEDY)
    for output in outputs:
        ids = output.prompt_token_ids
        # Teacher-forced: if every token is the most likely after those before it, the greedy sequences are the same,
        # and one pass checks all 64. It takes a tenth of the time of generate().
        with torch.inference_mode():
            logits = oracle(torch.tensor([ids + output.outputs[0].token_ids])).logits[0, len(ids) - 1 : -1]
        assert output.outputs[0].token_ids == logits.argmax(-1).tolist()


def test_it_knows_the_capital_of_france(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    output = llm.chat(question, SamplingParams(temperature=0, max_tokens=32))[0]
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
