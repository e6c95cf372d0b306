"""The parameters of one request, checked when they are written down."""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

from onewave.base.errors import InvalidArgumentError, shown
from onewave.engine.arguments import flag, items, number, whole
from onewave.engine.grammar.params import StructuredOutputsParams

# Limits of float32, the dtype of logits and their factors; and the largest whole number that PyTorch holds.
_LARGEST, _SMALLEST, _MAX = 3.4028234663852886e38, 1.1754943508222875e-38, 2**63 - 1
_MAX_DIGITS = 20  # more than it has
_MAX_SAMPLES = 16384
# Beyond any logit, and still finite once a temperature has divided it.
_LARGEST_BIAS = 1e30
# Parameter -> lowest and highest value, and what is allowed beside.
_ALL_LOGPROBS = (-1, _MAX, " (-1: the whole vocabulary), or None")
_WHOLE: dict[str, tuple[int, int, str]] = {
    "n": (1, _MAX_SAMPLES, ""),
    "max_tokens": (1, _MAX, ", or None"),
    "min_tokens": (0, _MAX, ""),
    "top_k": (-1, _MAX, " (-1 and 0: off)"),
    "seed": (-1, 2**64 - 1, ", or None"),
    "logprobs": _ALL_LOGPROBS,
    "prompt_logprobs": _ALL_LOGPROBS,
}
# Parameter -> lowest and highest value, and what is allowed.
_NUMBERS: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, _LARGEST, "a finite number from 0, in float32"),
    "top_p": (math.ulp(0.0), 1.0, "a number above 0, up to 1"),
    "min_p": (0.0, 1.0, "a number from 0 to 1"),
    "repetition_penalty": (_SMALLEST, _LARGEST, "a finite number above 0, in float32"),
    "presence_penalty": (-2.0, 2.0, "a number from -2 to 2"),
    "frequency_penalty": (-2.0, 2.0, "a number from -2 to 2"),
}
# Below this a division by the temperature says nothing that argmax does not (vLLM's _SAMPLING_EPS).
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to turn logits into tokens and when to stop; names, defaults and semantics are vLLM's.

    n: samples per prompt, at most 16,384, each from its own random stream (0 up to n - 1 of the same seed).
    max_tokens: most tokens to generate; None: until max_model_len. min_tokens: nothing but max_tokens ends it before.
    temperature: 0 is greedy (the lowest id wins a tie). top_k: 0 or -1 is off. top_p, min_p: probabilities.
    repetition_penalty works on prompt and output tokens, presence_penalty and frequency_penalty on output tokens.
    logit_bias: token id -> number added to its logit; one beyond 1e30 counts as that.
    seed: 0 .. 2**64 - 1; the tokens depend on it and on the prompt alone. None (or -1): from LLM(seed=...) and the
    request's number.
    stop: strings that end the text, left out of it unless include_stop_str_in_output; control tokens' texts count as
    text, shown or not. stop_token_ids: ids that end it.
    ignore_eos: go on after the model's end-of-sequence token.
    logprobs: how many of the most likely tokens to report beside the sampled one (-1: all of the vocabulary), before
    bias, penalties and temperature. prompt_logprobs: the same for the prompt.
    detokenize: False leaves the text empty. skip_special_tokens: keep control tokens out of the text.
    structured_outputs: the form that the output has to take. It ends as soon as nothing may follow, min_tokens or not.

    `stop` and `stop_token_ids` become tuples, `logit_bias` a plain dict and `structured_outputs` what its name says.
    Raises InvalidArgumentError.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        made: dict[str, object] = {
            "logit_bias": _biases(self.logit_bias),
            "stop": _stops(self.stop),
            "stop_token_ids": _ids(self.stop_token_ids),
            "structured_outputs": StructuredOutputsParams.of(self.structured_outputs),
        }
        # Most have their default, which needs no look.
        given = {name for name, default in _DEFAULTS.items() if getattr(self, name) is not default}
        for name, (low, high, extra) in _WHOLE.items():
            if name in given and (getattr(self, name) is not None or not extra.endswith("None")):
                made[name] = whole(name, getattr(self, name), low, high, extra=extra)
        for name, (low, high, allowed) in _NUMBERS.items():
            if name in given:
                made[name] = number(name, getattr(self, name), low, high, allowed)
        for name, value in made.items():
            object.__setattr__(self, name, None if name == "seed" and value == -1 else value)
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            flag(name, getattr(self, name))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidArgumentError(
                "min_tokens", got=str(self.min_tokens), allowed=f"0..max_tokens={self.max_tokens}"
            )
        if self.stop and not self.detokenize:
            raise InvalidArgumentError("detokenize", got="False", allowed="True where stop strings are given")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Build from a mapping, as JSON gives it (logit_bias keys may be decimal strings).

        Raises InvalidArgumentError for a name that is not a parameter, too.
        """
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                hint = f"Did you mean {close[0]}?" if close else None
                raise InvalidArgumentError(
                    "unknown sampling parameter", got=shown(name), allowed=", ".join(known), next=hint
                )
        return cls(**values)

    @property
    def is_greedy(self) -> bool:
        """Whether the greedy (argmax) token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on the tokens seen so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed before a token is chosen, but for a form."""
        return bool(self.logit_bias) or self.min_tokens > 0 or self.has_penalties

    @property
    def form(self) -> StructuredOutputsParams | None:
        """`structured_outputs` as __post_init__ left it."""
        return cast("StructuredOutputsParams | None", self.structured_outputs)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as __post_init__ left it."""
        return cast("tuple[str, ...]", self.stop)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as __post_init__ left it."""
        return cast("tuple[int, ...]", self.stop_token_ids)


_DEFAULTS: dict[str, object] = {field.name: field.default for field in fields(SamplingParams)}


def _stops(value: object) -> tuple[str, ...]:
    allowed = "a string or a list of strings, none of them empty"
    if value is None:
        return ()
    found = [value] if isinstance(value, str) else items("stop", value, allowed)
    for item in found:
        if not isinstance(item, str) or not item:
            raise InvalidArgumentError("stop", got=shown(item), allowed=allowed)
        if any("\ud800" <= character <= "\udfff" for character in item):
            raise InvalidArgumentError("stop", got="a lone surrogate", allowed="Unicode text that UTF-8 can write")
    return tuple(cast("list[str]", found))


def _ids(value: object) -> tuple[int, ...]:
    name = "stop_token_ids"
    found = () if value is None else items(name, value, "a list of token ids")
    return tuple(whole(name, item, 0, _MAX, extra=" in a list") for item in found)


def _biases(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidArgumentError("logit_bias", got=shown(value), allowed="a mapping from token id to a finite number")
    biases: dict[int, float] = {}
    for key, bias in cast("Mapping[object, object]", value).items():
        written = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < _MAX_DIGITS
        token_id = whole("logit_bias token id", int(cast("str", key)) if written else key, 0, _MAX)
        finite = "a finite number, in float32"
        added = number(f"logit_bias[{token_id}]", bias, -_LARGEST, _LARGEST, finite)
        if token_id in biases:
            raise InvalidArgumentError("logit_bias", got=f"token id {token_id} twice", allowed="once")
        biases[token_id] = min(max(added, -_LARGEST_BIAS), _LARGEST_BIAS)
    return biases
