"""One-byte products on a CPU: int8 by PyTorch's integer matmul, e4m3 in float64, where every sum is exact.

A product of two e4m3 numbers is a multiple of 2^-18 below 2^18, so 53 bits hold the sum of up to 2^17 of them, whatever
the order.
"""

import numpy as np
import torch
from torch import Tensor

from onewave.ops.choice import Choice
from onewave.ops.cpu.math_impl import bytes_at, doubles, e4m3, floats, integers
from onewave.ops.cpu.team_impl import kernel
from onewave.ops.cpu.team_impl import run as run_in_team
from onewave.ops.scaled_linear.call import ScaledCall
from onewave.ops.scaled_linear.reference import finish

# Tokens that a row's numbers are multiplied by once they are widened: their sums stay in registers.
_TOKENS = 4


@kernel
def _e4m3_rows(table_at, first, last):
    table = integers(table_at, 19)
    x_at, w_at, out_at, tokens, rows, cols = table[1], table[2], table[3], table[4], table[5], table[6]
    for row in range(first, last):
        codes = bytes_at(w_at + row * cols, cols)
        for token in range(0, tokens, _TOKENS):
            at = x_at + token * cols * 8
            some = min(_TOKENS, tokens - token)
            # A token past the last one is the last one again.
            a, b = doubles(at, cols), doubles(at + min(1, some - 1) * cols * 8, cols)
            c, d = doubles(at + min(2, some - 1) * cols * 8, cols), doubles(at + (some - 1) * cols * 8, cols)
            sa, sb, sc, sd = 0.0, 0.0, 0.0, 0.0
            if some == 1:
                for i in range(cols):
                    sa += np.float64(e4m3(codes[i])) * a[i]
                floats(out_at + (token * rows + row) * 4, 1)[0] = sa
                continue
            for i in range(cols):
                w = np.float64(e4m3(codes[i]))
                sa += w * a[i]
                sb += w * b[i]
                sc += w * c[i]
                sd += w * d[i]
            out = floats(out_at + (token * rows + row) * 4, (some - 1) * rows + 1)
            out[0] = sa
            out[rows] = sb
            if some > 2:
                out[2 * rows] = sc
            if some > 3:
                out[3 * rows] = sd


def run(call: ScaledCall, choice: Choice) -> Tensor:
    """Return the result."""
    x, weight = call.x.contiguous(), call.weight.contiguous()
    (tokens, cols), rows = x.shape, weight.shape[0]
    if x.dtype is torch.int8:
        if cols < 2:  # PyTorch 2.13 takes one column's stride for another's
            x, weight = (torch.nn.functional.pad(each, (0, 2 - cols)) for each in (x, weight))
        sums = torch.ops.aten._int_mm(x, weight.t())
    else:
        sums = torch.empty(tokens, rows)
        wide = x.double()
        addresses = (wide.data_ptr(), weight.data_ptr(), sums.data_ptr())
        if tokens:
            run_in_team(_e4m3_rows, rows, (*addresses, tokens, rows, cols), alone=rows * cols * tokens < 1 << 14)
    return finish(sums, call.epilogue, call.out_dtype)
