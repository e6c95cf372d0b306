"""/v1/messages, as Anthropic's clients send it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from onewave.engine.grammar.params import StructuredOutputsParams
from onewave.server.answers.plan import Function
from onewave.server.answers.tools import Tools
from onewave.server.protocol.base import Generating, SentBack, Strict, TokenLimit


class TextBlock(SentBack):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(SentBack):
    """The model's thought before an earlier answer."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(SentBack):
    """A call that an earlier answer made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(SentBack):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


InputBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class InputMessage(SentBack):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class CustomTool(SentBack):
    """A tool of the caller's own; tools that the server would have to run are refused."""

    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.-]+$")]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Strict):
    """name: with type tool alone."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(SentBack):
    """The chat template's switch, where it has one. A budget is not held to."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None


class OutputFormat(Strict):
    """The form of the answer's text."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    """effort is not read."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(SentBack):
    """Not read."""

    user_id: str | None = None


class CountRequest(Strict):
    """A conversation."""

    model: str
    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[CustomTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def form(self) -> StructuredOutputsParams | None:
        """The form that the text must have."""
        asked = self.output_config.format if self.output_config is not None else None
        return None if asked is None else StructuredOutputsParams(json=asked.schema_)

    @property
    def asked_tools(self) -> Tools:
        """As plans take them. Raises InvalidArgumentError."""
        choice = self.tool_choice
        kind = "auto" if choice is None else choice.type
        return Tools(
            [
                Function(tool.name, tool.input_schema, tool.description, strict=bool(tool.strict))
                for tool in self.tools or ()
            ],
            "required" if kind == "any" else "none" if kind == "none" else "auto",
            named=(choice.name or "") if choice is not None and kind == "tool" else None,
            one_call=choice is not None and bool(choice.disable_parallel_tool_use),
        )


class MessagesRequest(CountRequest, Generating):
    """A conversation to answer."""

    max_tokens: TokenLimit
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=64)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


class CountAnswer(BaseModel):
    """The tokens of a prompt."""

    input_tokens: int


class MessageUsage(BaseModel):
    """Tokens of a request: input_tokens are those that were not cached."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int


class MessageAnswer(BaseModel):
    """An answer. content: thinking, text and tool_use blocks, in the order in which they were written."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage
