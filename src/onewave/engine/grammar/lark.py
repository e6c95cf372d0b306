"""Forms of outputs as rules of a grammar, in llguidance's dialect of Lark."""

import json
import re
from typing import Any

from onewave.base.errors import UnsupportedError
from onewave.engine.grammar.gbnf import gbnf_as_lark, is_gbnf
from onewave.engine.grammar.params import StructuredOutputsParams
from onewave.engine.grammar.schemas import followable

# A model that is unsure of a JSON token writes whitespace, which is always allowed: without a bound it never stops.
BOUNDED_WHITESPACE = r" |\r?\n[ ]{0,32}"
_ANY_OBJECT = '{"type": "object"}'


def literal(text: str) -> str:
    """A text, letter by letter."""
    return json.dumps(text, ensure_ascii=False)


def json_rule(name: str, schema: dict[str, Any], *, whitespace: str | None = BOUNDED_WHITESPACE, **more: object) -> str:
    """A rule for the JSON texts of a schema. whitespace: a regex of what may stand between tokens; None: nothing.
    more: llguidance's options of JSON schemas."""
    layout = {"whitespace_flexible": whitespace is not None, **more}
    if whitespace is not None:
        layout["whitespace_pattern"] = whitespace
    return f"{name}: %json {json.dumps({**followable(schema), 'x-guidance': layout}, ensure_ascii=False)}\n"


def rules_of(form: StructuredOutputsParams, name: str) -> str:
    """Rules of which the one called `name` is the form."""
    if form.regex is not None:
        return f"{name}: /{library().regex_to_lark(form.regex, use_ascii='')}/\n"
    if form.choice is not None:
        one = f"{name.upper()}_CHOICE"  # one lexeme: as alternatives of a rule they would be at most 2,000
        return f"{name}: {one}\n{one}: {' | '.join(map(literal, form.choice))}\n"
    if form.grammar is not None:
        return f"{name}: %lark {{\n{as_lark(form.grammar)}\n}}\n"
    schema: dict[str, Any] = json.loads(_ANY_OBJECT if form.json is None else str(form.json))
    whitespace = None if form.disable_any_whitespace else form.whitespace_pattern or BOUNDED_WHITESPACE
    return json_rule(name, schema, whitespace=whitespace)


def as_lark(grammar: str) -> str:
    """A grammar that is in Lark's syntax already, or in GBNF's. Raises ValueError."""
    return gbnf_as_lark(grammar) if is_gbnf(grammar) else _followed(grammar)


def _followed(grammar: str) -> str:
    """A grammar whose schemas are as followable has them. Raises InvalidArgumentError."""
    parts: list[str] = []
    at = 0
    for found in re.finditer(r"%json\s*(?=\{)", grammar):
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError):
            continue  # llguidance says what is wrong with it
        if found.start() >= at:
            parts += [grammar[at : found.end()], json.dumps(followable(schema), ensure_ascii=False)]
            at = end
    return "".join([*parts, grammar[at:]])


def library() -> Any:
    """llguidance. Raises UnsupportedError where there is none, or one that knows a single end-of-text token."""
    next = "pip install 'onewave[serve]'"
    try:
        import llguidance
    except ImportError as error:
        raise UnsupportedError("structured_outputs", got="llguidance is not installed", next=next) from error
    if not hasattr(llguidance.LLTokenizer, "eos_tokens"):
        raise UnsupportedError("structured_outputs", got="llguidance before 1.7", next=next)
    return llguidance
