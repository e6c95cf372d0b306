"""Sockets that servers listen on."""

import errno
import os
import socket

from onewave.base.errors import InvalidArgumentError


def bind(host: str, port: int, *, what: str, free_instead: bool = False) -> socket.socket:
    """Listen on host and port (0: any free one). free_instead: take any free one where the port is taken.

    what: what errors call the address. Raises InvalidArgumentError when the host is no address of this machine or the
    port is taken.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        allowed = "an address or name of this machine"
        raise InvalidArgumentError("--host", got=repr(host[:80]), allowed=allowed) from None
    listening = socket.socket(family, socket.SOCK_STREAM)
    if os.name == "posix":
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listening.bind(address)
            listening.listen(2048)
        except OSError as error:
            if not free_instead or error.errno != errno.EADDRINUSE:
                raise
            listening.bind((address[0], 0, *address[2:]))
            listening.listen(2048)
    except OSError as error:
        listening.close()
        got = f"{host}:{port}, {(error.strerror or 'refused').lower()}"
        elsewhere = error.errno == errno.EADDRNOTAVAIL
        next = "Choose a --host of this machine, as 127.0.0.1." if elsewhere else "Choose another --port."
        raise InvalidArgumentError(what, got=got, next=next) from None
    return listening
