"""The forms in which prompts and parameters may come, made one."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import numpy as np

from onewave.base.errors import InvalidArgumentError, UnsupportedError, shown
from onewave.engine.arguments import is_whole, items
from onewave.engine.params import SamplingParams
from onewave.ops.sampling import MAX_VOCAB

_FORMS = 'text, a list of token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list of these'


class PromptDict(TypedDict, total=False):
    """vLLM's dictionaries. With both, the ids are what is run, and the text is what outputs show."""

    prompt: str
    prompt_token_ids: Sequence[int]


PromptLike = str | Sequence[int] | PromptDict
ParamsLike = SamplingParams | Mapping[str, Any]


@dataclass(frozen=True)
class RawPrompt:
    """Text that is yet to be encoded (token_ids None), or token ids with or without the text they stand for."""

    text: str | None
    token_ids: tuple[int, ...] | None


def parse_prompts(prompts: PromptLike | Sequence[PromptLike]) -> list[RawPrompt]:
    """Take one prompt or several. Raises InvalidArgumentError for anything else, nothing at all included."""
    given: object = prompts
    if isinstance(given, (str, Mapping)):
        return [_one(cast("object", given))]
    found = items("prompts", given, _FORMS)
    if not found:
        raise InvalidArgumentError("prompts", got="an empty list", allowed=_FORMS)
    return [_one(found)] if is_whole(found[0]) else [_one(item) for item in found]


def parse_params(params: ParamsLike | Sequence[ParamsLike] | None, count: int) -> list[SamplingParams]:
    """One SamplingParams (or mapping) for all, or one for each of `count` prompts. Raises InvalidArgumentError."""
    given: object = params
    if given is None:
        return [SamplingParams()] * count
    if isinstance(given, (SamplingParams, Mapping)):
        return [_params(cast("object", given))] * count
    found = items("sampling_params", given, "SamplingParams, a mapping, or a list of these")
    if len(found) != count:
        raise InvalidArgumentError("sampling_params", got=f"a list of {len(found)}", allowed=f"one, or {count}")
    return [_params(item) for item in found]


def check_params(params: SamplingParams, *, vocab_size: int, has_tokenizer: bool) -> None:
    """Refuse what this model can't honour. Raises InvalidArgumentError."""
    for name, ids in (("logit_bias token id", params.logit_bias or ()), ("stop_token_ids", params.stop_ids)):
        for token_id in ids:
            if token_id >= vocab_size:
                raise InvalidArgumentError(name, got=str(token_id), allowed=f"0..{vocab_size - 1} (the vocabulary)")
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > vocab_size:
            raise InvalidArgumentError(name, got=str(count), allowed=f"-1..{vocab_size} (the vocabulary)")
    if not params.is_greedy and vocab_size > MAX_VOCAB:
        raise UnsupportedError(
            f"temperature {params.temperature}",
            got=f"a vocabulary of {vocab_size} tokens",
            allowed=f"up to {MAX_VOCAB}",
            next="Use temperature 0.",
        )
    if params.stop_strings and not has_tokenizer:
        raise InvalidArgumentError(
            "stop", got=shown(params.stop), next="The model has no tokenizer; use stop_token_ids."
        )


def pack_ids(ids: Sequence[int], *, vocab_size: int, tokenizer_size: int) -> array[int]:
    """Pack a prompt's ids in int32, which the engine's thread hashes and copies without a look at each.

    Raises InvalidArgumentError for a prompt without ids, and for an id beyond the vocabulary."""
    if not ids:
        raise InvalidArgumentError("prompt", got="empty (no tokens)", next="Give some text, or token ids.")
    with suppress(struct.error):  # of an id beyond 32 bits
        packed = array("i", struct.pack(f"{len(ids)}i", *ids))  # in half the time of the array's own way
        words = np.frombuffer(packed, dtype=np.uint32)  # in which an id below 0 is a large one
        if words.item(words.argmax()) < vocab_size:
            return packed
    token_id = next(each for each in ids if not 0 <= each < vocab_size)
    larger = f"The tokenizer ({tokenizer_size} tokens) is larger than the model; name the model's own."
    advice = larger if 0 <= token_id < tokenizer_size else None
    raise InvalidArgumentError("prompt token id", got=shown(token_id), allowed=f"0..{vocab_size - 1}", next=advice)


def _one(prompt: object) -> RawPrompt:
    if isinstance(prompt, str):
        return RawPrompt(prompt, None)
    if not isinstance(prompt, Mapping):
        return RawPrompt(None, _token_ids(prompt))
    fields = cast("Mapping[object, object]", prompt)
    unknown = [key for key in fields if key not in ("prompt", "prompt_token_ids")]
    if unknown:
        raise InvalidArgumentError("prompt", got=f"unknown key {shown(unknown[0])}", allowed="prompt, prompt_token_ids")
    text, ids = fields.get("prompt"), fields.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise InvalidArgumentError("prompt", got=type(text).__name__, allowed="text")
    if text is None and ids is None:
        raise InvalidArgumentError("prompt", got="neither prompt nor prompt_token_ids", allowed=_FORMS)
    return RawPrompt(text, None if ids is None else _token_ids(ids))


def _token_ids(ids: object) -> tuple[int, ...]:
    found = items("prompt", ids, _FORMS)
    if set(map(type, found)) == {int}:  # nearly always, and a prompt may be long
        return tuple(cast("list[int]", found))
    for token_id in found:
        if not is_whole(token_id):
            raise InvalidArgumentError("prompt", got=f"a list with {shown(token_id)}", allowed=_FORMS)
    return tuple(int(cast("int", token_id)) for token_id in found)


def _params(value: object) -> SamplingParams:
    if isinstance(value, SamplingParams):
        return value
    if isinstance(value, Mapping):
        return SamplingParams.from_dict(cast("Mapping[str, Any]", value))
    raise InvalidArgumentError("sampling_params", got=type(value).__name__, allowed="SamplingParams or a mapping")
