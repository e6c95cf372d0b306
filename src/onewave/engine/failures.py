"""The error of a step that ended a request, for its caller in another thread.

The error as it was raised is never kept: the frames of its traceback hold what the step worked on, for as long as
a caller holds a request and does not look.
"""

import traceback
from copy import copy

from onewave.base.errors import OnewaveError, shown


class StepTraceback(Exception):
    """The cause of an error that a step raised: its traceback, as text."""


def own_copy(error: BaseException) -> BaseException:
    """Copy an error for one request, without frames. One that can't be copied or shown becomes an OnewaveError."""
    try:
        found = copy(error)
        str(found)
    except Exception:
        got = f"ended with a step that failed ({shown(error)})"
        found = OnewaveError("request", got=got, next="Send it again.")
    found.__cause__ = StepTraceback("\n" + "".join(traceback.format_exception(error)))
    return found


def without_frames(error: OnewaveError) -> OnewaveError:
    """Let go of the tracebacks of an error and of its causes. Not of its context's: that one ends with what the caller
    was handling when it called."""
    at: BaseException | None = error
    while at is not None:
        at.__traceback__ = None
        at = at.__cause__
    return error
