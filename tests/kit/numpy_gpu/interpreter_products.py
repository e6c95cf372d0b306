"""Products of Triton's interpreter, summed in an order that no shape changes.

NumPy leaves them to a BLAS, which picks its loops, and with them the order of a sum, by a product's shape and the
processor: on some a row has other bits beside 63 others than alone. A GPU's tensor cores make no such difference, and
tests of whole kernels compare bits.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np


class _NumPy(ModuleType):
    """NumPy, with another matmul."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def matmul(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
        return np.einsum("...mk,...kn->...mn", np.ascontiguousarray(a), np.ascontiguousarray(b), dtype=dtype)


def sum_in_one_order() -> None:
    """Have the interpreter multiply so, in this process."""
    from triton.runtime import interpreter

    interpreter.np = _NumPy("numpy")
