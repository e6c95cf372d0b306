"""What a caller is told of an error that was raised while another one's call, or the engine, was at work.

The error as it was raised is never kept: the frames of its traceback hold what the step was working on, for as long as
somebody holds a request and does not look.
"""

from __future__ import annotations

from copy import copy

from onewave.base.errors import OnewaveError

__all__ = ["told_to_others", "without_frames"]

_MOST_TOLD = 200


def told_to_others(error: BaseException) -> OnewaveError:
    """A new error for one request that ended with a step which raised `error` to somebody else: the same once more, if
    it is one of ours."""
    if isinstance(error, OnewaveError):
        return copy(error)
    try:
        said = str(error)
    except Exception:  # theirs, and everybody behind this one waits to be told
        said = "which does not say what it is"
    reason = " ".join(f"{type(error).__name__}: {said}".split())[:_MOST_TOLD]
    return OnewaveError("request", got=f"ended with a step that another call made ({reason})", next="Send it again.")


def without_frames(error: OnewaveError) -> OnewaveError:
    """The error itself, whose traceback and those of what caused it are let go. Not of its context: that ends with what
    the caller was handling when it called."""
    at: BaseException | None = error
    while at is not None:
        at.__traceback__ = None
        at = at.__cause__
    return error
