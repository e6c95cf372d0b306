"""/v1/responses, without anything that a server would have to keep between two requests."""

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from onewave.base.errors import InvalidArgumentError
from onewave.engine.grammar.params import StructuredOutputsParams
from onewave.server.answers.tools import Tools
from onewave.server.protocol.base import Generating, SentBack, StreamOptions, Strict, TokenLimit, Unread
from onewave.server.protocol.forms import FunctionSpec


class TextContent(SentBack):
    """A part of a message. There is text alone."""

    type: Literal["input_text", "output_text"]
    text: str


class Message(SentBack):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[TextContent]


class FunctionCall(SentBack):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(SentBack):
    """The output of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[TextContent]


class ReasoningText(SentBack):
    """A thought's text."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(SentBack):
    """The model's thought before an earlier answer."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None


def _tag(item: Any) -> str:
    if not isinstance(item, dict):
        return str(getattr(item, "type", ""))
    return str(cast("dict[str, Any]", item).get("type", "message"))


InputItem = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _tag,
        custom_error_type="item_type",
        custom_error_message="An item should have type message, function_call, function_call_output or reasoning",
    ),
]


class FunctionTool(FunctionSpec):
    """A function that the model may call."""

    type: Literal["function"]


class NamedTool(Strict):
    """The function that has to be called."""

    type: Literal["function"]
    name: str


class AllowedTools(Strict):
    """Tools of which the answer may call some, or has to (mode required)."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class TextFormat(Strict):
    """schema, name: with json_schema alone."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=64)] | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Strict):
    """The form of the text. verbosity: for the chat template."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Strict):
    """effort: for the chat template. The rest is not read."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


def _not_number(given: Any) -> Any:
    """Refuse 0, which a Literal takes for False."""
    if isinstance(given, int | float) and not isinstance(given, bool):
        raise ValueError("Input should be a boolean")
    return given


class ResponsesRequest(Unread, Generating):
    """A conversation to answer. Fields that would need a memory of the server's are refused."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: TokenLimit | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    truncation: Literal["disabled"] | None = None
    background: Annotated[Literal[False] | None, BeforeValidator(_not_number)] = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def form(self) -> StructuredOutputsParams | None:
        """The form that the text must have. Raises InvalidArgumentError."""
        asked = self.text.format if self.text is not None else None
        if asked is None or asked.type == "text":
            return None
        if (asked.schema_ is None) == (asked.type == "json_schema"):
            raise InvalidArgumentError(
                "text.format", got=f"type {asked.type}", allowed="a schema with json_schema alone"
            )
        return StructuredOutputsParams(json=asked.schema_, json_object=True if asked.schema_ is None else None)

    @property
    def asked_tools(self) -> Tools:
        """As plans take them. Raises InvalidArgumentError."""
        choice, allowed = self.tool_choice, None
        if isinstance(choice, AllowedTools):
            choice, allowed = choice.mode, [tool.name for tool in choice.tools]
        return Tools(
            [tool.function for tool in self.tools or ()],
            choice if isinstance(choice, str) else "auto",
            allowed=allowed,
            named=choice.name if isinstance(choice, NamedTool) else None,
            one_call=self.parallel_tool_calls is False,
        )


class ResponseUsage(BaseModel):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseAnswer(BaseModel):
    """An answer. output: reasoning, messages and function calls, in the order in which they were written. The fields
    that say what was asked stand beside."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage
