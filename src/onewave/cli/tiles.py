"""`onewave tiles`: the table of its commands. Each file lists its commands in __all__, as functions NAME_command."""

from __future__ import annotations

from importlib import import_module

import typer

__all__ = ["tiles"]

FILES = ("tiles_simulate", "tiles_timeline", "tiles_verify", "tiles_lower", "tiles_search")
# For the list of commands, where a command's first sentence would be cut off.
SHORT = {
    "interpret": "Run a task table in NumPy under random interleavings.",
    "lower": "Prove a program's schedule, write it as a task table.",
    "timeline": "Say where a launch's time goes, stage by stage.",
    "verify": "Prove that a schedule is safe, or show how it is not.",
}

tiles = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    help="Order, simulate, search, prove and lower tile graphs. Needs neither torch nor a GPU.",
)


def _mount() -> None:
    for file in FILES:
        place = f"onewave.cli.{file}"
        try:
            module = import_module(place)
        except ModuleNotFoundError as error:
            if error.name != place:
                raise
            continue
        for name in module.__all__:
            function = getattr(module, name)
            if callable(function):
                command = name.removesuffix("_command").replace("_", "-")
                tiles.command(command, short_help=SHORT.get(command))(function)


_mount()
