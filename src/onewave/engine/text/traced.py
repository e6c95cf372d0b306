"""Strings that know the writer of each of their characters, through whatever a Jinja template does with them.

A template mixes its own control tokens with what people wrote; `Traced` keeps the two apart. It is a str in every
answer that it gives (length, equality, `in`, hashing, `startswith`, ...). What cuts or joins it carries the writers
along; an operation that is not followed here returns a plain str. A plain str counts as written by a user, so what is
lost is lost on the safe side.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any, SupportsIndex, cast

from jinja2 import nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import do_join
from jinja2.nodes import EvalContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from markupsafe import Markup

USER, OPERATOR, TEMPLATE = 0, 1, 2
"""Writers, the least trusted first. An operator writes system messages, tools and their results; a model's own answers
count as its."""

_CONVERSION = re.compile(r"%(?:\((?P<key>[^)]*)\))?[#0\- +]*(?:\*|\d+)?(?:\.(?:\*|\d+))?[hlL]?(?P<kind>.)", re.DOTALL)


class Traced(str):
    """A str with the writer of each character, one byte each; without them, the user's."""

    __slots__ = ("_writers",)
    _writers: bytes

    def __new__(cls, text: str, writers: bytes | None = None) -> "Traced":
        traced = super().__new__(cls, text)
        traced._writers = writers_of(text) if writers is None else writers
        return traced

    def __str__(self) -> str:
        return self

    def __add__(self, other: Any) -> str:
        if not isinstance(other, str) or isinstance(other, Markup):
            return NotImplemented
        return Traced(str.__add__(self, other), self._writers + writers_of(other))

    def __radd__(self, other: Any) -> str:
        return Traced(str.__add__(other, self), writers_of(other) + self._writers)

    def __mul__(self, count: SupportsIndex) -> str:
        return Traced(str.__mul__(self, count), self._writers * count)

    def __rmul__(self, count: SupportsIndex) -> str:
        return self * count

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        text = str.__getitem__(self, key)
        if not isinstance(key, slice):
            key = slice(key, key.__index__() + 1 or None)
        return Traced(text, self._writers[key])

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def __mod__(self, values: Any) -> str:
        plain = str.__mod__(self, values)
        parts: list[Any] = []
        by_name: Any = values
        given: Iterator[Any] = iter(by_name if isinstance(values, tuple) else (by_name,))
        end = 0
        for match in _CONVERSION.finditer(self):
            parts.append(self[end : match.start()])
            end = match.end()
            if match["kind"] == "%":
                parts.append(self[end - 1 : end])
            elif "*" in match[0]:
                return plain
            else:
                value = next(given) if match["key"] is None else by_name[match["key"]]
                conversion = re.sub(r"\(.*\)", "", match[0], flags=re.DOTALL)
                parts.append(value if conversion == "%s" and isinstance(value, str) else conversion % (value,))
        traced = join([*parts, self[end:]])
        return traced if traced == plain else plain

    def join(self, parts: Iterable[str], /) -> str:
        pieces: list[str] = []
        for part in parts:
            pieces += [self, part] if pieces else [part]
        return join(pieces)

    def strip(self, characters: str | None = None, /) -> str:
        return self.lstrip(characters).rstrip(characters)

    def lstrip(self, characters: str | None = None, /) -> str:
        return self[len(self) - len(str.lstrip(self, characters)) :]

    def rstrip(self, characters: str | None = None, /) -> str:
        return self[: len(str.rstrip(self, characters))]

    def removeprefix(self, prefix: str, /) -> str:
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str, /) -> str:
        return self[: len(str.removesuffix(self, suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._pieces(str.split(self, sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._pieces(str.rsplit(self, sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[str]:
        whole = self._pieces(str.splitlines(self, True), 0)
        return [line[: len(kept)] for line, kept in zip(whole, str.splitlines(self, keepends), strict=True)]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self._thirds(str.partition(self, sep))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._thirds(str.rpartition(self, sep))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        return Traced(new).join(self.split(old, count)) if old else str.replace(self, old, new, count)

    def upper(self) -> str:
        return self._recased(str.upper(self))

    def lower(self) -> str:
        return self._recased(str.lower(self))

    def casefold(self) -> str:
        return self._recased(str.casefold(self))

    def swapcase(self) -> str:
        return self._recased(str.swapcase(self))

    def capitalize(self) -> str:
        return self._recased(str.capitalize(self))

    def title(self) -> str:
        return self._recased(str.title(self))

    def _recased(self, text: str) -> str:
        """No character gets lost by a change of case: with the length the same, each stands where it stood."""
        same = len(text) == len(self)
        return Traced(text, self._writers if same else bytes([lowest_writer([self])]) * len(text))

    def _pieces(self, pieces: Iterable[str], gap: int) -> list[str]:
        """Consecutive pieces of this text, `gap` characters (or, at 0, any that no piece begins with) between them."""
        found: list[str] = []
        position = 0
        for piece in pieces:
            begin = str.find(self, piece, position)
            found.append(self[begin : begin + len(piece)])
            position = begin + len(piece) + gap
        return found

    def _thirds(self, parts: tuple[str, str, str]) -> tuple[str, str, str]:
        first, second = len(parts[0]), len(parts[0]) + len(parts[1])
        return self[:first], self[first:second], self[second:]


class TracedMarkup(Markup):
    """The result of the filter `safe` for a string: it escapes what it is added to, and keeps its writers in sums."""

    __slots__ = ("writers",)
    writers: bytes

    def __new__(cls, text: Any) -> "TracedMarkup":
        traced = super().__new__(cls, text)
        traced.writers = writers_of(text) if isinstance(text, str) else bytes(len(traced))
        return traced

    def __str__(self) -> str:
        return Traced(super().__str__(), self.writers)

    def __add__(self, other: Any) -> Any:
        return self._sum(self, other, super().__add__(other))

    def __radd__(self, other: Any) -> Any:
        return self._sum(other, self, super().__radd__(other))

    def _sum(self, left: Any, right: Any, escaped: Any) -> Any:
        if escaped is NotImplemented:
            return escaped
        traced = join([left, right])
        return TracedMarkup(traced if traced == escaped else str.__str__(escaped))


def writers_of(text: str) -> bytes:
    """The writer of each character."""
    if isinstance(text, TracedMarkup):
        return text.writers
    return text._writers if isinstance(text, Traced) else bytes(len(text))  # pyright: ignore[reportPrivateUsage]


def lowest_writer(texts: Iterable[str]) -> int:
    """The least trusted writer of any character of these texts; the template's where there is none."""
    return min((min(writers_of(text), default=TEMPLATE) for text in texts), default=TEMPLATE)


def written_by(writer: int, text: str) -> Traced:
    """A text that one writer wrote."""
    return Traced(text, bytes([writer]) * len(text))


def join(parts: Iterable[Any]) -> str:
    """Return `"".join(map(str, parts))`, with its writers."""
    texts = [str(part) for part in parts]
    return Traced("".join(texts), b"".join(map(writers_of, texts)))


class _CodeGenerator(CodeGenerator):
    """Jinja's, with the text that stands in the template written by it."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if type(node.value) is str:
            self.write(f"environment.literal({node.value!r})")
        elif type(node.value) is TracedMarkup:
            self.write(f"environment.filters['safe'](environment.literal({str.__str__(node.value)!r}))")
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(f"environment.literal({node.data!r})")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for arg in node.nodes:
            self.visit(arg, frame)
            self.write(", ")
        self.write("))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.literal({''.join(map(str, group))!r})"


class _Formatter(SandboxedFormatter):
    """A formatter that works as str.format does, a field at a time."""

    def fill(self, text: Traced, args: Any, kwargs: Any) -> str:
        """Fill the fields in. What stands between them counts as the least trusted writer's of it all."""
        plain, writer = self.vformat(str.__str__(text), args, kwargs), lowest_writer([text])
        parts: list[str] = []
        automatic = 0
        for literal, name, spec, conversion in self.parse(str.__str__(text)):
            parts.append(written_by(writer, literal))
            if name is None:
                continue
            if not name or name[0] in ".[":
                name, automatic = f"{automatic}{name}", automatic + 1
            value: Any = self.convert_field(self.get_field(name, args, kwargs)[0], cast("Any", conversion))
            parts.append(value if isinstance(value, str) and not spec else self.format_field(value, spec or ""))
        traced = join(parts)
        return traced if traced == plain else plain


class TracedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with templates whose literals are Traced and that keep the writers of all they join."""

    code_generator_class = _CodeGenerator
    concat = staticmethod(join)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.literal: Callable[[str], Traced] = cache(partial(written_by, TEMPLATE))
        filters: dict[str, Any] = self.filters
        filters |= {"join": _join, "safe": TracedMarkup}

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Traced.format and format_map; others as Jinja wraps them."""
        text, wrapped = getattr(value, "__self__", None), super().wrap_str_format(value)
        if wrapped is None or not isinstance(text, Traced):
            return wrapped

        def fill(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                args, kwargs = (), args[0]
            return _Formatter(self).fill(text, args, kwargs)

        return fill


@pass_eval_context
def _join(eval_ctx: EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> Any:
    return do_join(eval_ctx, value, Traced(d), attribute)
