"""`onewave lab`: the tile lab in the browser."""

from importlib.util import find_spec
from typing import Annotated

import typer

from onewave.base.errors import UnsupportedError


def lab(
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; anything but 127.0.0.1 lets other machines in.")
    ] = ("127.0.0.1"),
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Port; by default 8137, or any free one.")
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Open no browser.")] = False,
) -> None:
    """Open the tile lab: play with tile orders, chains, traces and caches in the browser. Ctrl-C stops it."""
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        next = "In a clone: pip install -e '.[lab]'"
        raise UnsupportedError("onewave lab", got=f"{' and '.join(missing)} not installed", next=next)
    from onewave.lab.serve import bind, serve, url_of

    listening = bind(host, port)
    print(f"tile lab on {url_of(listening, host)} (Ctrl-C stops it)", flush=True)
    serve(listening, host, browser=not no_browser)
