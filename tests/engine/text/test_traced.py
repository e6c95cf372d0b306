"""Traced strings: a str in every answer, and the writer of each character through every operation that is followed."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onewave.engine.text.traced import OPERATOR, TEMPLATE, USER, Traced, TracedEnvironment, join, writers_of, written_by

# Each writer has letters of its own, so that the text itself says who wrote it.
LETTERS = {USER: "uvUß \n", OPERATOR: "opO0  ", TEMPLATE: "<|t>T%"}
MIXED = st.lists(st.sampled_from([(w, c) for w, letters in LETTERS.items() for c in letters]), max_size=12)
SEPARATORS = ["u", "t", "<", "|>", " ", "op", "xx", "\n"]


def traced(letters: list[tuple[int, str]]) -> Traced:
    return Traced("".join(c for _, c in letters), bytes(w for w, _ in letters))


CUTS: dict[str, Any] = {
    "strip": lambda s, a, n: [s.strip(), s.lstrip(), s.rstrip(), s.strip(a), s.lstrip(a), s.rstrip(a)],
    "split": lambda s, a, n: [*s.split(a), *s.split(a, n), *s.split(), *s.split(None, n)],
    "rsplit": lambda s, a, n: [*s.rsplit(a), *s.rsplit(a, n), *s.rsplit(None, n)],
    "lines": lambda s, a, n: [*s.splitlines(), *s.splitlines(True)],
    "partition": lambda s, a, n: [*s.partition(a), *s.rpartition(a)],
    "fixes": lambda s, a, n: [s.removeprefix(a), s.removesuffix(a)],
    "slices": lambda s, a, n: [s[n:], s[:-n], s[::-1], s[1:n], s[:2], *s, *(s[i] for i in range(-len(s), len(s)))],
    "sums": lambda s, a, n: [s + s, s * n, n * s, s + s.upper()],
    "cases": lambda s, a, n: [s.upper(), s.lower(), s.title(), s.capitalize(), s.swapcase(), s.casefold()],
}
QUESTIONS: list[Any] = [
    lambda s, a: (len(s), s == a, s < a, a in s, s.find(a), s.rfind(a), s.count(a), s.startswith(a), s.endswith(a)),
    lambda s, a: (hash(s), bool(s), s.isspace(), s.isupper(), repr(s), {s: 1}[str.__str__(s)], sorted([s, a])),
]


@settings(max_examples=200)
@given(MIXED, st.sampled_from(SEPARATORS), st.integers(0, 3))
def test_a_traced_string_cut_and_joined_is_the_same_text_with_its_own_writers(
    letters: list[tuple[int, str]], separator: str, count: int
) -> None:
    text = traced(letters)
    plain = str.__str__(text)
    writer_of = {c.lower(): w for w, cs in LETTERS.items() for c in cs if not c.isspace()}
    for name, cut in CUTS.items():
        for ours, theirs in zip(cut(text, separator, count), cut(plain, separator, count), strict=True):
            assert ours == theirs, name
            assert type(ours) is Traced, name
            if len(text.upper()) == len(text):  # `ß` grows; all of it is the lowest writer's then
                assert all(writer_of.get(c.lower(), w) == w for c, w in zip(ours, writers_of(ours), strict=True)), name
    for ask in QUESTIONS:
        assert ask(text, separator) == ask(plain, separator)
    for new in ("", "u", written_by(TEMPLATE, "t")):
        ours = text.replace(separator, new, count)
        assert ours == plain.replace(separator, new, count)
        assert all(writer_of.get(c.lower(), w) == w or c == "ß" for c, w in zip(ours, writers_of(ours), strict=True))


@pytest.mark.parametrize(
    ("source", "text", "writers"),
    [
        ("{{ 'a' ~ u ~ 1 ~ o }}", "auu1o", "20001"),
        ("{{ 'a' + u + 'b' }}x{{ u + u }}", "auubxuuuu", "200220000"),
        (
            "{{ ['a', u, o] | join('-') }}{{ [u, 'b'] | join }}{{ u.join(['a', 'b']) }}",
            "a-uu-ouubauub",
            "2200210020000",
        ),
        ("{{ '<%s|%d|%(k)s>' % u if false else '<%s|%d%%>' % (u, 3) }}", "<uu|3%>", "2002022"),
        ("{{ '%(k)s.' | format(k=u) }}{{ '%5s' % u }}", "uu.   uu", "00200000"),
        ("{{ '<{}{k}{:>3}>'.format(u, o, k=o) }}", "<uuo  o>", "20010002"),
        ("{{ '{0[k]}!'.format_map(m) if false else '{k}!'.format_map(m) }}{{ u.format() }}", "uu!uu", "00200"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(u) | trim('<') }}{{ f('t') | upper }}", "uu><T>", "002222"),
        ("{% set x %}a{{ u }}{% endset %}{{ x | reverse }}{{ x | first }}{{ x | last }}", "uuaau", "00220"),
        ("{% filter lower %}A{{ u }}{% endfilter %}{% call(y) c() %}{{ y }}!{% endcall %}", "auuB!", "20002"),
        (
            "{{ u | tojson }}{{ o | tojson }}{{ {'k': o} | tojson }}{{ {o: u} | tojson }}",
            '"uu""o"{"k": "o"}{"o": "uu"}',
            None,
        ),
        ("{{ ('<' ~ u) | replace('u', '<') }}{{ u | replace('u', '<') }}", "<<<<<", "22200"),
        ("{{ ('<' ~ u ~ '>') | indent(2) }}{{ '<b>' | e }}{{ ('<' | safe) + o }}", "<uu>&lt;b&gt;<o", None),
        ("{{ 'a,b' | upper }}{{ 'a,b'.split(',')[1] }}{{ '%s' % 'x' }}{{ namespace(k='n').k }}", "A,Bbxn", "222222"),
        (
            "{% for c in 'a' ~ u %}{{ c | title }}{{ loop.index }}{% endfor %}{{ joiner(',') and u[0] }}",
            "A1U2U3u",
            None,
        ),
    ],
)
def test_a_template_keeps_the_writers_of_what_it_joins(source: str, text: str, writers: str | None) -> None:
    environment = TracedEnvironment()
    operators = written_by(OPERATOR, "o")
    given_to = {"u": "uu", "o": operators, "m": {"k": "uu"}, "c": lambda caller: caller("B")}
    rendered = join(environment.from_string(source).generate(given_to))
    assert rendered == text
    if writers is not None:
        assert writers_of(rendered) == bytes(map(int, writers))
    lost = writers_of(rendered)
    assert all(lost[i] == USER for i, c in enumerate(rendered) if c == "u")
