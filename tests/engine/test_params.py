"""SamplingParams: what is refused, in which words, and what stays as it was given."""

import math
from typing import Any

import numpy as np
import pytest

from onewave.base.errors import InvalidArgumentError
from onewave.engine.params import SamplingParams

REFUSED: list[tuple[str, Any, str]] = [
    ("temperature", -0.1, "a finite number from 0"),
    ("temperature", math.nan, "a finite number from 0"),
    ("temperature", math.inf, "a finite number from 0"),
    ("temperature", None, "a finite number from 0"),
    ("temperature", True, "a finite number from 0"),
    ("temperature", "hot", "a finite number from 0"),
    ("top_p", 0.0, "a number above 0, up to 1"),
    ("top_p", 1.01, "a number above 0, up to 1"),
    ("top_p", math.nan, "a number above 0, up to 1"),
    ("top_k", -2, "a whole number from -1"),
    ("top_k", 1.5, "a whole number from -1"),
    ("top_k", True, "a whole number from -1"),
    ("min_p", -0.1, "a number from 0 to 1"),
    ("min_p", 1.1, "a number from 0 to 1"),
    ("repetition_penalty", 0.0, "a finite number above 0"),
    ("repetition_penalty", -1.0, "a finite number above 0"),
    ("repetition_penalty", math.inf, "a finite number above 0"),
    ("repetition_penalty", 1e-46, "a finite number above 0"),
    ("repetition_penalty", 1e39, "a finite number above 0"),
    ("temperature", 10**400, "a finite number from 0"),
    ("temperature", 3.5e38, "a finite number from 0, in float32"),  # which would be infinity there
    ("top_k", 2**63, "a whole number from -1"),
    ("top_k", 10**5000, "a whole number from -1"),
    ("n", 2**70, "a whole number from 1 to 16384"),
    ("max_tokens", 2**63, "a whole number from 1"),
    ("min_tokens", 2**70, "a whole number from 0"),
    ("stop_token_ids", [2**63], "a whole number from 0"),
    ("logprobs", 2**63, "a whole number from -1"),
    ("logit_bias", {"9" * 5000: 1.0}, "a whole number from 0"),
    ("logit_bias", {10**5000: 1.0}, "a whole number from 0"),
    ("logit_bias", {1: 1e300}, "a finite number"),
    ("logit_bias", {"5": 1.0, "05": 2.0}, "once"),
    ("logit_bias", {1: 10**400}, "a finite number"),
    ("logit_bias", {2**63: 1.0}, "a whole number from 0"),
    ("presence_penalty", 2.1, "a number from -2 to 2"),
    ("frequency_penalty", -2.1, "a number from -2 to 2"),
    ("frequency_penalty", None, "a number from -2 to 2"),
    ("n", 0, "a whole number from 1"),
    ("n", 2.0, "a whole number from 1"),
    ("max_tokens", 0, "a whole number from 1 to 9223372036854775807, or None"),
    ("max_tokens", -5, "a whole number from 1 to 9223372036854775807, or None"),
    ("max_tokens", True, "a whole number from 1 to 9223372036854775807, or None"),
    ("min_tokens", -1, "a whole number from 0"),
    ("min_tokens", None, "a whole number from 0"),
    ("min_tokens", 17, "0..max_tokens=16"),
    ("seed", -2, "a whole number from -1"),
    ("seed", 2**64, "a whole number from -1"),
    ("seed", 1.0, "a whole number from -1"),
    ("stop", "", "none of them empty"),
    ("stop", ["a", ""], "none of them empty"),
    ("stop", ["a", 3], "a string or a list of strings"),
    ("stop", 3, "a string or a list of strings"),
    ("stop", "a\udcff", "Unicode text that UTF-8 can write"),
    ("stop_token_ids", [-1], "a whole number from 0"),
    ("stop_token_ids", ["2"], "a whole number from 0"),
    ("stop_token_ids", 2, "a list of token ids"),
    ("stop_token_ids", "2", "a list of token ids"),
    ("logit_bias", {-1: 1.0}, "a whole number from 0"),
    ("logit_bias", {1: math.nan}, "a finite number"),
    ("logit_bias", {1: math.inf}, "a finite number"),
    ("logit_bias", {"a": 1.0}, "a whole number from 0"),
    ("logit_bias", [1], "a mapping from token id"),
    ("logprobs", -2, "a whole number from -1"),
    ("logprobs", True, "a whole number from -1"),
    ("prompt_logprobs", 1.5, "a whole number from -1"),
    ("ignore_eos", 1, "True or False"),
    ("skip_special_tokens", None, "True or False"),
    ("ignore_eos", 10**5000, "True or False"),
    ("stop", 10**5000, "a string or a list of strings"),
    ("logit_bias", list(range(1000)), "a mapping from token id"),
]


# Named here: not every number turns into text.
IDS = [f"{name}-{number}" for number, (name, _, _) in enumerate(REFUSED)]


@pytest.mark.parametrize(("name", "value", "allowed"), REFUSED, ids=IDS)
def test_a_value_out_of_range_is_refused_in_one_line_that_says_the_range(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(name)
    assert allowed in message
    assert "\n" not in message
    assert len(message) < 300


def test_unknown_parameters_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg] (that is the point)
    with pytest.raises(
        InvalidArgumentError, match=r"unknown sampling parameter: 'temprature'.*Did you mean temperature\?"
    ):
        SamplingParams.from_dict({"temprature": 1.0})
    with pytest.raises(InvalidArgumentError, match="unknown sampling parameter: 'best_of'"):
        SamplingParams.from_dict({"best_of": 3})


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidArgumentError, match="detokenize: False"):
        SamplingParams(stop="a", detokenize=False)


def test_the_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.max_tokens, params.temperature, params.top_p, params.top_k) == (1, 16, 1.0, 1.0, 0)
    assert params.stop_strings == params.stop_ids == ()
    assert not params.is_greedy
    assert not params.has_penalties


def test_the_forms_of_a_value_become_one() -> None:
    params = SamplingParams(
        stop="a",
        stop_token_ids=np.array([1, 2]),
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        seed=-1,
        logit_bias={"7": 1, 8: 2.5},  # type: ignore[dict-item] (JSON has string keys only)
    )
    assert params.stop_strings == ("a",)
    assert params.stop_ids == (1, 2)
    assert params.logit_bias == {7: 1.0, 8: 2.5}
    assert SamplingParams(logit_bias={1: -3e38, 2: 3e38}).logit_bias == {1: -1e30, 2: 1e30}
    assert params.seed is None
    assert type(params.top_k) is int
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams(temperature=1e-6).is_greedy
    assert SamplingParams(frequency_penalty=0.1).has_penalties
