"""Groups of commands that are imported one at a time, so that help imports none and a command itself alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

_HELP_NAMES = {"help_option_names": ["-h", "--help"]}


class Listed(NamedTuple):
    """Where a command stands, and its line in the list of commands (which no help may cut off).

    `place` is "file:name" within this folder: a function with typer's annotations, or a group.
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
        self.commands: Mapping[str, Any] = _Commands(self.listed)  # type: ignore[assignment] # only read

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.listed)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        # Not .get(): it would take a KeyError of the command's own module for an unknown name.
        return self.commands[cmd_name] if cmd_name in self.listed else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.line) for name, entry in self.listed.items()])


class _Commands(Mapping[str, Any]):
    """A group's commands by name; one that is asked for is imported."""

    def __init__(self, listed: Mapping[str, Listed]) -> None:
        self._listed = listed
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = _command(name, self._listed[name].place)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._listed)


def _command(name: str, place: str) -> Any:
    file, _, attribute = place.partition(":")
    found = getattr(import_module(f"onewave.cli.{file}"), attribute)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False, context_settings=_HELP_NAMES, rich_markup_mode=None)
        found.command(name)(function)
    return typer.main.get_command(found)
