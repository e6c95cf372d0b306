"""`onewave tiles`: the table of its commands. Each file lists its commands in __all__, as functions NAME_command."""

from __future__ import annotations

from importlib import import_module

import typer

__all__ = ["tiles"]

FILES = ("tiles_simulate", "tiles_verify", "tiles_search")

tiles = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Order, simulate, search, prove and lower tile graphs. Needs neither torch nor a GPU.",
)


def _mount() -> None:
    for file in FILES:
        name = f"onewave.cli.{file}"
        try:
            module = import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            continue
        for function in module.__all__:
            if function.endswith("_command"):
                tiles.command(function.removesuffix("_command").replace("_", "-"))(getattr(module, function))


_mount()
