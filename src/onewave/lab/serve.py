"""Binding the lab's port and running it under uvicorn."""

import ipaddress
import socket
import threading
import webbrowser
from contextlib import suppress

from onewave.base import sockets

DEFAULT_PORT = 8137


def bind(host: str, port: int | None) -> socket.socket:
    """Listen on host and port; None takes DEFAULT_PORT, or any free one where that is taken. Raises as sockets.bind."""
    return sockets.bind(host, DEFAULT_PORT if port is None else port, what="lab address", free_instead=port is None)


def url_of(listening: socket.socket, host: str) -> str:
    """Where a browser on this machine finds the lab."""
    port = listening.getsockname()[1]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"http://{host}:{port}/"
    if address.is_unspecified:
        return f"http://127.0.0.1:{port}/" if address.version == 4 else f"http://[::1]:{port}/"
    return f"http://[{host}]:{port}/" if address.version == 6 else f"http://{host}:{port}/"


def serve(listening: socket.socket, host: str, *, browser: bool) -> None:
    """Run the lab on a bound socket until it is interrupted."""
    import uvicorn

    from onewave.lab.app import make_app

    if browser:
        # The socket listens already: a browser that is quick waits for the first answer. Some browsers block.
        threading.Thread(target=open_browser, args=(url_of(listening, host),), daemon=True).start()
    app = make_app(host_names(host))
    config = uvicorn.Config(app, log_level="warning", server_header=False, timeout_graceful_shutdown=2)
    uvicorn.Server(config).run(sockets=[listening])


def host_names(host: str) -> frozenset[str]:
    """Names that requests may be for: what was asked for, and this machine's own name when it listens everywhere."""
    try:
        everywhere = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        everywhere = False
    own = socket.gethostname().lower()
    return frozenset({host.lower(), own, f"{own}.local"} if everywhere else {host.lower()})


def open_browser(url: str) -> None:
    """Open a window of the user's browser, where there is one; a browser inside the terminal would take it over."""
    with suppress(webbrowser.Error):
        found = webbrowser.get()
        if type(found) is not webbrowser.GenericBrowser:
            found.open(url)
