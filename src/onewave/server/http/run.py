"""The process's life: bind, serve, and after SIGTERM or Ctrl-C drain and leave with status 0."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import uvicorn

from onewave.server.app import make_app
from onewave.server.http.connection import Connection
from onewave.server.http.logs import set_up
from onewave.server.served import Served

if TYPE_CHECKING:
    from types import FrameType


def serve(served: Served, listening: socket.socket) -> None:
    """Serve on a bound socket until SIGTERM or Ctrl-C, then let what runs end, and free the model."""
    options = served.options
    set_up(as_json=options.log_json)
    # The engine's thread waits so long for this one where both have Python to run: at each launch, and whatever else
    # lets go of Python's lock, some twenty times a step (5 ms by default: longer than many models' steps).
    sys.setswitchinterval(0.0001)
    gc.freeze()  # what has been loaded stays: collections need not look at it, while neither thread runs Python
    config = uvicorn.Config(
        make_app(served),
        http=Connection.with_limits(options),
        ws="none",
        loop="auto",
        log_config=None,
        access_log=False,
        server_header=False,
        # Above what clients keep idle connections for: with less, a request may meet the connection's end.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(options.drain_seconds)),
    )
    server = Server(config, served)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(server.serve(sockets=[listening]))


class Server(uvicorn.Server):
    """uvicorn's, with an end that is no failure: after a signal it drains and returns.

    uvicorn raises the signal again, so that a process that ended well would still report a death by SIGTERM.
    """

    def __init__(self, config: uvicorn.Config, served: Served) -> None:
        super().__init__(config)
        self._served = served

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Have the first signal begin the end, and a second Ctrl-C end it at once."""
        wanted = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse new requests from here on."""
        self._served.engine.refuse_new()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> Any:
        """Wait for what runs as long as options allow, then end it and free the model."""
        await super().shutdown(sockets)
        if self.force_exit:  # which leaves the app's own tasks to be cancelled, with a traceback in the log
            await self.lifespan.shutdown()
        await self._served.engine.close()
