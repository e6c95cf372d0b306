"""Arguments of a wrong type: one error that names them, from every operator that people call."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onewave import ops
from onewave.base.errors import InvalidArgumentError
from onewave.compat.flash_attn import flash_attn_func

Q = torch.zeros(1, 2, 4, 32)
CACHE = torch.zeros(1, 2, 9, 32)
LENGTHS = torch.tensor([5], dtype=torch.int32)
STARTS = torch.tensor([0, 4], dtype=torch.int32)
SQUARE = torch.zeros(64, 64)
NO: Any = None


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: ops.attention(NO, Q, Q), "attention: q: None; allowed: a torch.Tensor"),
        (lambda: ops.attention(Q, [1], Q), "attention: k: list; allowed: a torch.Tensor"),
        (lambda: ops.attention_varlen(Q[0], Q[0], NO, STARTS, STARTS, 4, 4), "attention_varlen: v: None"),
        (lambda: ops.attention(Q, Q, Q, scale="x"), "attention: scale: 'x'; allowed: a finite number"),
        (lambda: ops.attention(Q, Q, Q, scale=float("nan")), "attention: scale: nan; allowed: a finite number"),
        (lambda: ops.attention(Q, Q, Q, softcap="x"), "attention: softcap: 'x'; allowed: a finite number"),
        (lambda: ops.decode_attention(NO, CACHE, CACHE, LENGTHS), "decode_attention: q: None"),
        (lambda: ops.decode_attention(Q[:, :, 0], CACHE, CACHE, [5]), "decode_attention: seq_lens: list"),
        (lambda: ops.masked_multihead_attention(NO, CACHE, CACHE, LENGTHS), "masked_multihead_attention: qkv: None"),
        (lambda: ops.ffn(NO, SQUARE, SQUARE), "ffn: x: None"),
        (lambda: ops.ffn(SQUARE, 3, SQUARE), "ffn: w_up: 3"),
        (lambda: ops.linear_int8(NO, SQUARE), "linear_int8: x: None"),
        (lambda: ops.linear_fp8(SQUARE, SQUARE, [1.0]), "linear_fp8: x_scale: list"),
        (lambda: ops.quantize_rows(NO), "quantize_rows: x: None"),
        (lambda: flash_attn_func(NO, Q, Q), "flash_attn_func: q: None"),
        (lambda: flash_attn_func(Q, Q, Q, window_size=3), "window_size: 3; allowed: (left, right)"),
    ],
)
def test_what_is_wrong_is_named(call: Callable[[], object], complaint: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(complaint)):
        call()
