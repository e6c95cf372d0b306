"""Groups of commands that are imported one at a time, so that help imports none and a command itself alone."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, get_type_hints

import typer
from typer.core import TyperGroup

_HELP_NAMES = {"help_option_names": ["-h", "--help"]}


class Listed(NamedTuple):
    """Where a command stands, and its line in the list of commands (which no help may cut off).

    `place` is "file:name" within this folder: a function with typer's annotations (see with_fields), or a group.
    """

    place: str
    line: str


def group(commands: Mapping[str, Listed], **settings: Any) -> typer.Typer:
    """A group of the commands named, in this order, with typer's further settings."""

    class Group(_Group):
        listed = commands

    made = typer.Typer(cls=Group, add_completion=False, context_settings=_HELP_NAMES, rich_markup_mode=None, **settings)
    # Without a function of its own typer takes an app of no registered commands for a mistake.
    made.callback()(lambda: None)
    return made


class _Group(TyperGroup):
    listed: Mapping[str, Listed]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = dict.fromkeys(self.listed)  # type: ignore[assignment] # their names alone, for suggestions

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.listed)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _command(cmd_name, self.listed[cmd_name].place) if cmd_name in self.listed else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.line) for name, entry in self.listed.items()])


@cache
def _command(name: str, place: str) -> Any:
    """The command at a place, imported when it is first asked for."""
    file, _, attribute = place.partition(":")
    found = getattr(import_module(f"onewave.cli.{file}"), attribute)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False, context_settings=_HELP_NAMES, rich_markup_mode=None)
        found.command(name)(with_fields(function))
    return typer.main.get_command(found)


def with_fields(function: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter that is a dataclass by its fields, so that commands share options and their checks."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, given in inspect.signature(function).parameters.items():
        if name not in groups:
            parameters.append(given.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))
            continue
        of_field = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            parameters.append(
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=of_field[field.name]
                )
            )

    def call(**values: Any) -> None:
        made = {n: group(**{f.name: values.pop(f.name) for f in fields(group)}) for n, group in groups.items()}
        function(**values, **made)

    call.__doc__ = function.__doc__
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # what typer reads
    return call
