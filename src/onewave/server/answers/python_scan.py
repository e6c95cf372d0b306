"""A call that a model writes as Python, read letter by letter: its name, then its arguments as JSON, one by one."""

import ast
import json
import re
from typing import Any

from onewave.server.answers.json_scan import Scanner

_ARGUMENT = re.compile(r"\s*([^\W\d]\w*)\s*=\s*(.+)", re.DOTALL)
_JSON_WORDS = {"true": True, "false": False, "null": None}


class PythonScanner(Scanner):
    """Reads `name(key=value, ...)`; values are Python's literals, or JSON's."""

    def __init__(self) -> None:
        super().__init__()
        self._quote = ""
        self._num_arguments = 0

    def _step_name(self, letter: str) -> None:
        if letter == "(" and self._raw:
            self.name, self._raw = "".join(self._raw), []
        elif letter.isalnum() or letter in "_.-":
            self._raw.append(letter)
        else:
            self.failed = True

    def _step(self, letter: str) -> None:
        if self.name is None:
            self._step_name(letter)
            return
        if self._quote:
            if self._escaped or letter == "\\":
                self._escaped = not self._escaped
            elif letter == self._quote:
                self._quote = ""
        elif letter in "\"'":
            self._quote = letter
        elif letter in "[{(":
            self._depth += 1
        elif letter in "]})" and self._depth:
            self._depth -= 1
        elif letter in ",)" and not self._depth:
            self._end_argument()
            if letter == ")" and not self.failed:
                self._arguments.append("}" if self._num_arguments else "{}")
                self.ended = True
            return
        self._raw.append(letter)

    def _end_argument(self) -> None:
        text, self._raw = "".join(self._raw), []
        if not text.strip():
            return
        found = _ARGUMENT.fullmatch(text)
        try:
            if found is None:
                raise ValueError(text)
            said = json.dumps(_value(found[2].strip()), ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            self.failed = True
            return
        self._arguments.append(f"{', ' if self._num_arguments else '{'}{json.dumps(found[1])}: {said}")
        self._num_arguments += 1


def _value(text: str) -> Any:
    """Return the value of Python's literal, or JSON's. Raises ValueError, SyntaxError."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return _JSON_WORDS[text] if text in _JSON_WORDS else json.loads(text)
