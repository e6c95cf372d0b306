"""A call that a model writes as a JSON object, read letter by letter: its name, then its arguments as they come."""

import json
from typing import Any

_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class Scanner:
    """Reads a call letter by letter.

    name: once it is known. ended: after the call's last letter. failed: at the first letter that no call has.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.ended = self.failed = False
        self._raw: list[str] = []
        self._depth, self._escaped = 0, False
        self._arguments: list[str] = []

    def push(self, text: str) -> int:
        """Read on; return how many letters belong to the call."""
        for at, letter in enumerate(text):
            self._step(letter)
            if self.ended or self.failed:
                return at + 1
        return len(text)

    def take(self) -> str:
        """The text of the arguments, as JSON, that came since the last call of this."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _step(self, letter: str) -> None:
        raise NotImplementedError


class CallScanner(Scanner):
    """Reads `{"name": ..., "arguments": {...}}`; `parameters` is the same, further keys are passed over, and so are
    these when they come again. A call that has no name fails at its end."""

    def __init__(self) -> None:
        super().__init__()
        self._expects = "{"
        self._key, self._in_string = "", False
        self._found = self._arguments_alone = False

    @classmethod
    def of_arguments(cls, name: str) -> "CallScanner":
        """A scanner of the arguments alone, where the name came before them."""
        scanner = cls()
        scanner.name, scanner._key = name, _ARGUMENTS[0]
        scanner._expects, scanner._arguments_alone = "begin", True
        return scanner

    def _step(self, letter: str) -> None:
        if self._expects == "value":
            self._step_value(letter)
        elif letter in _SPACE:
            return
        elif self._expects == "begin":
            self._begin_value(letter)
        elif letter == "}" and self._expects in ("key", ","):
            self._end()
        elif letter == {"{": "{", "key": '"', ":": ":", ",": ","}[self._expects]:
            self._expects = {"{": "key", '"': "value", ":": "begin", ",": "key"}[letter]
            if letter == '"':
                self._key, self._raw, self._in_string = "", ['"'], True
        else:
            self.failed = True

    def _begin_value(self, letter: str) -> None:
        self._expects, self._raw = "value", []
        self.failed = letter in ":,]}"
        if not self.failed:
            self._step_value(letter)

    def _step_value(self, letter: str) -> None:
        if not self._in_string and not self._depth and self._raw and letter in ",}" + _SPACE:
            self._end_value()  # a number, true, false, null
            if not self.failed:
                self._step(letter)
            return
        self._raw.append(letter)
        if self._key in _ARGUMENTS and not self._found and self._raw[0] == "{":
            self._arguments.append(letter)
        if self._in_string:
            if self._escaped or letter == "\\":
                self._escaped = not self._escaped
            elif letter == '"':
                self._in_string = False
                self._end_if_whole()
        elif letter == '"':
            self._in_string = True
        elif letter in "[{":
            self._depth += 1
        elif letter in "]}":
            self._depth -= 1
            self._end_if_whole()

    def _end_if_whole(self) -> None:
        if not self._depth:
            self._end_value()

    def _end_value(self) -> None:
        try:
            value: Any = json.loads("".join(self._raw))
        except (ValueError, RecursionError):
            self.failed = True
            return
        if not self._key:
            self._expects, self._key = ":", str(value)
            self.failed = not value
            return
        if self._key == "name" and self.name is None:
            self.name = value if isinstance(value, str) else None
            self.failed = not self.name
        elif self._key in _ARGUMENTS and not self._found:
            self._found = True
            if isinstance(value, str):  # JSON within JSON
                self._arguments.append(value or "{}")
            elif not isinstance(value, dict):
                self._arguments.append("{}" if value is None else json.dumps(value, ensure_ascii=False))
            self.ended = self._arguments_alone
        self._expects, self._key = ",", ""

    def _end(self) -> None:
        self.ended, self.failed = True, self.name is None
        if not self._found:
            self._arguments.append("{}")
