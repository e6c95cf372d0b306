"""The fields that say what form an answer has, and which tools it may call: OpenAI's, and vLLM's beyond."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from onewave.base.errors import InvalidArgumentError
from onewave.engine.grammar.params import StructuredOutputsParams
from onewave.server.answers.plan import Function
from onewave.server.answers.tools import Tools
from onewave.server.protocol.base import Strict, Unread

_Text = Annotated[str, Field(min_length=1)]
_Schema = dict[str, Any]


class JsonSchema(Strict):
    """A schema and its name. strict: it is kept to either way."""

    name: Annotated[str, Field(max_length=64)] | None = None
    description: str | None = None
    schema_: Annotated[_Schema, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Strict):
    """json_schema: with that type alone."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict):
    """Exactly one of json, regex, choice, grammar and json_object, as in SamplingParams."""

    json_: Annotated[_Schema | str | None, Field(alias="json")] = None
    regex: _Text | None = None
    choice: Annotated[list[_Text], Field(min_length=1)] | None = None
    grammar: _Text | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: _Text | None = None


class FormFields(Unread):
    """Fields for the answer's form, of any request that generates."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _Schema | str | None = None
    guided_regex: _Text | None = None
    guided_choice: Annotated[list[_Text], Field(min_length=1)] | None = None
    guided_grammar: _Text | None = None
    guided_whitespace_pattern: _Text | None = None

    @property
    def form(self) -> StructuredOutputsParams | None:
        """The form that the answer's text must have. Raises InvalidArgumentError."""
        kinds = ("json", "regex", "choice", "grammar")
        guided = {kind: value for kind in kinds if (value := getattr(self, f"guided_{kind}")) is not None}
        found: list[dict[str, Any]] = [guided] if guided else []
        if self.guided_whitespace_pattern is not None:
            guided["whitespace_pattern"] = self.guided_whitespace_pattern
        if self.structured_outputs is not None:
            found.append(self.structured_outputs.model_dump(by_alias=True))
        asked = self.response_format
        if asked is not None and (asked.json_schema is None) == (asked.type == "json_schema"):
            allowed = "json_schema with type json_schema, and with no other"
            raise InvalidArgumentError("response_format", got=f"type {asked.type}", allowed=allowed)
        if asked is not None and asked.json_schema is not None:
            found.append({"json": asked.json_schema.schema_})
        elif asked is not None and asked.type == "json_object":
            found.append({"json_object": True})
        if len(found) > 1:
            allowed = "one of response_format, structured_outputs and the guided_ fields"
            raise InvalidArgumentError("response_format", got="several forms", allowed=allowed)
        return StructuredOutputsParams(**found[0]) if found else None


class FunctionSpec(Strict):
    """A function that the model may call. parameters: a JSON schema of an object. strict: calls keep to it."""

    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.-]+$")]
    description: str | None = None
    parameters: _Schema | None = None
    strict: bool | None = None

    @property
    def function(self) -> Function:
        """As plans take it."""
        return Function(self.name, self.parameters, self.description, strict=bool(self.strict))


class Tool(Strict):
    """A tool. There are functions alone."""

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Strict):
    """A function's name."""

    name: str


class NamedTool(Strict):
    """A tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Strict):
    """Tools of which the answer may call some, or has to (mode required)."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedChoice(Strict):
    """The same as a tool choice."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ToolFields(FormFields):
    """Fields of a request that may call tools."""

    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def asked_tools(self) -> Tools:
        """As plans take them. Raises InvalidArgumentError."""
        choice, allowed = self.tool_choice, None
        if isinstance(choice, AllowedChoice):
            allowed = [tool.function.name for tool in choice.allowed_tools.tools]
            choice = choice.allowed_tools.mode
        return Tools(
            [tool.function.function for tool in self.tools or ()],
            choice if isinstance(choice, str) else "auto",
            allowed=allowed,
            named=choice.function.name if isinstance(choice, NamedTool) else None,
            one_call=self.parallel_tool_calls is False,
        )


class CalledFunction(BaseModel):
    """A call that an earlier answer made."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str
    arguments: str | _Schema = "{}"


class EarlierCall(BaseModel):
    """The same, with its id."""

    model_config = ConfigDict(extra="allow", strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
