"""The sampling options of `generate` and `chat`: SamplingParams' fields, under their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from onewave.base.errors import InvalidArgumentError, shown
from onewave.base.json_files import parse_json

if TYPE_CHECKING:
    from onewave.engine.params import SamplingParams

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
_HEX_DIGITS = {"u": 4, "U": 8}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The sampling options that both commands take."""

    max_tokens: Annotated[
        int | None, Option("--max-tokens", "-n", help="Most tokens of an answer. Default: as many as fit.")
    ] = None
    min_tokens: Annotated[int, Option("--min-tokens", help="Nothing but --max-tokens ends it before.")] = 0
    temperature: Annotated[float, Option("--temperature", help="0 takes the greedy token every time.")] = 0.0
    top_k: Annotated[int, Option("--top-k", help="Sample from the k most likely tokens; 0 or -1: from all.")] = 0
    top_p: Annotated[float, Option("--top-p", help="Sample from the most likely tokens of this total probability.")] = (
        1.0
    )
    min_p: Annotated[float, Option("--min-p", help="Leave out tokens below this share of the most likely one's.")] = 0.0
    repetition_penalty: Annotated[
        float, Option("--repetition-penalty", help="Above 1: against tokens that were seen.")
    ] = 1.0
    presence_penalty: Annotated[
        float, Option("--presence-penalty", help="Against tokens generated before, -2 to 2.")
    ] = 0.0
    frequency_penalty: Annotated[float, Option("--frequency-penalty", help="The same, times how often, -2 to 2.")] = 0.0
    logit_bias: Annotated[
        list[str] | None,
        Option("--logit-bias", metavar="ID=BIAS", help="Add to a token's logit: 15=-100. May be given several times."),
    ] = None
    seed: Annotated[int | None, Option("--seed", help="Of the random draws; the same seed gives the same tokens.")] = (
        None
    )
    stop: Annotated[
        list[str] | None,
        Option("--stop", help=r"End at this text; \n, \t, \r, \\ and \uXXXX are escapes. May be given several times."),
    ] = None
    stop_token_ids: Annotated[
        list[str] | None, Option("--stop-token-ids", metavar="ID,ID,...", help="End at one of these tokens.")
    ] = None
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Go on after the end-of-text token.")] = False
    skip_special_tokens: Annotated[
        bool, Option("--skip-special-tokens/--no-skip-special-tokens", help="Keep control tokens out of the text.")
    ] = True
    include_stop_str_in_output: Annotated[
        bool, Option("--include-stop-str-in-output", help="Keep what ended it in the text.")
    ] = False
    structured_outputs: Annotated[
        str | None,
        Option("--structured-outputs", metavar="JSON", help='The form of the output, as {"json": SCHEMA}.'),
    ] = None

    def params(self) -> SamplingParams:
        """SamplingParams of the options. Raises InvalidArgumentError."""
        from onewave.engine.params import SamplingParams

        given: dict[str, Any] = asdict(self)
        given["stop"] = [unescape(text) for text in self.stop or ()]
        given["logit_bias"] = _biases(self.logit_bias) if self.logit_bias else None
        given["stop_token_ids"] = _token_ids(self.stop_token_ids or ())
        if self.structured_outputs is not None:
            allowed = 'a JSON object, as {"regex": "[0-9]+"}'
            given["structured_outputs"] = parse_json(self.structured_outputs, "--structured-outputs", allowed=allowed)
        return SamplingParams(**given)


@dataclass(frozen=True, kw_only=True)
class GenerateSampling(Sampling):
    """The options that `generate` alone takes."""

    max_tokens: Annotated[int | None, Option("--max-tokens", "-n", help="Most tokens to generate for a prompt.")] = 128
    n: Annotated[int, Option("--n", help="Samples a prompt.")] = 1
    logprobs: Annotated[
        int | None, Option("--logprobs", help="Report this many likely tokens beside each one taken.")
    ] = None
    prompt_logprobs: Annotated[
        int | None, Option("--prompt-logprobs", help="The same for each token of the prompt.")
    ] = None
    detokenize: Annotated[
        bool, Option("--detokenize/--no-detokenize", help="Make text of the tokens; without, --json has the ids.")
    ] = True


def unescape(text: str) -> str:
    """A text whose backslashes begin escapes. Raises InvalidArgumentError for one that is unknown."""

    def character(match: re.Match[str]) -> str:
        kind, digits = match[1][:1], match[1][1:]
        if not digits and kind in _ESCAPES:
            return _ESCAPES[kind]
        if len(digits) == _HEX_DIGITS.get(kind) and int(digits, 16) <= 0x10FFFF:
            return chr(int(digits, 16))
        allowed = r"\n, \t, \r, \uXXXX, \UXXXXXXXX, and \\ for a backslash"
        raise InvalidArgumentError("--stop", got=shown(text), allowed=allowed)

    made = re.sub(r"\\(u[0-9a-fA-F]{0,4}|U[0-9a-fA-F]{0,8}|.|$)", character, text, flags=re.DOTALL)
    # JSON writes a character beyond U+FFFF as two escapes.
    return made.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def _biases(given: Sequence[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for text in given:
        token_id, _, bias = text.partition("=")
        try:
            number, value = int(token_id), float(bias)
        except ValueError:
            raise InvalidArgumentError("--logit-bias", got=shown(text), allowed="ID=BIAS, as 15=-100") from None
        if number in biases:
            raise InvalidArgumentError("--logit-bias", got=f"token id {number} twice", allowed="once")
        biases[number] = value
    return biases


def _token_ids(given: Sequence[str]) -> list[int]:
    try:
        return [int(part) for text in given for part in text.split(",")]
    except ValueError:
        got = shown(",".join(given))
        raise InvalidArgumentError("--stop-token-ids", got=got, allowed="token ids, as 2,13") from None
