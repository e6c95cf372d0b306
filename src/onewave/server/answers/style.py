"""How one model writes its thoughts and its tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onewave.server.answers.reasoning import MARKS, Marks, marks_of
from onewave.server.answers.tool_calls import form_of

if TYPE_CHECKING:
    from onewave.engine.text.tokenizer import Tokenizer

# ServeOptions.tool_form and reasoning.
AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class AnswerStyle:
    """form: of tool calls, a key of FORMS; None: not known. marks: of thoughts; None: it has none. reads_tools: whether
    its chat template takes tools. control_tokens: text -> id of those that are not shown as text."""

    form: str | None
    marks: Marks | None
    reads_tools: bool
    control_tokens: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, form: str = AUTO, reasoning: str = AUTO) -> AnswerStyle:
        """Look at a model's chat template. form, reasoning: what was asked for instead (ServeOptions)."""
        templates = tokenizer.parts.chat_templates
        usual, with_tools = templates.get("default"), templates.get("tool_use", templates.get("default"))
        reads_tools = with_tools is not None and tokenizer.reads_tools(tools=[{}])
        named = next((marks for marks in MARKS if marks.begin == reasoning), None)
        return cls(
            # A template that reads no tools gets them described, in the form that most models were taught.
            form=(form_of(with_tools) if reads_tools else "hermes") if form == AUTO else form,
            marks=marks_of(usual) if reasoning == AUTO else named,
            reads_tools=reads_tools,
            control_tokens={piece.content: piece.id for piece in tokenizer.parts.added if piece.special},
        )
