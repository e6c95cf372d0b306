"""Every exception that onewave raises on purpose.

OnewaveError
├── InvalidArgumentError (ValueError)   a value the caller passed can't be honoured
│   ├── ShapeError                      a tensor's shape, rank or stride is wrong
│   ├── UnsupportedError                well formed, but not something this build can do
│   │   └── OutOfReachError             weights that the format which was asked for can't hold
│   └── UnverifiedError (TypeError)     an unproved schedule, where a proved one is needed
├── ModelError                          a model can't be found or read
│   ├── ModelNotFoundError              no such path, alias or repository
│   ├── ConfigError                     config.json or GGUF metadata is missing, malformed or unknown
│   ├── WeightsError                    a weight file is truncated, corrupt, incomplete or of the wrong shape
│   ├── TokenizerError                  the tokenizer or chat template can't be built or applied
│   └── DownloadError                   fetching a model failed
├── CapacityError                       not enough memory or disk
├── BusyError                           as many requests wait and run as are let in
├── StoppingError                       the engine takes no new request, as it is about to end
├── VerificationError                   a schedule of tiles that can deadlock, race or lose a task
└── WaveStalled                         a launch waited too long for something that never came

Each carries one line that says what failed, what was given, what is allowed and what to do next.
"""

import copyreg
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_MAX_SHOWN = 200


def shown(value: object) -> str:
    """Return a caller's value for an error's line: its repr, or the first 200 characters of that."""
    try:
        text = repr(value)
    except ValueError:  # a number of more digits than Python turns into text
        return "a number of thousands of digits"
    except RecursionError:
        return f"a {type(value).__name__} nested too deep to show"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


class OnewaveError(Exception):
    """Base of every onewave exception.

    what: the thing that failed (an argument, a file, a tensor). got: the offending value, already formatted.
    allowed: what would have been accepted. next: one full sentence that tells the reader what to do.
    """

    def __init__(self, what: str, *, got: str | None = None, allowed: str | None = None, next: str | None = None):
        self.what, self.got, self.allowed, self.next = what, got, allowed, next
        text = what if got is None else f"{what}: {got}"
        if allowed is not None:
            text += f"; allowed: {allowed}"
        if next is not None:
            text = f"{text.rstrip('.')}. {next}"
        # A message stays one line whatever a file name or a header put into it.
        super().__init__(" ".join(text.split()))

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process borders, and Exception's own way is to call the class with the finished message alone.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined] # as pickle's own


class InvalidArgumentError(OnewaveError, ValueError):
    """A value the caller passed can't be honoured."""


class ShapeError(InvalidArgumentError):
    """A tensor's shape, rank or stride is wrong."""


class UnsupportedError(InvalidArgumentError):
    """The request is well formed, but this build can't do it."""


class OutOfReachError(UnsupportedError):
    """A model has weights that the format which was asked for can't hold."""


class UnverifiedError(InvalidArgumentError, TypeError):
    """An unproved schedule was passed where a VerifiedSchedule is needed."""


def check_one_of(
    what: str, value: object, allowed: Iterable[str], kind: type[InvalidArgumentError] = InvalidArgumentError
) -> str:
    """Pass on a text that is one of those allowed. Raises InvalidArgumentError, or the kind of it that is given."""
    words = [*allowed]
    if not isinstance(value, str) or value not in words:
        raise kind(what, got=shown(value), allowed=", ".join(words))
    return value


class ModelError(OnewaveError):
    """A model can't be found or read."""


class ModelNotFoundError(ModelError):
    """No model at that path, alias or repository id."""


class ConfigError(ModelError):
    """config.json or GGUF metadata is missing, malformed or describes something unknown."""


class WeightsError(ModelError):
    """A weight file is truncated, corrupt, incomplete or holds a tensor of the wrong shape."""


class TokenizerError(ModelError):
    """The tokenizer or its chat template can't be built or applied."""


class DownloadError(ModelError):
    """Fetching a model failed."""


class CapacityError(OnewaveError):
    """Not enough memory or disk."""


class BusyError(OnewaveError):
    """As many requests wait and run as are let in: the same request may succeed later."""


class StoppingError(OnewaveError):
    """The engine takes no new request, as it is about to end."""


class VerificationError(OnewaveError):
    """A schedule was not proved safe.

    kind: deadlock, race, residency, once or count; of a decode step also hand-off or memory. witness: what shows
    it, ready for JSON (a cycle of tasks; a pair and its tile; a task; a counter with what was expected and found).
    """

    def __init__(self, kind: str, message: str, witness: Mapping[str, object], *, next: str | None = None):
        self.kind, self.witness = kind, dict(witness)
        super().__init__(f"{kind}: {message}", next=next)


class WaveStalled(OnewaveError):
    """A one-launch run ended without a result, as something it waited for never came.

    stalls: one entry an SM that gave up, ready for JSON: worker, task, counter (what it waited for),
    expected, got.
    """

    def __init__(self, what: str, stalls: Sequence[Mapping[str, object]], *, next: str | None = None):
        self.stalls = tuple(dict(stall) for stall in stalls)
        shown = "; ".join(
            f"worker {stall['worker']} at {stall['task']} waited for {stall['counter']}: expected {stall['expected']}, "
            f"got {stall['got']}"
            for stall in self.stalls[:3]
        )
        more = f" (and {len(self.stalls) - 3} more workers)" if len(self.stalls) > 3 else ""
        super().__init__(what, got=(shown + more) or "no worker's report", next=next)
