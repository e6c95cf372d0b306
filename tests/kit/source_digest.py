"""Digests of code that no comment, no docstring and no move of it changes, and each other token does.

A move: to another line, or of a module that it imports from.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterable
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

from triton.runtime.jit import DependenciesFinder, JITCallable

_LEFT_OUT = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
_SHAPE = {tokenize.NEWLINE: ";", tokenize.INDENT: "{", tokenize.DEDENT: "}"}
# A format string is one token before Python 3.12, and many from there on.
_FORMAT_BEGINS, _FORMAT_ENDS = (getattr(tokenize, name, None) for name in ("FSTRING_START", "FSTRING_END"))


def code_of(text: str) -> str:
    """Return the tokens of Python source, the same in each version of Python."""
    found: list[str] = []
    lines = text.splitlines(keepends=True)
    depth, begins, moves = 0, (0, 0), False
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == _FORMAT_BEGINS:
            begins = begins if depth else token.start
            depth += 1
        elif token.type == _FORMAT_ENDS:
            depth -= 1
            if not depth:
                found.append(_between(lines, begins, token.end))
        elif not depth and token.type not in _LEFT_OUT:
            if token.string == "from" and (not found or found[-1] in (*_SHAPE.values(), "from")):
                moves = True
            moves = moves and token.string != "import"
            if moves:
                continue
            before = found[-2] if len(found) > 1 else ";"
            if token.type == tokenize.NEWLINE and before in _SHAPE.values() and found and found[-1][-1] in "\"'":
                found.pop()  # a docstring
            else:
                found.append(_SHAPE.get(token.type, token.string))
    return " ".join(found)


def _between(lines: list[str], first: tuple[int, int], last: tuple[int, int]) -> str:
    part = lines[first[0] - 1 : last[0]]
    part[-1] = part[-1][: last[1]]
    part[0] = part[0][first[1] :]
    return "".join(part)


def digest_of_files(paths: Iterable[Path]) -> str:
    """Return a digest of the code in Python files, in any order."""
    codes = sorted(map(_code_of_file, paths))
    return hashlib.sha256("\n".join(codes).encode()).hexdigest()


@cache
def _code_of_file(path: Path) -> str:
    return code_of(path.read_text(encoding="utf-8"))


@cache
def _code_of_class(kind: type) -> str:
    """The code of a class of ours; of Triton's and Python's, which their versions tell, its name."""
    if kind.__module__.partition(".")[0] not in ("onewave", "kit"):
        return f"{kind.__module__}.{kind.__qualname__}"
    return code_of(textwrap.dedent(inspect.getsource(kind)))


class _Finder(DependenciesFinder):
    """Triton's own search for what a function calls and which globals it reads."""

    def __init__(self, function: Any) -> None:
        scope = function.get_capture_scope()
        super().__init__(function.__name__, scope, {}, function.src)
        self.called: list[Any] = []
        self.classes: list[str] = []
        self.visit(function.parse())

    def record_reference(self, val: Any, var_dict: Any = None, name: Any = None) -> None:
        if getattr(val, "__triton_aggregate__", False):  # whose fields no method tells
            self.classes.append(_code_of_class(val))
        super().record_reference(val, var_dict, name)

    def _update_hash(self, func: Any) -> None:
        self.called.append(func)


def called_by(function: Any) -> list[Any]:
    """Return a kernel and all functions that it reaches, each once, without Triton's own."""
    return [each for each, _ in _reached(function, {}).values()]


def digest_of_function(function: Any) -> str:
    """Return a digest of a kernel's code, of all code that it calls, and of the globals that they read."""
    parts = [f"{each.__name__} {_own(each, constants)}" for each, constants in _reached(function, {}).values()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def forget(function: Any) -> None:
    """Read a function's source anew, as it may have changed."""
    _found.pop(id(function), None)
    _owns.pop(id(function), None)


_found: dict[int, tuple[list[Any], str]] = {}


def _reached(function: Any, seen: dict[int, tuple[Any, str]]) -> dict[int, tuple[Any, str]]:
    if id(function) in seen or function.__module__.startswith("triton."):
        return seen
    if id(function) not in _found:
        finder = _Finder(function)
        read = sorted(((name, value) for (name, _), (value, _) in finder.used_global_vals.items()), key=itemgetter(0))
        codes = (_code_of_class(value) if isinstance(value, type) else repr(value) for _, value in read)
        constants = [f"{name}={code}" for (name, _), code in zip(read, codes, strict=True)]
        assert not any(" at 0x" in each for each in constants), constants
        _found[id(function)] = finder.called, ", ".join(constants + finder.classes)
    called, constants = _found[id(function)]
    seen[id(function)] = function, constants
    for each in called:
        _reached(each, seen)
    return seen


_owns: dict[int, str] = {}


def _own(function: JITCallable[Any], constants: str) -> str:
    if id(function) not in _owns:
        _owns[id(function)] = f"{code_of(function.src)} {getattr(function, 'noinline', False)}"
    return f"{_owns[id(function)]} {constants}"
