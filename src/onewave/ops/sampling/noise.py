"""Random numbers that depend on nothing but (stream, step): a counter-based generator, SplitMix64's output function.

They are made on the host, in exact integer arithmetic, many steps at a time: the same bits on every device, in every
batch and in every process, at a cost of nanoseconds a step.
Source: Steele, Lea & Flood 2014, doi:10.1145/2660193.2660195.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def stream_key(*parts: int) -> int:
    """Hash whole numbers into the 64-bit name of a random stream; the order of the parts matters."""
    key = 0
    for part in parts:
        key = _mix(key ^ _mix((part + _GOLDEN) & _MASK))
    return key


def uniforms(keys: Sequence[int], first_steps: Sequence[int], count: int) -> NDArray[np.float64]:
    """Return [rows, count] multiples of 2**-53 in [0, 1): row i holds steps first_steps[i] and on of keys[i]."""
    steps = np.array(first_steps, dtype=np.uint64)[:, None] + np.arange(1, count + 1, dtype=np.uint64)
    z = np.array(keys, dtype=np.uint64)[:, None] + steps * np.uint64(_GOLDEN)  # wraps, as it should
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)
