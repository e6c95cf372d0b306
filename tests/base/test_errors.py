"""Errors keep what they carry on their way between processes."""

import copy
import pickle

import pytest

from onewave.base import errors
from onewave.base.errors import OnewaveError, VerificationError, WaveStalled

STALL = {"worker": 3, "task": "gate_up", "counter": "x", "expected": 2, "got": 1}


def plain() -> list[OnewaveError]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OnewaveError)]
    given = {"got": "7", "allowed": "1 to 6", "next": "Roll again."}
    return [kind("die", **given) for kind in kinds if kind not in (VerificationError, WaveStalled)]


@pytest.mark.parametrize(
    "error",
    [
        *plain(),
        VerificationError("deadlock", "a waits for a", {"cycle": ["a", "a"]}, next="Cut it."),
        WaveStalled("a launch", [STALL], next="Launch again."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_a_process_border(error: OnewaveError) -> None:
    for there in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(there) is type(error)
        assert (str(there), there.args, vars(there)) == (str(error), error.args, vars(error))
