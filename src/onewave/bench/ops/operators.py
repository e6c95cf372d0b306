"""Speed of the decoder's operators one by one, at the shapes of a model, beside what PyTorch offers for the same work.

Every trial works on as many copies of its operands as it takes to exceed the caches, in turn (see clock.py), and counts
the bytes that the operation must move at least: weights, keys and values as they are stored, activations once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from onewave.base.errors import UnsupportedError
from onewave.base.quantized import QuantizedRows
from onewave.bench.ceilings import Ceiling
from onewave.bench.clock import Summary, time_calls
from onewave.bench.ledger import Measurement
from onewave.models.config.model_config import ModelConfig
from onewave.ops.append_kv import append_kv
from onewave.ops.append_kv.reference import append_kv as append_kv_in_torch
from onewave.ops.decode_attention import decode_attention
from onewave.ops.decode_attention.reference import decode_attention as decode_attention_in_torch
from onewave.ops.linear import PackedWeight, linear, pack
from onewave.ops.linear.packed import FORMATS, LANES
from onewave.ops.rms_norm import add_rms_norm
from onewave.ops.rms_norm.reference import add_rms_norm as add_rms_norm_in_torch
from onewave.ops.swiglu import swiglu
from onewave.ops.swiglu.reference import swiglu as swiglu_in_torch

OPERATORS = ("add_rms_norm", "append_kv", "decode_attention", "linear", "swiglu")
# More than any cache that could serve a repetition.
_BYTES_IN_ROTATION = 512 << 20
_MAX_COPIES = 256

_Call = Callable[[], object]


@dataclass(frozen=True)
class Trial:
    """One operator, one implementation, one shape. nbytes: moved by a call. make: builds a call on fresh operands."""

    operator: str
    implementation: str
    shape: str
    tokens: int
    nbytes: int
    make: Callable[[], _Call]


@dataclass(frozen=True)
class OperatorResult:
    """A trial's seconds a call."""

    trial: Trial
    seconds: Summary

    @property
    def gigabytes_per_second(self) -> float:
        """10^9 bytes a second at the median."""
        return self.trial.nbytes * 1e-9 / self.seconds.p50

    def measurement(self, model: str, dtype: str, ceiling: Ceiling) -> Measurement:
        trial = self.trial
        extra = {
            "implementation": trial.implementation,
            "shape": trial.shape,
            "tokens": trial.tokens,
            "dtype": dtype,
            "bytes": trial.nbytes,
            "ceiling_share": self.gigabytes_per_second / ceiling.value,
        }
        return Measurement(model, trial.operator, "us", self.seconds.scaled(1e6), ceiling, extra)


def check_weight_format(config: ModelConfig, weight_format: str) -> None:
    """Refuse, with UnsupportedError, a format of blocks that do not fill a model's rows."""
    for width in (config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size):
        form = FORMATS[weight_format]
        if not form.is_dense and width % form.columns:
            got, others = f"a matrix with rows of {width}", [n for n, form in FORMATS.items() if form.is_dense]
            next = f"Name one of {', '.join(others)}."
            raise UnsupportedError(
                f"--cpu-format {weight_format}", got=got, allowed=f"multiples of {form.columns}", next=next
            )


def measure(trial: Trial, device: torch.device, *, reps: int) -> OperatorResult:
    """Time a trial. The median of `reps` rotations through all copies."""
    copies = min(_MAX_COPIES, max(2, -(-_BYTES_IN_ROTATION // trial.nbytes)))
    with torch.inference_mode():
        return OperatorResult(trial, time_calls([trial.make() for _ in range(copies)], device, reps=reps))


def trials(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, *, tokens: int, context: int, weight_format: str
) -> Iterator[Trial]:
    """Every operator of a decode step of `tokens` sequences, `context` keys each.

    weight_format: a key of ops.linear.packed.FORMATS, how our CPU matrices are stored; a GPU's are dense.
    """
    make = _Operands(config, device, dtype, tokens, context)
    hidden, inner = config.hidden_size, config.intermediate_size
    kv_width = 2 * config.num_kv_heads * config.head_dim
    qkv_width = config.num_heads * config.head_dim + kv_width
    heads = f"{config.num_heads}/{config.num_kv_heads}x{config.head_dim}, {context} keys"
    # Name, shape, elements that a call moves, its operands, and the operator by us and in PyTorch.
    small = (
        ("add_rms_norm", f"{hidden}", 4 * hidden, make.norm, (add_rms_norm, add_rms_norm_in_torch)),
        ("append_kv", f"{qkv_width}", 2 * qkv_width, make.append, (append_kv, append_kv_in_torch)),
        ("decode_attention", heads, context * kv_width, make.attention, (decode_attention, decode_attention_in_torch)),
        ("swiglu", f"{inner}", 3 * inner, make.gate_up, (swiglu, swiglu_in_torch)),
    )
    for operator, shape, elements, operands, functions in small:
        for name, function in zip(("onewave", "torch"), functions, strict=True):
            if name == "torch" and operator == "decode_attention" and device.type == "cuda":
                continue  # the reference reads lengths on the host, which no graph can hold
            nbytes = tokens * elements * dtype.itemsize
            yield Trial(operator, name, shape, tokens, nbytes, lambda f=function, o=operands: o(f))
    attended = config.num_heads * config.head_dim
    products = ((qkv_width, hidden), (hidden, attended), (2 * inner, hidden), (hidden, inner))
    for rows, cols in (*products, (config.vocab_size, hidden)):
        yield from _linear_trials(make, rows, cols, weight_format)


def _linear_trials(make: _Operands, rows: int, cols: int, weight_format: str) -> Iterator[Trial]:
    def trial(name: str, bytes_a_weight: float, build: Callable[[], _Call]) -> Trial:
        return Trial("linear", name, f"{rows}x{cols}", make.tokens, int(rows * cols * bytes_a_weight), build)

    def dense(dtype: torch.dtype, function: Callable[[Tensor, Tensor], object]) -> Callable[[], _Call]:
        def build() -> _Call:
            x, weight = make.random(make.tokens, cols).to(dtype), make.random(rows, cols).to(dtype)
            return lambda: function(x, weight)

        return build

    if make.device.type == "cuda":
        yield trial("onewave", make.dtype.itemsize, dense(make.dtype, linear))
        yield trial("torch", make.dtype.itemsize, dense(make.dtype, F.linear))
        return

    def packed() -> _Call:
        x, weight = make.random(make.tokens, cols), _random_packed(weight_format, rows, cols)
        return lambda: linear(x, weight)

    def int4() -> _Call:
        x = make.random(make.tokens, cols).bfloat16()
        weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.randint(16, (rows, cols)).int(), 1)
        scales = torch.rand(cols // 32, rows, 2).bfloat16()
        return lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, 32, scales)

    def int8() -> _Call:
        x = make.random(make.tokens, cols).bfloat16()
        weight, scales = torch.randint(-128, 128, (rows, cols)).to(torch.int8), torch.rand(rows).bfloat16()
        return lambda: torch.ops.aten._weight_int8pack_mm(x, weight, scales)

    form = FORMATS[weight_format]
    yield trial(f"onewave {weight_format}", form.row_bytes / form.columns, packed)
    yield trial("torch float32", 4, dense(torch.float32, F.linear))
    yield trial("torch bfloat16", 2, dense(torch.bfloat16, F.linear))
    if cols % 32 == 0:
        yield trial("torch int4pack bfloat16", 0.625, int4)
    yield trial("torch int8pack bfloat16", 1, int8)


class _Operands:
    """Makes random operands of one step's shape and closes a call over them."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype, tokens: int, context: int):
        self.config, self.device, self.dtype = config, device, dtype
        self.tokens, self.context = tokens, context
        self.slots = torch.arange(tokens, device=device)
        self.lengths = torch.full((tokens,), context, device=device)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def norm(self, function: Callable[..., object]) -> _Call:
        hidden = self.config.hidden_size
        x, residual, weight = self.random(self.tokens, hidden), self.random(self.tokens, hidden), self.random(hidden)
        return lambda: function(x, residual, weight, 1e-5)

    def gate_up(self, function: Callable[..., object]) -> _Call:
        x = self.random(self.tokens, 2 * self.config.intermediate_size)
        return lambda: function(x)

    def _caches(self) -> tuple[Tensor, Tensor]:
        shape = (self.tokens, self.config.num_kv_heads, self.context, self.config.head_dim)
        return self.random(*shape), self.random(*shape)

    def append(self, function: Callable[..., object]) -> _Call:
        config = self.config
        qkv = self.random(self.tokens, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        rotary = self.random(self.tokens, config.rope.rotary_dim).float()
        k, v = self._caches()
        at = self.lengths - 1
        return lambda: function(qkv, rotary, k, v, self.slots, at, num_heads=config.num_heads)

    def attention(self, function: Callable[..., object]) -> _Call:
        q = self.random(self.tokens, self.config.num_heads, 1, self.config.head_dim)
        k, v = self._caches()
        return lambda: function(q, k, v, self.lengths)


def _random_packed(kind: str, rows: int, cols: int) -> PackedWeight:
    """A packed matrix of random values and ordinary scales; float formats hold small numbers."""
    form = FORMATS[kind]
    rng = np.random.default_rng(0)
    width = form.row_bytes // form.columns
    bytes_a_row = cols * width if form.is_dense else cols // form.columns * form.row_bytes
    data = rng.integers(0, 256, (-(-rows // LANES) * LANES, bytes_a_row), dtype=np.uint8)[:rows]
    for byte in form.halves:
        # The high byte of an fp16 scale: about 2^-7.
        data.reshape(rows, -1, form.row_bytes)[..., byte + 1] = 0x20
    if form.is_dense:
        # The high byte of a float's sign and exponent: about 2^-1.
        data[:, width - 1 :: width] = 0x3F
    return pack(QuantizedRows(kind, data, (rows, cols)))
