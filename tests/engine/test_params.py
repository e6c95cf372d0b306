"""SamplingParams: what is refused, in which words, and what stays as it was given."""

import math
from typing import Any

import numpy as np
import pytest

from onewave.base.errors import InvalidArgumentError
from onewave.engine.params import SamplingParams

# Parameter, what the error allows, and values that it refuses.
REFUSED: list[tuple[str, str, list[Any]]] = [
    # 3.5e38 would be infinity in float32.
    ("temperature", "a finite number from 0", [-0.1, math.nan, math.inf, None, True, "hot", 10**400]),
    ("temperature", "a finite number from 0, in float32", [3.5e38]),
    ("top_p", "a number above 0, up to 1", [0.0, 1.01, math.nan]),
    ("top_k", "a whole number from -1", [-2, 1.5, True, 2**63, 10**5000]),
    ("min_p", "a number from 0 to 1", [-0.1, 1.1]),
    ("repetition_penalty", "a finite number above 0", [0.0, -1.0, math.inf, 1e-46, 1e39]),
    ("presence_penalty", "a number from -2 to 2", [2.1]),
    ("frequency_penalty", "a number from -2 to 2", [-2.1, None]),
    ("n", "a whole number from 1 to 16384", [0, 2.0, 2**70]),
    ("max_tokens", "a whole number from 1 to 9223372036854775807, or None", [0, -5, True, 2**63]),
    ("min_tokens", "a whole number from 0", [-1, None, 2**70]),
    ("min_tokens", "0..max_tokens=16", [17]),
    ("seed", "a whole number from -1", [-2, 2**64, 1.0]),
    ("stop", "none of them empty", ["", ["a", ""]]),
    ("stop", "a string or a list of strings", [["a", 3], 3, 10**5000]),
    ("stop", "Unicode text that UTF-8 can write", ["a\udcff"]),
    ("stop_token_ids", "a whole number from 0", [[-1], ["2"], [2**63]]),
    ("stop_token_ids", "a list of token ids", [2, "2"]),
    ("logit_bias", "a whole number from 0", [{-1: 1.0}, {"a": 1.0}, {2**63: 1.0}, {10**5000: 1.0}, {"9" * 5000: 1.0}]),
    ("logit_bias", "a finite number", [{1: math.nan}, {1: math.inf}, {1: 1e300}, {1: 10**400}]),
    ("logit_bias", "once", [{"5": 1.0, "05": 2.0}]),
    ("logit_bias", "a mapping from token id", [[1], list(range(1000))]),
    ("logprobs", "a whole number from -1", [-2, True, 2**63]),
    ("prompt_logprobs", "a whole number from -1", [1.5]),
    ("ignore_eos", "True or False", [1, 10**5000]),
    ("skip_special_tokens", "True or False", [None]),
]


@pytest.mark.parametrize(("name", "allowed", "values"), REFUSED, ids=[f"{name}: {said}" for name, said, _ in REFUSED])
def test_a_value_out_of_range_is_refused_in_one_line_that_says_the_range(
    name: str, allowed: str, values: list[Any]
) -> None:
    for value in values:
        with pytest.raises(InvalidArgumentError) as caught:
            SamplingParams(**{name: value})
        message = str(caught.value)
        assert message.startswith(name)
        assert allowed in message
        assert "\n" not in message
        assert len(message) < 300


def test_unknown_parameters_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)
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
        logit_bias={"7": 1, 8: 2.5},
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
