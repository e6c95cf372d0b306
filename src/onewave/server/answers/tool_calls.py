"""Tool calls in an answer's text, in the forms that models write them in.

Each reader gives what stands around the calls as content. A call's name comes first and whole, its arguments as they
are written. Text that begins like a call and turns out to be none is content; after a call's name has been given, what
can't be read ends the call.
"""

import json
import uuid
from collections.abc import Collection
from dataclasses import dataclass

from onewave.engine.text.stop_strings import num_held_back
from onewave.server.answers.json_scan import CallScanner, Scanner
from onewave.server.answers.pieces import CallPart, Piece
from onewave.server.answers.python_scan import PythonScanner

_SPACE = " \t\r\n"
_MAX_NAME = 256


@dataclass(frozen=True)
class CallForm:
    """How a model writes calls.

    begin, end: marks before and after calls. opening: what an answer begins with that may be a call without a mark.
    between: letters that may stand around calls and say nothing. names: whether a name may stand before its arguments,
    as `[TOOL_CALLS]name[ARGS]{...}`. pythonic: calls are Python's, not JSON. id_length: letters of a call's id.
    """

    begin: str
    end: str = ""
    opening: str = ""
    between: str = _SPACE
    names: bool = False
    pythonic: bool = False
    id_length: int = 24


FORMS = {
    "hermes": CallForm(begin="<tool_call>", end="</tool_call>"),
    "llama3_json": CallForm(begin="<|python_tag|>", opening="{", between=_SPACE + ";,"),
    "pythonic": CallForm("<|python_start|>", "<|python_end|>", opening="[", between=_SPACE + ",[]", pythonic=True),
    "mistral": CallForm(begin="[TOOL_CALLS]", between=_SPACE + ",[]", names=True, id_length=9),
    "mistral_args": CallForm(begin="[TOOL_CALLS]", between=_SPACE + ",[]", names=True, id_length=9),
}
_ARGS = "[ARGS]"


def form_of(chat_template: str | None) -> str | None:
    """The name of the form that a chat template shows its model; None where it shows none that is known."""
    template = chat_template or ""
    if "[TOOL_CALLS]" in template:
        return "mistral_args" if _ARGS in template else "mistral"
    if "<tool_call>" in template and "<function=" not in template:  # that is XML
        return "hermes"
    if "func_name1(params_name1=params_value1" in template:
        return "pythonic"
    if "python_tag" in template or '"parameters": dictionary of argument name' in template:
        return "llama3_json"
    return None


class ToolReader:
    """Reads calls in one form. tools: names that may be called; a call without marks of its own has to name one.
    one_call: all but the first are passed over.

    has_calls: whether there was one.
    """

    def __init__(self, form: CallForm, tools: Collection[str], *, one_call: bool = False) -> None:
        self._form, self._tools, self._one_call = form, tools, one_call
        self._held = ""
        # Whether only blank text came so far, and since the last call.
        self._at_start, self._after_call = True, False
        self._where = "content"
        self._read = {"content": self._read_content, "between": self._read_between, "call": self._read_call}
        self._scanner: Scanner | None = None
        # State of the call under way: the text before its name was given, and whether it was.
        self._unsure: str = ""
        self._given, self._marked = False, True
        self._num_calls = 0
        self._arguments = ""  # of the last call that was not passed over

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def push(self, text: str, *, last: bool) -> Piece:
        """The content and the calls that the text makes certain."""
        self._held += text
        piece = Piece()
        while True:
            before = (self._where, len(self._held))
            piece += self._read[self._where](last)
            if (self._where, len(self._held)) == before:
                break
        if last:
            piece += self._end()
        return piece

    def finish_reason(self, reason: str) -> str:
        """`tool_calls` for an answer that ended with a call whose arguments are whole."""
        return "tool_calls" if reason == "stop" and self.has_calls and _is_json(self._arguments) else reason

    def _read_content(self, last: bool) -> Piece:
        begun, form = self._held.lstrip(), self._form
        if self._after_call:  # line breaks around calls are no content
            self._held = begun
        if self._at_start and form.opening and begun.startswith(form.opening):
            self._where, self._unsure, self._marked = "between", self._held[: -len(begun)], False
            self._held = begun
            return Piece()
        content, mark, rest = self._held.partition(form.begin)
        if mark:
            self._where, self._unsure, self._marked = "between", mark, True
            self._at_start, self._held = False, rest
            content = content.rstrip()
            self._after_call = self._after_call and not content
            return Piece.of(content)
        held = 0 if last else num_held_back(content, (form.begin,))
        shown = content[: len(content) - held]
        shown = shown if last else shown.rstrip()
        if shown:
            self._at_start = self._after_call = False
        self._held = content[len(shown) :]
        return Piece.of(shown)

    def _read_between(self, last: bool) -> Piece:
        """Read the text before a call, or after the last one."""
        form = self._form
        rest = self._held.lstrip()
        self._unsure += self._held[: len(self._held) - len(rest)]
        self._held = rest
        if not rest:
            return Piece()
        for mark in filter(None, (form.end, form.begin)):
            if rest.startswith(mark):
                self._held = rest[len(mark) :]
                closed = mark == form.end
                self._where, self._unsure = ("content", "") if closed else ("between", self._unsure + mark)
                return Piece()
            if mark.startswith(rest) and not last:
                return Piece()
        if rest[0] in form.between:
            self._held, self._unsure = rest[1:], self._unsure + rest[0]
            return Piece()
        if form.names and rest[0] != "{":
            return self._read_name(last)
        if rest[0] == "{" or (form.pythonic and (rest[0].isalpha() or rest[0] == "_")):
            self._scanner = PythonScanner() if form.pythonic else CallScanner()
            self._where, self._given = "call", False
            return Piece()
        return self._give_up()

    def _read_name(self, last: bool) -> Piece:
        """`name[ARGS]{` or `name{`."""
        name, brace, _ = self._held.partition("{")
        if len(name) >= _MAX_NAME or not all(letter.isalnum() or letter in "_-.[]" for letter in name):
            return self._give_up()
        if not brace:
            return self._give_up() if last else Piece()
        self._held, self._unsure = self._held[len(name) :], self._unsure + name
        name = name.removesuffix(_ARGS).strip()
        if not name:
            return self._give_up()
        self._scanner = CallScanner.of_arguments(name)
        self._where, self._given = "call", False
        return Piece()

    def _read_call(self, last: bool) -> Piece:
        scanner = self._scanner
        assert scanner is not None
        count = scanner.push(self._held)
        read, self._held = self._held[:count], self._held[count:]
        self._unsure += read
        parts: tuple[CallPart, ...] = ()
        if not self._given and scanner.name is not None and (self._marked or scanner.name in self._tools):
            self._given = True
            call_id = uuid.uuid4().hex[: self._form.id_length]
            call_id = call_id if self._form.id_length < 24 else f"call_{call_id}"
            self._num_calls += 1
            parts = (CallPart(self._num_calls - 1, scanner.take(), scanner.name, call_id),)
        elif self._given and (more := scanner.take()):
            parts = (CallPart(self._num_calls - 1, more),)
        unknown = scanner.name is not None and not self._given
        if (scanner.failed or unknown) and not self._given:
            return self._give_up()
        if scanner.ended or scanner.failed:
            self._where, self._unsure = "between", ""
            self._at_start, self._after_call = False, True
        if self._one_call and self._num_calls > 1:
            return Piece()
        for part in parts:
            self._arguments = part.arguments if part.name is not None else self._arguments + part.arguments
        return Piece(parts)

    def _give_up(self) -> Piece:
        """It was no call: all of it is content, as is what follows up to a mark."""
        text, self._unsure, self._where, self._at_start = self._unsure, "", "content", False
        if self._after_call:
            before, mark, rest = text.partition(self._form.begin)
            text = before.lstrip(self._form.between) + mark + rest
        self._after_call = self._after_call and not text
        return Piece.of(text)

    def _end(self) -> Piece:
        """Return the piece that the last text leaves."""
        text = self._unsure + self._held
        if (self._where == "call" and self._given) or not text.strip(self._form.between):
            return Piece()
        return self._give_up() + Piece.of(self._held)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
