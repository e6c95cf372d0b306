"""Plans the form that a request wants of its answer: a thought, then text of some form, or tool calls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from onewave.base.errors import InvalidArgumentError, UnsupportedError
from onewave.engine.grammar.lark import json_rule, literal, rules_of
from onewave.engine.grammar.params import StructuredOutputsParams
from onewave.server.answers.pieces import AnswerReader, PlainReader
from onewave.server.answers.reasoning import Marks, ReasoningReader, Thought, thought_at
from onewave.server.answers.style import AnswerStyle
from onewave.server.answers.tool_calls import FORMS, ToolReader

_UNTIL = "/(?s:.*)/"


@dataclass(frozen=True)
class Function:
    """A tool. parameters: a JSON schema of its arguments. strict: calls keep to it even where none is forced."""

    name: str
    parameters: Mapping[str, Any] | None = None
    description: str | None = None
    strict: bool = False

    def described(self) -> dict[str, Any]:
        """As chat templates read it."""
        found = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {key: value for key, value in found.items() if value is not None}


@dataclass(frozen=True)
class Wanted:
    """form: of the text. functions: that may be called. must_call: an answer is nothing but calls; one_call: there is
    one at most."""

    form: StructuredOutputsParams | None = None
    functions: Sequence[Function] = ()
    must_call: bool = False
    one_call: bool = False


@dataclass(frozen=True)
class AnswerPlan:
    """form: what the engine holds the answer to. make_reader: reads a sample of it. shows_control: whether control
    tokens have to be in the text, as marks are among them."""

    form: StructuredOutputsParams | None
    make_reader: Callable[[], AnswerReader]
    shows_control: bool


def plan_answer(style: AnswerStyle, prompt: str, wanted: Wanted, begun: str = "") -> AnswerPlan:
    """Plan the answer to a prompt (its text). begun: the end of the prompt that is the answer's beginning.

    Raises InvalidArgumentError, UnsupportedError."""
    thought = Thought.CLOSED if style.marks is None else thought_at(prompt, begun, style.marks)
    form = _form_name(style, wanted)
    marks = [] if form is None else [FORMS[form].begin, FORMS[form].end]
    make: Callable[[], AnswerReader] = PlainReader
    if form is not None:
        names = [function.name for function in wanted.functions]
        make = partial(ToolReader, FORMS[form], names, one_call=wanted.one_call)
    if style.marks is not None:
        marks += style.marks
        make = partial(_with_thoughts, style.marks, make, thought)
    shows_control = any(mark in style.control_tokens for mark in marks)
    return AnswerPlan(_grammar(style, thought, wanted, form), make, shows_control)


def arguments_form(function: Function) -> StructuredOutputsParams:
    """The form of a function's arguments alone."""
    return StructuredOutputsParams(grammar=f"start: arguments\n{_arguments('arguments', function)}")


def _arguments(name: str, function: Function) -> str:
    return json_rule(name, {"type": "object", **(function.parameters or {})}, lenient=not function.strict)


def _with_thoughts(marks: Marks, make: Callable[[], AnswerReader], thought: Thought) -> AnswerReader:
    return ReasoningReader(marks, make(), thought)


def _form_name(style: AnswerStyle, wanted: Wanted) -> str | None:
    """The form in which calls are written; None without any."""
    if not wanted.functions:
        return None
    if wanted.must_call or (wanted.form is not None and style.form is not None):
        # Python's calls are not forced: their models know JSON's, too.
        return "llama3_json" if style.form == "pythonic" else style.form or "hermes"
    if style.form is None:
        raise UnsupportedError(
            "tools",
            got="a chat template whose form of tool calls is not known",
            next="Set tool_choice to required, or start the server with --tool-form.",
        )
    return style.form


def _grammar(style: AnswerStyle, at: Thought, wanted: Wanted, form: str | None) -> StructuredOutputsParams | None:
    rules = _Rules(style)
    strict = any(function.strict for function in wanted.functions)
    if wanted.must_call or (form is not None and wanted.form is not None):
        assert form is not None
        body = rules.calls(form, wanted)
        if wanted.form is not None and not wanted.must_call:
            body = f"({rules.text(wanted.form)} | {body})"
    elif strict:
        assert form is not None
        body = rules.text_and_calls(form, wanted)
    elif wanted.form is None:
        return None
    else:
        body = rules.text(wanted.form)
    thought = rules.thought(at)
    if not thought and not wanted.functions:
        return wanted.form
    return StructuredOutputsParams(grammar=f"start: {thought}{body}\n{''.join(rules.found)}")


class _Rules:
    """Rules of a grammar, in llguidance's dialect of Lark. found: those made so far."""

    def __init__(self, style: AnswerStyle) -> None:
        self._style = style
        self.found: list[str] = []

    def thought(self, at: Thought) -> str:
        """A thought and the line breaks after it, where there is room for one."""
        marks = self._style.marks
        if marks is None or at is Thought.CLOSED:
            return ""
        self._until("thought", marks.end)
        self.found.append("gap: /\\n{0,2}/\n")
        return "thought gap " if at is Thought.OPEN else f"({self._mark(marks.begin)} thought gap)? "

    def text(self, form: StructuredOutputsParams) -> str:
        try:
            self.found.append(rules_of(form, "text"))
        except ValueError as error:
            raise InvalidArgumentError("structured_outputs.grammar", got=str(error)) from error
        return "text"

    def calls(self, form: str, wanted: Wanted) -> str:
        """Calls and nothing else."""
        begin = self._mark(FORMS[form].begin)
        self._functions(form, wanted)
        between = {"hermes": '"\\n" ', "llama3_json": '"; "', "mistral": '", "', "mistral_args": ""}[form]
        calls = "call" if wanted.one_call else f"call ({between} call)*"
        return f'{begin} "[" {calls} "]"' if form == "mistral" else calls

    def text_and_calls(self, form: str, wanted: Wanted) -> str:
        """Any text, and calls among it that keep to their schemas."""
        if FORMS[form].opening:
            raise UnsupportedError(
                "tools: strict", got="a model whose calls begin with no mark", next="Set tool_choice to required."
            )
        begin, open_list, close_list = FORMS[form].begin, "", ""
        if form == "mistral":
            open_list, close_list = '"[" ', ' (", " call)* "]"'
        self._functions(form, wanted, marked=False)
        self._until("before", begin)
        self.found.append(f"rest: {_UNTIL}\n")
        return f"(before {open_list}call{close_list})* rest"

    def _functions(self, form: str, wanted: Wanted, *, marked: bool = True) -> None:
        """`call`, a call of any of the functions. marked: with the mark before it, where each call has one."""
        begin = f"{self._mark(FORMS[form].begin)} " if marked and form in ("hermes", "mistral_args") else ""
        for i, function in enumerate(wanted.functions):
            name = literal(function.name)
            if form == "hermes":
                opening, end = literal(f'\n{{"name": {name}, "arguments": '), f'"}}\\n" {self._mark(FORMS[form].end)}'
            elif form == "mistral_args":
                opening, end = f"{literal(function.name)} {self._mark('[ARGS]')}", ""
            else:
                key = "parameters" if form == "llama3_json" else "arguments"
                opening, end = literal(f'{{"name": {name}, "{key}": '), '"}"'
            self.found.append(f"call_{i}: {begin}{opening} arguments_{i} {end}\n")
            self.found.append(_arguments(f"arguments_{i}", function))
        self.found.append(f"call: {' | '.join(f'call_{i}' for i in range(len(wanted.functions)))}\n")

    def _mark(self, text: str) -> str:
        token_id = self._style.control_tokens.get(text)
        return literal(text) if token_id is None else f"<[{token_id}]>"

    def _until(self, name: str, mark: str) -> None:
        """A rule for any text up to a mark, and the mark."""
        if mark in self._style.control_tokens:
            self.found.append(f"{name}: {_UNTIL} {self._mark(mark)}\n")
        else:
            self.found.append(f"{name}[suffix={literal(mark)}]: {_UNTIL}\n")
