"""Models and fields that bodies have in common."""

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

TokenLimit = Annotated[int, Field(ge=1, le=2**31 - 1)]


class Strict(BaseModel):
    """A body whose fields are all known: one that is not might change the answer, and is refused by name.

    An unknown field that is null is as good as absent. Numbers are numbers: "1" is no 1.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        fields = cast("dict[Any, Any]", given)
        return {name: value for name, value in fields.items() if value is not None or name in cls.model_fields}


class SentBack(BaseModel):
    """A part of an earlier answer that a client may send back unchanged: fields that are not read are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)


class Unread(Strict):
    """Fields of OpenAI's that change no answer here: read and left."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class Generating(Strict):
    """Fields that mean the same whatever the API. What is null has SamplingParams' default."""

    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None

    def given(self, *more: str) -> dict[str, Any]:
        """The fields that are SamplingParams' of the same name, where they are given. more: names of others."""
        names = ("temperature", "top_p", "top_k", *more)
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        return found if self.seed is None else {**found, "seed": self.seed % 2**64}


class ErrorBody(BaseModel):
    """The error of a failed request. param: the field to blame."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every answer that is no success."""

    error: ErrorBody


class PromptTokensDetails(BaseModel):
    """cached_tokens: prompt tokens whose keys and values were there already."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class StreamOptions(Strict):
    """include_usage: a last chunk without choices says the usage. continuous_usage_stats: every chunk says it."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None


class Model(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "onewave"
    root: str
    max_model_len: int


class Models(BaseModel):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[Model]


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request is at fault"},
    "5XX": {"model": ErrorAnswer, "description": "The server is"},
}
"""For a route's `responses`."""


def whole_or_streamed(answer: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """For the `responses` of a route whose answer may also be a stream of events."""
    return {200: {"model": answer, "content": {"text/event-stream": {}}}, **ERRORS}
