"""Triton's interpreter for tests: products summed in an order that no shape changes, and less time for what repeats.

NumPy leaves products to a BLAS, which picks its loops, and with them the order of a sum, by a product's shape and the
processor: on some a row has other bits beside 63 others than alone. A GPU's tensor cores make no such difference, and
tests of whole kernels compare bits.

Half the interpreter's time went to what is the same each time: a table of dtypes for each array, a search of Triton's
modules for each call of a function, the shape of each tensor anew.
"""

import math
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np


def _matmul(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
    return np.einsum("...mk,...kn->...mn", np.ascontiguousarray(a), np.ascontiguousarray(b), dtype=dtype)


def prepare() -> None:
    """Change the interpreter so, in this process."""
    from triton.language import core
    from triton.runtime import interpreter

    interpreter.np = ModuleType("numpy")
    vars(interpreter.np).update(vars(np) | {"matmul": _matmul})
    look_up, patch = interpreter._get_np_dtype, interpreter._patch_lang
    dtypes: dict[str, np.dtype[Any]] = {}

    def numpy_dtype(dtype: Any) -> np.dtype[Any]:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = look_up(dtype)
        return dtypes[name]

    @cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def new_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(type.shape if type.is_block() else ())

    called: set[Any] = set()  # by the launch that runs: what they see is patched until its end
    launch = interpreter.GridExecutor.__call__

    def launch_alone(self: Any, *args: Any, **options: Any) -> None:
        called.clear()
        launch(self, *args, **options)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        if self.fn not in called:
            called.add(self.fn)
            patch(self.fn)
        function = self.rewrite()
        try:
            return function(*args, **options)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._get_np_dtype = numpy_dtype
    core.tensor.__init__ = new_tensor
    interpreter.GridExecutor.__call__ = launch_alone
    interpreter.InterpretedFunction.__call__ = call
