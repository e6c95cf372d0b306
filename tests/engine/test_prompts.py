"""The forms of prompts and parameters, and what is none of them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kit.refusals import refused
from onewave.base.errors import InvalidArgumentError
from onewave.engine.params import SamplingParams
from onewave.engine.prompts import RawPrompt, check_params, parse_params, parse_prompts


def test_every_form_of_a_prompt_is_understood() -> None:
    text, ids = RawPrompt("hi", None), RawPrompt(None, (1, 2))
    assert parse_prompts("hi") == [text]
    assert parse_prompts(["hi", "hi"]) == [text, text]
    assert parse_prompts([1, 2]) == [ids]
    assert parse_prompts(np.array([1, 2])) == [ids]
    assert parse_prompts(torch.tensor([1, 2])) == [ids]
    assert parse_prompts({"prompt_token_ids": torch.tensor([1, 2])}) == [ids]
    assert parse_prompts([[1, 2], (1, 2)]) == [ids, ids]
    assert parse_prompts({"prompt": "hi"}) == [text]
    assert parse_prompts({"prompt_token_ids": [1, 2]}) == [ids]
    assert parse_prompts({"prompt": "hi", "prompt_token_ids": [1, 2]}) == [RawPrompt("hi", (1, 2))]
    assert parse_prompts(["hi", [1, 2], {"prompt": "hi"}]) == [text, ids, text]


@pytest.mark.parametrize(
    "prompts",
    [
        None,
        3,
        b"hi",
        [],
        [1, "hi"],
        ["hi", 1],
        [True],
        [[1.5]],
        [["hi"]],
        {},
        {"text": "hi"},
        {"prompt": 3},
        [None],
        object(),
        np.array(5),
        {"prompt_token_ids": torch.tensor(3)},
        {"prompt_token_ids": torch.tensor([1, 2]).to_sparse()},
        torch.tensor([1, 2]).to_sparse(),
        torch.empty(2, dtype=torch.int64, device="meta"),
        SimpleNamespace(tolist=3),
    ],
)
def test_anything_else_is_refused_in_one_line(prompts: Any) -> None:
    with refused(InvalidArgumentError, "prompt"):
        parse_prompts(prompts)


def test_an_error_shows_the_beginning_of_a_huge_value() -> None:
    for prompts in ([1, "x" * 500], [[1, "x" * 500]], {"x" * 500: 1}):
        with pytest.raises(InvalidArgumentError, match=r"'x{199}\.\.\.; allowed"):
            parse_prompts(prompts)
    with pytest.raises(InvalidArgumentError, match="a list with a number of thousands of digits"):
        parse_prompts([1, [10**5000]])


def test_parameters_come_once_or_once_a_prompt() -> None:
    one = SamplingParams(n=2)
    assert parse_params(None, 2) == [SamplingParams()] * 2
    assert parse_params(one, 2) == [one, one]
    assert parse_params({"n": 2}, 1) == [one]
    assert parse_params([one, {"n": 2}], 2) == [one, one]
    for wrong in ([one], 3, "hot", [one, None]):
        with pytest.raises(InvalidArgumentError, match="sampling_params"):
            parse_params(wrong, 2)


def test_what_the_model_can_not_honour_is_refused() -> None:
    for params, name in (
        (SamplingParams(logit_bias={50: 1.0}), "logit_bias"),
        (SamplingParams(stop_token_ids=[50]), "stop_token_ids"),
        (SamplingParams(logprobs=51), "logprobs"),
        (SamplingParams(prompt_logprobs=51), "prompt_logprobs"),
    ):
        with pytest.raises(InvalidArgumentError, match=name):
            check_params(params, vocab_size=50, has_tokenizer=True)
    with pytest.raises(InvalidArgumentError, match=r"stop: .* no tokenizer"):
        check_params(SamplingParams(stop="a"), vocab_size=50, has_tokenizer=False)
    check_params(SamplingParams(logprobs=50, top_k=10**6), vocab_size=50, has_tokenizer=False)
