"""Host time of eager calls: how long Python is busy until an operator's kernels are launched, beside PyTorch's.

Work is small, so that the GPU keeps up: its queue never fills, and a call never waits for it. All operators and their
peers take turns, in an order drawn anew each round; a turn is 100 calls (5 on a CPU), timed by the performance counter,
and a synchronisation behind them, which is not. On a CPU the figure is the whole call.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from onewave.bench.clock import Summary, summarize
from onewave.bench.ledger import Measurement
from onewave.models.config.model_config import ModelConfig
from onewave.ops.append_kv import append_kv
from onewave.ops.attention import attention
from onewave.ops.decode_attention import decode_attention
from onewave.ops.linear import linear, linear_swiglu
from onewave.ops.rms_norm import add_rms_norm, rms_norm
from onewave.ops.swiglu import swiglu

OURS, PEER = "onewave", "torch"

_CALLS, _WARMUP = {"cuda": 100, "cpu": 5}, {"cuda": 10, "cpu": 1}
_ROWS, _PROMPT, _CONTEXT = 4, 64, 128
# Rows of wide matrices: the GPU would be slower than the host with whole ones.
_WIDE = 1024


@dataclass(frozen=True)
class HostTrial:
    """An operator by us, and what PyTorch has for the same work, if anything."""

    operator: str
    shape: str
    calls: dict[str, Callable[[], object]]


@dataclass(frozen=True)
class HostResult:
    """Seconds a call of ours and of PyTorch's, by name."""

    trial: HostTrial
    seconds: dict[str, Summary]

    @property
    def ratio(self) -> float | None:
        """Our time by PyTorch's, at the medians."""
        return self.seconds[OURS].p50 / self.seconds[PEER].p50 if PEER in self.seconds else None

    def measurements(self, model: str, dtype: str) -> list[Measurement]:
        extra = {"shape": self.trial.shape, "dtype": dtype, "host": True, "ratio": self.ratio}
        return [
            Measurement(model, self.trial.operator, "us", seconds.scaled(1e6), None, extra | {"implementation": name})
            for name, seconds in self.seconds.items()
        ]


def host_trials(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> list[HostTrial]:
    """The operators of a forward pass on a model's rows and heads: 4 tokens, or a prompt of 64 for attention."""
    hidden, inner, heads, kv_heads = config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads
    head_dim, qkv_width = config.head_dim, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    q, k, v = (made(1, number, _PROMPT, head_dim) for number in (heads, kv_heads, kv_heads))
    step, cached_k, cached_v = (
        made(_ROWS, heads, 1, head_dim),
        *(made(_ROWS, kv_heads, _CONTEXT, head_dim) for _ in "kv"),
    )
    lengths = torch.full((_ROWS,), _CONTEXT, dtype=torch.int32, device=device)
    places = torch.arange(_ROWS, device=device)
    x, residual, norm, gate_up = made(_ROWS, hidden), made(_ROWS, hidden), made(hidden), made(_ROWS, 2 * inner)
    weight, both, qkv = made(_WIDE, hidden), made(2 * _WIDE, hidden), made(_ROWS, qkv_width)
    rotary = torch.randn(_ROWS, config.rope.rotary_dim, device=device)
    sdpa, grouped = F.scaled_dot_product_attention, heads != kv_heads
    of_heads = f"{heads}/{kv_heads}x{head_dim}"

    def swiglu_by_torch(given: Tensor) -> Tensor:
        gate, up = given.chunk(2, -1)
        return F.silu(gate) * up

    def pair(operator: str, shape: str, ours: Callable[[], object], peer: Callable[[], object] | None) -> HostTrial:
        return HostTrial(operator, shape, {OURS: ours} | ({} if peer is None else {PEER: peer}))

    return [
        pair(
            "attention", f"1 x {of_heads}, {_PROMPT} tokens", lambda: attention(q, k, v, causal=True),
            lambda: sdpa(q, k, v, is_causal=True, enable_gqa=grouped),
        ),
        pair(
            "decode_attention", f"{_ROWS} x {of_heads}, {_CONTEXT} keys",
            lambda: decode_attention(step, cached_k, cached_v, lengths),
            lambda: sdpa(step, cached_k, cached_v, enable_gqa=grouped),
        ),
        pair(
            "append_kv", f"{_ROWS}x{qkv_width}",
            lambda: append_kv(qkv, rotary, cached_k, cached_v, places, places, num_heads=heads), None,
        ),
        pair(
            "rms_norm", f"{_ROWS}x{hidden}", lambda: rms_norm(x, norm, 1e-5),
            lambda: F.rms_norm(x, (hidden,), norm, 1e-5),
        ),
        pair(
            "add_rms_norm", f"{_ROWS}x{hidden}", lambda: add_rms_norm(x, residual, norm, 1e-5),
            lambda: F.rms_norm(x + residual, (hidden,), norm, 1e-5),
        ),
        pair("swiglu", f"{_ROWS}x{2 * inner}", lambda: swiglu(gate_up), lambda: swiglu_by_torch(gate_up)),
        pair("linear", f"1x{_WIDE}x{hidden}", lambda: linear(x[:1], weight), lambda: F.linear(x[:1], weight)),
        pair("linear", f"{_ROWS}x{_WIDE}x{hidden}", lambda: linear(x, weight), lambda: F.linear(x, weight)),
        pair(
            "linear_swiglu", f"{_ROWS}x{2 * _WIDE}x{hidden}", lambda: linear_swiglu(x, both),
            lambda: swiglu_by_torch(F.linear(x, both)),
        ),
    ]  # fmt: skip


def measure_host(trials: Sequence[HostTrial], device: torch.device, *, rounds: int) -> list[HostResult]:
    """Time every call in turns; a figure is the median of so many rounds."""
    found: list[dict[str, list[float]]] = [{name: [] for name in trial.calls} for trial in trials]
    order = [(at, name) for at, trial in enumerate(trials) for name in trial.calls]
    draw = random.Random(0)
    with torch.inference_mode():
        for _ in range(rounds):
            draw.shuffle(order)
            for at, name in order:
                found[at][name].append(_turn(trials[at].calls[name], device))
    return [
        HostResult(trial, {name: summarize(values) for name, values in times.items()})
        for trial, times in zip(trials, found, strict=True)
    ]


def _turn(call: Callable[[], object], device: torch.device) -> float:
    """Seconds a call."""
    calls = _CALLS[device.type]
    for _ in range(_WARMUP[device.type]):
        call()
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = (time.perf_counter() - start) / calls
    _synchronize(device)
    return seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
