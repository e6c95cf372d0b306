"""Grammars of forced calls, of strict ones among text, and of forms behind a thought."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onewave.base.errors import UnsupportedError
from onewave.engine.grammar.compiler import GrammarCompiler
from onewave.engine.grammar.params import StructuredOutputsParams
from onewave.server.answers.pieces import Piece
from onewave.server.answers.plan import AnswerPlan, Function, Wanted, plan_answer
from onewave.server.answers.reasoning import MARKS, Marks
from onewave.server.answers.style import AnswerStyle

pytest.importorskip("llguidance")

EOS = 256
CONTROL = {"<|end|>": EOS, "[TOOL_CALLS]": 257, "[ARGS]": 258, "[THINK]": 259, "[/THINK]": 260}
ONE = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTIONS = [Function("f", ONE), Function("g", strict=True)]
F_AND_G = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
    "mistral_args": '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
}
F_AND_G["pythonic"] = F_AND_G["llama3_json"]


def compiler() -> GrammarCompiler:
    pieces = [*(bytes([i]) for i in range(256)), *(text.encode() for text in CONTROL)]
    special = {*CONTROL.values()}
    tokenizer: Any = SimpleNamespace(pieces=dict(enumerate(pieces)), special_ids=special, encode=lambda text, **_: [])
    return GrammarCompiler(tokenizer, vocab_size=len(pieces), eos_token_ids=[EOS])


COMPILER = compiler()


def style(form: str | None, marks: Marks | None = None) -> AnswerStyle:
    return AnswerStyle(form, marks, reads_tools=True, control_tokens=CONTROL)


def may_end(plan: AnswerPlan, text: str) -> bool:
    """Whether a text is an answer of the plan; False where it does not fit."""
    assert plan.form is not None
    state = COMPILER.compile(plan.form).begin()
    for part in re.split("(" + "|".join(map(re.escape, CONTROL)) + ")", text):
        for token_id in [CONTROL[part]] if part in CONTROL else part.encode():
            state.accept(token_id)
    words = np.zeros(state.num_words, dtype=np.int32)
    state.fill(words)
    return state.failure is None and bool(words.view(np.uint32)[EOS // 32] >> (EOS % 32) & 1)


@pytest.mark.parametrize("marks", [None, *MARKS])
@pytest.mark.parametrize("form", F_AND_G)
def test_forced_calls_are_calls_in_the_models_form(form: str, marks: Marks | None) -> None:
    text = F_AND_G[form]
    thought = "" if marks is None else f"{marks.begin}Hm.{marks.end}\n\n"
    some = plan_answer(style(form, marks), "", Wanted(functions=FUNCTIONS, must_call=True))
    one = plan_answer(style(form, marks), "", Wanted(functions=FUNCTIONS, must_call=True, one_call=True))
    for before in ("", thought):
        assert may_end(some, before + text)
        assert not may_end(one, before + text)
        assert not may_end(some, before + "{}")
        assert not may_end(some, before + text.replace("1", '"x"'))
    if marks is not None:
        opened = plan_answer(style(form, marks), marks.begin, Wanted(functions=FUNCTIONS, must_call=True))
        assert may_end(opened, f"Hm.{marks.end}{text}")
        assert not may_end(opened, text)
        closed = plan_answer(style(form, marks), thought, Wanted(functions=FUNCTIONS, must_call=True))
        assert not may_end(closed, thought + text)
    piece = some.make_reader().push(thought + text, last=True)
    assert [(part.name, part.arguments) for part in piece.calls] == [("f", '{"a": 1}'), ("g", "{}")]
    assert (piece.reasoning, piece.content) == ("Hm." if marks else "", "")
    assert some.shows_control == ("mistral" in form or marks is MARKS[1])


@pytest.mark.parametrize("form", ["hermes", "mistral", "mistral_args"])
def test_strict_functions_are_called_by_their_schemas_among_any_text(form: str) -> None:
    plan = plan_answer(style(form), "", Wanted(functions=FUNCTIONS))
    assert may_end(plan, "Just text.")
    assert may_end(plan, f"I look.\n{F_AND_G[form]}")
    assert not may_end(plan, f"I look.\n{F_AND_G[form].replace('1', 'null')}")
    assert plan_answer(style(form), "", Wanted(functions=FUNCTIONS[:1])).form is None  # none is strict


def test_text_of_a_form_or_calls_instead() -> None:
    form = StructuredOutputsParams(regex="[ab]+")
    both = plan_answer(style("hermes"), "", Wanted(form=form, functions=FUNCTIONS))
    assert may_end(both, "abba")
    assert may_end(both, F_AND_G["hermes"])
    assert not may_end(both, "c")
    assert plan_answer(style("hermes"), "", Wanted(form=form)).form is form
    gbnf = StructuredOutputsParams(grammar='root ::= "a" b\nb ::= "c" | "d"')
    for wanted in (form, gbnf, StructuredOutputsParams(choice=["ad", "</think>"])):
        behind = plan_answer(style(None, MARKS[0]), "<think>\n", Wanted(form=wanted))
        assert may_end(behind, "a</think>\n\nad") == (wanted is not form)
        assert not may_end(behind, "ad")
        assert behind.make_reader().push("a</think>\n\nad", last=True) == Piece.of("a", thought=True) + Piece.of("ad")


def test_what_no_grammar_can_hold_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="form of tool calls is not known"):
        plan_answer(style(None), "", Wanted(functions=FUNCTIONS[:1]))
    for form in ("llama3_json", "pythonic"):
        with pytest.raises(UnsupportedError, match="begin with no mark"):
            plan_answer(style(form), "", Wanted(functions=FUNCTIONS))
