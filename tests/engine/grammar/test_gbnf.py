"""llama.cpp's grammars allow the texts that they say, as Python's regular expressions of the same do."""

import random
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onewave.base.errors import InvalidArgumentError
from onewave.engine.grammar.compiler import GrammarCompiler
from onewave.engine.grammar.gbnf import gbnf_as_lark, is_gbnf
from onewave.engine.grammar.params import StructuredOutputsParams

pytest.importorskip("llguidance")

_PIECES = dict(enumerate([*(bytes([i]) for i in range(256)), b"<end>"]))
_TOKENIZER: Any = SimpleNamespace(pieces=_PIECES, special_ids={256}, encode=lambda text, **_: [])
BYTES = GrammarCompiler(_TOKENIZER, vocab_size=257, eos_token_ids=[256])


def accepts(grammar: str, text: str) -> bool:
    state = BYTES.compile(StructuredOutputsParams(grammar=grammar)).begin()
    words = np.zeros(state.num_words, dtype=np.int32)
    for token in (*text.encode(), 256):
        if state.ended:
            return token == 256
        state.fill(words)
        if not int(words[token // 32]) >> token % 32 & 1:
            return False
        state.accept(token)
    return True


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        ('root ::= word "x" # ends\nword ::= [a-z]+', ["abx", "abxx"], ["ab", "x"]),
        ('root ::= ("a"+)? ("b"{2}){2} "c"{0}', ["bbbb", "aabbbb"], ["bb", "bbbbc"]),
        ('root ::= item Item |\n  a-b a_b\nitem ::= "i"\nItem ::= "I"\na-b ::= "-"\na_b ::= "_"', ["iI", "-_"], ["ii"]),
        ('root ::= "\\x41\\u00e9\\U0001F600" [\\u00e0-\\u00e9/\\]^-]{1,} . ""', ["Aé😀è/]^-\n"], ["Aé😀e\n"]),
        ('root ::= [^a]? | ("<end>" | .)+ "!"', ["b", "<end!", "<e\n!", "<end>!"], ["a"]),
        ('root ::= start | \nstart ::= "(" start? ")"', ["", "()", "(())"], ["(()"]),
        ('  root ::= "say " string ":" ws string\nstring ::= "\\"" char* "\\"" ws\n'
         'char ::= [^"\\\\] | "\\\\" ["\\\\]\nws ::= [ ]*',
         ['say "a\\"": "b"  ', 'say "" :""'], ['say "a" "b"']),
        ('start: "::=" w\nw: /[a-z]/+', ["::=ab"], ["ab"]),  # Lark
    ],
)  # fmt: skip
def test_a_grammar_allows_its_texts(grammar: str, texts: list[str], others: list[str]) -> None:
    assert [text for text in (*texts, *others) if accepts(grammar, text)] == texts


def made(rng: random.Random, depth: int) -> tuple[str, str]:
    """A part of a grammar, and the regular expression of the same."""
    kind = rng.randrange(4 if depth else 1)
    if kind == 0:
        one = rng.choice(["a", "ab", "bxb", "[ab]", "[^a]", "."])
        return (one, f"(?s:{one})") if one[0] in "[." else (f'"{one}"', one)
    parts = [made(rng, depth - 1) for _ in range(1 if kind == 3 else rng.randint(2, 3))]
    grammar, regex = (("|" if kind == 2 else " ").join(part[i] for part in parts) for i in (0, 1))
    times = rng.choice(["*", "+", "?", "{2}", "{0,2}", "{1,}", "{0}"]) if kind == 3 else ""
    return f"({grammar}){times}", f"(?:{regex if kind == 2 else regex.replace(' ', '')}){times}"


def test_any_grammar_allows_what_the_same_regular_expression_does() -> None:
    rng = random.Random(1)
    for _ in range(60):
        grammar, regex = made(rng, 3)
        for _ in range(12):
            text = "".join(rng.choices("abbx\n", k=rng.randrange(8)))
            assert accepts(f"root ::= {grammar}", text) == bool(re.fullmatch(regex, text)), (grammar, text)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('rot ::= "a"', "no rule 'root'"),
        ('root ::= "a"\nroot ::= "b"', "rule 'root' again (line 2"),
        ("root ::= \n  word", "no rule 'word' (line 2, at 'word')"),
        ('root ::= ("a"', "a bracket is open"),
        ('root ::= "a")', "no rule begins here"),
        ("root ::= * 'a'", "repeats nothing"),
        ('root ::= "a"{3,2}', "2 times at most and 3 at least"),
        ("root ::= [z-a]", "a range that ends before it begins"),
        ("root ::= []", "a class without letters"),
        (r'root ::= "\q"', r"no such escape: \q"),
        (r'root ::= "\uD800"', "no such letter"),
        (f'root ::= {"(" * 3000}"a"{")" * 3000}', "too deeply nested"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_place(grammar: str, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(said)):
        BYTES.compile(StructuredOutputsParams(grammar=grammar))


def test_a_grammar_too_large_to_be_looked_at_keeps_its_letters() -> None:
    rules = "\n".join(f'r{i} ::= r{i + 1} r{i + 1} "{i}"?' for i in range(40)) + '\nr40 ::= "z"'
    assert gbnf_as_lark(f"root ::= r0\n{rules}").count("\n") == 42


def test_a_long_text_is_told_from_a_grammar_in_one_go() -> None:
    empty = "\n" * 10**6  # which took hours, line by line to the end
    assert not is_gbnf(f"start{empty}")
    assert is_gbnf(f'{empty} root ::= "a"')
