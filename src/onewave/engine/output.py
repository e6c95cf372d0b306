"""The results that a caller gets back, shaped like vLLM's."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort"]


class Logprob(NamedTuple):
    """One token's natural-log probability, its rank from 1 and its text ("" without a tokenizer)."""

    logprob: float
    rank: int
    decoded_token: str


# The sampled (or prompt) token first, then those of the highest probabilities, in descending order.
Logprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a prompt.

    text: all of it so far; delta: what it grew by since the previous output of the same stream. token_ids: everything
    generated, the token that ended it included. logprobs: one entry a token. finish_reason: "stop" (EOS, stop token or
    stop string), "length" (max_tokens or max_model_len), "abort" (the LLM was closed) or None while running.
    stop_reason: the stop string or stop token id; None for EOS.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[Logprobs] | None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    delta: str = ""

    def finished(self) -> bool:
        """Whether this sample has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Seconds. The four times are seconds since the epoch, taken from a clock that never runs backwards.

    first_scheduled_time: when its prompt first ran. time_to_first_token: from arrival. tokens_per_second: decode rate,
    all samples together, from their first tokens to the last one; None until a second token is there.
    """

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None
    num_prompt_tokens: int
    num_generation_tokens: int
    time_to_first_token: float | None
    tokens_per_second: float | None
    first_scheduled_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its samples.

    prompt_logprobs: one entry a prompt token, None for the first. num_cached_tokens: of the prompt, found in the KV
    cache; None until it runs.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int | None = None
