"""Where the `onewave` command begins: Ctrl-C ends it quietly from the first moment on.

While numpy or torch are being imported an interrupt must not become an exception: they swallow it, or end the process
in their own way, or leave a module that is half there. Nor in the lines of Python's own import system, some of which
are called where exceptions are ignored. Nothing is lost by leaving at once then.
"""

import os
import signal
import sys
from types import FrameType

_INTERRUPTED = 130
_DELICATE = ("numpy", "torch")
_IMPORT_SYSTEM = "<frozen importlib"


def main() -> None:
    """Run the command line and leave with its exit status."""
    # An interrupt that is ignored, as in a shell's background, stays ignored.
    listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if listens:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(_INTERRUPTED))
    from onewave.cli import main as command

    if listens:
        signal.signal(signal.SIGINT, _interrupt)
    command.main()


def _interrupt(number: int, frame: FrameType | None) -> None:
    importing = frame is not None and frame.f_code.co_filename.startswith(_IMPORT_SYSTEM)
    if importing or any(_is_being_imported(name) for name in _DELICATE):
        os._exit(_INTERRUPTED)
    raise KeyboardInterrupt


def _is_being_imported(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))
