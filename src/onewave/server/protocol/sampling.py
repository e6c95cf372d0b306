"""The fields that say how tokens are sampled and when they end: OpenAI's, and vLLM's beyond."""

from typing import Annotated, Any

from pydantic import Field

from onewave.base.errors import InvalidArgumentError
from onewave.engine.params import SamplingParams
from onewave.server.protocol.base import Generating, StreamOptions
from onewave.server.protocol.forms import FormFields

MAX_TOKEN_ID = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
MAX_SAMPLES = 128
_MAX_STOPS = 64
# Fields that go to SamplingParams under their own names when they are given, beside those of all APIs.
_SAME = (
    "n", "min_p", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "skip_special_tokens", "include_stop_str_in_output", "prompt_logprobs",
)  # fmt: skip


class SamplingFields(FormFields, Generating):
    """Sampling fields of any request that generates, by OpenAI's older APIs."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=_MAX_STOPS)]
        | None
    ) = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream's last chunk says the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_in_chunks(self) -> bool:
        """Whether every chunk says it."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling_params(self, *, max_tokens: int | None, logprobs: int | None, **more: Any) -> SamplingParams:
        """SamplingParams of these fields. Raises InvalidArgumentError."""
        if self.stream_options is not None and not self.stream:
            raise InvalidArgumentError("stream_options", got="given without stream", allowed="with stream=true")
        given: dict[str, Any] = {**self.given(*_SAME), "structured_outputs": self.form, **more}
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)
