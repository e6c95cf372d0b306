"""Helpers of the float32 CPU kernels: arrays from addresses, and an exponential that vectorises.

Kernels take addresses as integers because unpacking an array argument costs more than the smallest of them runs.
"""

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

# Sums may be reassociated into vectors and contracted into multiply-adds; NaN and infinity keep their meaning.
FAST = {"reassoc", "contract", "nsz"}


@intrinsic
def _pointer(_context, address):
    def emit(_ctx, builder, _signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), emit


@intrinsic
def _as_float(_context, bits):
    def emit(_ctx, builder, _signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), emit


@njit(inline="always")
def floats(address, length):
    """float32 [length] at an address."""
    return carray(_pointer(address), (length,), np.float32)


@njit(inline="always")
def doubles(address, length):
    """float64 [length] at an address."""
    return carray(_pointer(address), (length,), np.float64)


@njit(inline="always")
def bytes_at(address, length):
    """uint8 [length] at an address."""
    return carray(_pointer(address), (length,), np.uint8)


@njit(inline="always")
def integers(address, length):
    """int64 [length] at an address."""
    return carray(_pointer(address), (length,), np.int64)


@njit(inline="always")
def e4m3(code):
    """float32 of an e4m3 byte: its bits at a float32's place are the number over 2^120."""
    size = np.int32(code) & np.int32(127)
    bits = np.int32(size << np.int32(20)) | np.int32((np.int32(code) & np.int32(128)) << np.int32(24))
    value = _as_float(np.int32(bits)) * np.float32(2.0**120)
    return np.float32(np.nan) if size == 127 else value


@njit(inline="always", fastmath=FAST)
def exp(x):
    """e^x for float32 within 2 units in the last place; inputs beyond +-87 are clamped.

    Splits x/ln 2 into an integer, which becomes the exponent bits, and a fraction within +-1/2, whose 2^f is a Taylor
    polynomial (the seventh power of ln 2 / 2 over 7! is below float32's rounding).
    """
    x = min(max(x, np.float32(-87.0)), np.float32(87.0))
    whole = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    # Cody-Waite: ln 2 in two parts keeps the difference exact to the last bit.
    r = (x - whole * np.float32(0.693359375)) + whole * np.float32(2.12194440e-4)
    p = np.float32(1.0 / 5040.0)
    p = p * r + np.float32(1.0 / 720.0)
    p = p * r + np.float32(1.0 / 120.0)
    p = p * r + np.float32(1.0 / 24.0)
    p = p * r + np.float32(1.0 / 6.0)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1.0)
    p = p * r + np.float32(1.0)
    return p * _as_float(np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)))
