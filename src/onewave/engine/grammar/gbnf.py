"""llama.cpp's grammars (GBNF) in llguidance's dialect of Lark.

A lexeme of llguidance takes all the letters that it can: were `[a-z]+` one, no text of `[a-z]+ "x"` would end. Letters
alone would be right, and their masks a hundred times slower. So a lexeme is a stretch of a rule of which no text begins
another text of its own, and within which no other lexeme may end. (llguidance's own translation makes one of every rule
without recursion, drops the brackets of `("a"+)?`, keeps line breaks out of `.`, and merges names that differ by case.)
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

_TOKEN = re.compile(
    r"""\s+ | \#[^\n]*
    | (?P<rule>[\w-]+)\s*::= | (?P<name>[\w-]+)
    | "(?P<text>(?:[^"\\]|\\.)*)" | \[(?P<inverted>\^?)(?P<letters>(?:[^]\\]|\\.)*)]
    | (?P<times>[*+?]|\{\s*\d+\s*(?:,\s*\d*\s*)?})
    | (?P<mark>[.|()])""",
    re.VERBOSE | re.ASCII | re.DOTALL,
)
_LETTER = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|.", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {letter: letter for letter in "\\\"[]-^/'"}
_TIMES = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_MAX_CODE = 0x10FFFF
_MAX_DEPTH = 40  # llguidance's brackets
# Most parts of a stretch, and most items of a rule in it. Most parts of what is looked at for one grammar (under a
# second): of the rest, letters are lexemes.
_MAX_PARTS, _MAX_STRETCH, _MAX_WORK = 2000, 12, 600_000


@dataclass(frozen=True, slots=True)
class Letters:
    """One letter of some ranges of code points."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Seq:
    """One after another."""

    items: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Alt:
    """Any of some; none: nothing matches."""

    items: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Times:
    """An item again and again; most None: without an end."""

    item: "Node"
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Name:
    """Another rule."""

    name: str
    at: int


Node = Letters | Seq | Alt | Times | Name
_EMPTY, _NEVER = Seq(()), Alt(())


def is_gbnf(grammar: str) -> bool:
    """Whether a rule is written with `::=`, as Lark's never are."""
    return re.search(r"^[^\S\n]*[<\w][\w<>-]*\s*::=", grammar, re.MULTILINE) is not None


def gbnf_as_lark(grammar: str) -> str:
    """The same grammar in Lark. Raises ValueError with the place of a mistake."""
    try:
        rules = _Reader(grammar).read()
        return _Writer(rules).write()
    except RecursionError:
        raise ValueError("too deeply nested") from None


class _Reader:
    """Reads rules, one token after another."""

    def __init__(self, grammar: str) -> None:
        self._grammar, self._end = grammar, 0
        self._names, self._depth = [Name("root", 0)], 0
        self._tokens = self._scan()
        self._next = next(self._tokens, None)

    def read(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._next is not None:
            name = self._next["rule"]
            if name is None or name in rules:
                raise self._mistake("no rule begins here" if name is None else f"rule {name!r} again")
            self._take()
            rules[name] = self._alternatives()
        for wanted in self._names:
            if wanted.name not in rules:
                raise self._mistake(f"there is no rule {wanted.name!r}", wanted.at)
        return rules

    def _scan(self) -> Iterator[re.Match[str]]:
        while self._end < len(self._grammar):
            found = _TOKEN.match(self._grammar, self._end)
            if found is None:
                raise self._mistake("no part of a grammar", self._end)
            self._end = found.end()
            if found.lastgroup is not None:
                yield found

    def _take(self) -> re.Match[str]:
        found = self._next
        assert found is not None
        self._next = next(self._tokens, None)
        return found

    def _alternatives(self) -> Node:
        found = [self._sequence()]
        while self._next is not None and self._next["mark"] == "|":
            self._take()
            found.append(self._sequence())
        return _alt(found)

    def _sequence(self) -> Node:
        items: list[Node] = []
        while (token := self._next) is not None and token["rule"] is None and token["mark"] not in ("|", ")"):
            if token["times"] is not None:
                raise self._mistake("repeats nothing")
            item = self._item(self._take())
            while (times := self._take_times()) is not None:
                numbers = re.findall(r"\d+", times)
                least, most = _TIMES.get(times) or (int(numbers[0]), int(numbers[-1]))
                most = None if times[0] == "{" and re.search(r",\s*}", times) else most
                if most is not None and most < least:
                    raise self._mistake(f"{most} times at most and {least} at least")
                item = Times(item, least, most)
            items.append(item)
        return items[0] if len(items) == 1 else Seq(tuple(items))

    def _take_times(self) -> str | None:
        return None if self._next is None or self._next["times"] is None else self._take()["times"]

    def _item(self, token: re.Match[str]) -> Node:
        if token["mark"] == "(":
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise self._mistake("too deeply nested", token.start())
            inner = self._alternatives()
            self._depth -= 1
            if self._next is None or self._next["mark"] != ")":
                raise self._mistake("a bracket is open", token.start())
            self._take()
            return inner
        if token["name"] is not None:
            self._names.append(Name(token["name"], token.start()))
            return self._names[-1]
        try:
            if token["text"] is not None:
                return Seq(tuple(Letters(((code, code),)) for code in _codes(token["text"])))
            return Letters(((0, _MAX_CODE),) if token["mark"] == "." else _ranges(token))
        except ValueError as error:
            raise self._mistake(str(error), token.start()) from None

    def _mistake(self, what: str, at: int | None = None) -> ValueError:
        if at is None:
            at = self._end if self._next is None else self._next.start()
        line = self._grammar.count("\n", 0, at) + 1
        return ValueError(f"{what} (line {line}, at {self._grammar[at : at + 20]!r})")


def _codes(text: str) -> list[int]:
    return [_code(letter) for letter in _LETTER.findall(text)]


def _code(letter: str) -> int:
    if not letter.startswith("\\"):
        return ord(letter)
    kind, digits = letter[1:2], letter[2:]
    if not digits and kind not in _ESCAPES:
        raise ValueError(f"no such escape: {letter}")
    code = int(digits, 16) if digits else ord(_ESCAPES[kind])
    if code > _MAX_CODE or 0xD800 <= code < 0xE000:
        raise ValueError(f"no such letter: {letter}")
    return code


def _ranges(token: re.Match[str]) -> tuple[tuple[int, int], ...]:
    """The ranges of a class, in order and apart."""
    letters, found, at = _LETTER.findall(token["letters"]), list[tuple[int, int]](), 0
    while at < len(letters):
        is_range = letters[at + 1 : at + 2] == ["-"] and at + 2 < len(letters)
        first, last = _code(letters[at]), _code(letters[at + 2 * is_range])
        at += 3 if is_range else 1
        if last < first:
            raise ValueError("a range that ends before it begins")
        found.append((first, last))
    if not token["inverted"]:
        if not found:
            raise ValueError("a class without letters")
        return tuple(sorted(found))
    rest, begin = list[tuple[int, int]](), 0
    for first, last in [*sorted(found), (_MAX_CODE + 1, 0)]:
        if begin < first:
            rest.append((begin, first - 1))
        begin = max(begin, last + 1)
    return tuple(rest)


class _Writer:
    """Writes rules in Lark."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._names = {name: "start" if name == "root" else f"rule_{i}" for i, name in enumerate(rules)}
        self._plain: dict[str, Node | None] = {}
        # Stretches that were looked at, and whether they may be lexemes; those of the text that is written.
        self._may_be: dict[Node, bool] = {}
        self._lexemes: set[Node] = set()
        self._ends_within = cache(_Derivatives().ends_within)

    def write(self) -> str:
        while True:
            self._lexemes.clear()
            text = "".join(f"{self._names[name]}: {self._node(node)}\n" for name, node in self._rules.items())
            cut = {one for one in self._lexemes if any(self._ends_within(other, one) for other in self._lexemes)}
            if not cut:
                return text
            self._may_be |= dict.fromkeys(cut, False)

    def _node(self, node: Node) -> str:
        if isinstance(node, Name):
            return self._names[node.name]
        if (lexeme := self._lexeme([node])) is not None:
            return lexeme
        if isinstance(node, Times):
            most = "" if node.most is None else node.most
            return f"({self._node(node.item)}){{{node.least},{most}}}"
        if isinstance(node, Alt):
            return f"({' | '.join(self._node(item) for item in node.items)})"
        assert isinstance(node, Seq)
        parts: list[str] = []
        items, begin = node.items, 0
        while begin < len(items):
            for end in range(min(len(items), begin + _MAX_STRETCH), begin, -1):
                lexeme = self._lexeme(items[begin:end])
                if lexeme is not None or end == begin + 1:
                    parts.append(self._node(items[begin]) if lexeme is None else lexeme)
                    begin = end
                    break
        return " ".join(parts)

    def _lexeme(self, items: Sequence[Node]) -> str | None:
        """A stretch of a rule as one lexeme; None where it can't be one."""
        plain = [self._without_names(item) for item in items]
        if None in plain:
            return None
        node = _seq([item for item in plain if item is not None])
        if node == _EMPTY:
            return '""'
        if node not in self._may_be:
            fits = isinstance(node, Letters) or _size(node) <= _MAX_PARTS
            self._may_be[node] = fits and not self._ends_within(node, node)
        if not self._may_be[node]:
            return None
        self._lexemes.add(node)
        return f"/{_regex(node)}/"

    def _without_names(self, node: Node) -> Node | None:
        """The same without other rules; None where one is within itself, or too long."""
        if isinstance(node, Name):
            if node.name not in self._plain:
                self._plain[node.name] = None  # while it is looked at
                self._plain[node.name] = self._without_names(self._rules[node.name])
            return self._plain[node.name]
        if isinstance(node, Letters):
            return node
        if isinstance(node, Times):
            inner = self._without_names(node.item)
            return None if inner is None else _times(inner, node.least, node.most)
        found = [self._without_names(item) for item in node.items]
        items = [item for item in found if item is not None]
        if len(items) < len(found) or sum(map(_size, items)) > _MAX_PARTS:
            return None
        return _seq(items) if isinstance(node, Seq) else _alt(items)


def _size(node: Node) -> int:
    """Its parts."""
    if isinstance(node, Letters):
        return len(node.ranges)
    if isinstance(node, Seq | Alt):
        return 1 + sum(map(_size, node.items))
    return 1 + _size(node.item) if isinstance(node, Times) else 1


def _regex(node: Node) -> str:
    if isinstance(node, Letters):
        ranges = (rf"\x{{{first:x}}}-\x{{{last:x}}}" for first, last in node.ranges)
        return f"[{''.join(ranges)}]"
    if isinstance(node, Seq):
        return "".join(map(_regex, node.items))
    if isinstance(node, Alt):
        return f"(?:{'|'.join(map(_regex, node.items))})"
    assert isinstance(node, Times)
    return f"(?:{_regex(node.item)}){{{node.least},{'' if node.most is None else node.most}}}"


class _Derivatives:
    """Brzozowski's derivatives, of which a grammar gets so many."""

    def __init__(self) -> None:
        self._left = _MAX_WORK

    def ends_within(self, one: Node, other: Node) -> bool:
        """Whether a text of one node begins a longer text of the other. True where it takes too long to say."""
        if isinstance(other, Letters) or self._left <= 0:
            return not isinstance(other, Letters)
        self._left -= _size(one) + _size(other)
        edges = {0} | {edge for node in (one, other) for first, last in _ranges_in(node) for edge in (first, last + 1)}
        seen, waiting = {(one, other)}, list[tuple[Node, Node]]([(one, other)])
        while waiting and self._left > 0:
            left, right = waiting.pop()
            self._left -= len(edges) * (_size(left) + _size(right))
            after = {(self._after(left, code), self._after(right, code)) for code in edges}
            if _may_end(left) and any(longer is not _NEVER for _, longer in after):
                return True
            after = {pair for pair in after - seen if _NEVER is not pair[0] and _NEVER is not pair[1]}
            waiting += after
            seen |= after
        return self._left <= 0

    def _after(self, node: Node, code: int) -> Node:
        """Return the node of the texts behind a letter."""
        if isinstance(node, Letters):
            return _EMPTY if any(first <= code <= last for first, last in node.ranges) else _NEVER
        if isinstance(node, Times):
            if node.most == 0:
                return _NEVER
            rest = _times(node.item, max(node.least - 1, 0), None if node.most is None else node.most - 1)
            return _seq([self._after(node.item, code), rest])
        if isinstance(node, Alt):
            return _alt([self._after(item, code) for item in node.items])
        assert isinstance(node, Seq)
        found: list[Node] = []
        for i, item in enumerate(node.items):
            found.append(_seq([self._after(item, code), *node.items[i + 1 :]]))
            if not _may_end(item):
                break
        return _alt(found)


def _ranges_in(node: Node) -> Iterator[tuple[int, int]]:
    if isinstance(node, Letters):
        yield from node.ranges
    elif not isinstance(node, Name):
        for item in (node.item,) if isinstance(node, Times) else node.items:
            yield from _ranges_in(item)


def _may_end(node: Node) -> bool:
    if isinstance(node, Seq):
        return all(map(_may_end, node.items))
    if isinstance(node, Alt):
        return any(map(_may_end, node.items))
    return isinstance(node, Times) and (node.least == 0 or _may_end(node.item))


def _seq(items: list[Node]) -> Node:
    flat = [part for item in items for part in (item.items if isinstance(item, Seq) else (item,))]
    if any(part is _NEVER for part in flat):
        return _NEVER
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def _alt(items: list[Node]) -> Node:
    flat = dict.fromkeys(part for item in items for part in (item.items if isinstance(item, Alt) else (item,)))
    if not flat:
        return _NEVER
    return next(iter(flat)) if len(flat) == 1 else Alt(tuple(flat))


def _times(item: Node, least: int, most: int | None) -> Node:
    return _EMPTY if most == 0 or item == _EMPTY else Times(item, least, most)
