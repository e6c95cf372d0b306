"""The tools of a request, whichever API it came by."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from onewave.base.errors import InvalidArgumentError, check_one_of, shown
from onewave.engine.grammar.params import StructuredOutputsParams
from onewave.server.answers.plan import Function, Wanted


@dataclass(frozen=True)
class Tools:
    """The tools that the model may call. allowed: names of those that it may call of all that it hears of; None: any.
    named: the one function that it has to. one_call: it may call once.

    Raises InvalidArgumentError for what does not fit together.
    """

    functions: Sequence[Function] = ()
    choice: Literal["none", "auto", "required"] = "auto"
    named: str | None = None
    allowed: Sequence[str] | None = None
    one_call: bool = False

    def __post_init__(self) -> None:
        names = [function.name for function in self.functions]
        if len(set(names)) < len(names):
            raise InvalidArgumentError("tools", got="two functions of one name", allowed="a name once")
        for function in self.functions:
            kind = (function.parameters or {}).get("type", "object")
            if kind != "object":
                got = f"{function.name!r} with parameters of type {shown(kind)}"
                raise InvalidArgumentError("tools", got=got, allowed="type object")
        asked = [*(self.allowed or ()), *(() if self.named is None else (self.named,))]
        if not names and (self.choice == "required" or asked):
            raise InvalidArgumentError("tool_choice", got="given without tools", allowed="with tools")
        for name in asked:
            check_one_of("tool_choice", name, names)

    def for_template(self) -> list[dict[str, Any]]:
        """The tools that the model hears of, as chat templates read them."""
        if self.choice == "none":
            return []
        return [{"type": "function", "function": function.described()} for function in self.functions]

    def wanted(self, form: StructuredOutputsParams | None) -> Wanted:
        """Return the form and the calls wanted of the answer, given a form of its text."""
        if self.choice == "none" or not self.functions:
            return Wanted(form=form)
        allowed = self.allowed if self.named is None else (self.named,)
        functions = [function for function in self.functions if allowed is None or function.name in allowed]
        must_call = self.choice == "required" or self.named is not None
        return Wanted(form, functions, must_call=must_call, one_call=self.one_call or self.named is not None)
