"""Attention beside its peers: the same operands, the same process, rounds in a shuffled order.

Every engine's calls are recorded once (a CUDA graph where it can be), each over as many copies of the operands as
exceed the caches; then the engines take turns (`clock.time_in_rounds`). A figure is the median of the rounds' medians.
An engine that fails is a row that says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError
from onewave.bench.ceilings import Ceiling
from onewave.bench.clock import Summary, recorded, time_in_rounds
from onewave.bench.ledger import Measurement

OURS, REFERENCE = "onewave", "reference"
"""The engines that the others' ratios and errors are to."""

PREFILLS = ("attention", "attention_varlen", "attention_fp8")
"""Operators that the matmul ceiling bounds; the others read a cache."""

PREFILL_SHAPES = (
    *("4,16,4096,128", "2,16,8192,128", "1,16,16384,128"),
    *("1,32/8,8192,128", "4,32,4096,64", "16,16,1024,128"),
)
DECODE_SHAPES = (
    *("1,32/8,4096,128", "1,32/8,32768,128", "16,32/8,4096,128"),
    *("64,32/8,4096,128", "16,32/8,32768,128", "16,32/8,4096,64"),
)
# Shapes small enough for a quick run on a CPU.
SMALL_PREFILL_SHAPES = ("1,4,256,64", "2,4/2,128,64")
SMALL_DECODE_SHAPES = ("1,4/2,1024,64", "4,4/2,256,64")

# More than any cache that could serve a repetition.
_BYTES_IN_ROTATION = {"cuda": 512 << 20, "cpu": 64 << 20}
_MAX_COPIES = 64
_CPU_SCORES_BYTES = 4 << 30
# As a huge key of `hardened`: its scores stand 30 times as high as any other's.
_HUGE = 30
# Calls of a decode step's recording. Launching the graph is not the operator's time: a model's graph holds dozens.
_FEWEST_RECORDED = 16


@dataclass(frozen=True)
class AttentionShape:
    """batch sequences of `length` tokens; kv_heads divides heads."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> AttentionShape:
        """Read "batch,heads,length,head_dim", heads being "16" or "32/8" (32 on 8 KV heads)."""
        found = re.fullmatch(r"(\d{1,9}),(\d{1,9})(?:/(\d{1,9}))?,(\d{1,9}),(\d{1,9})", text.replace(" ", ""))
        sizes = [int(size or found[2]) for size in found.groups()] if found else [0]
        if not all(sizes) or sizes[1] % sizes[2]:
            allowed = "batch,heads,length,head_dim or batch,heads/kv_heads,length,head_dim, such as 1,32/8,4096,128"
            raise InvalidArgumentError("--shape", got=repr(text[:60]), allowed=allowed)
        return cls(*sizes)

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return f"{self.batch},{heads},{self.length},{self.head_dim}"


@dataclass(frozen=True)
class Operands:
    """One copy of a call's tensors.

    Prefill: q [batch, heads, length, head_dim], k, v [batch, kv_heads, length, head_dim], stored with heads inside
    tokens, as projections leave them. Decode: q [batch, heads, 1, head_dim]; k, v a cache stored as their shape says.
    seq_lens: int32 [batch], all `length`. logits: see hardened; None for scores of unit variance.
    """

    shape: AttentionShape
    causal: bool
    q: Tensor
    k: Tensor
    v: Tensor
    seq_lens: Tensor
    logits: str | None = field(default=None, kw_only=True)

    @classmethod
    def prefill(
        cls, shape: AttentionShape, causal: bool, device: torch.device, dtype: torch.dtype, logits: str | None = None
    ) -> Operands:
        q, k, v = (
            torch.randn(shape.batch, shape.length, heads, shape.head_dim, dtype=dtype, device=device).transpose(1, 2)
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        if logits is not None:
            hardened(q, k, logits)
        return cls(shape, causal, q, k, v, _lengths(shape, device), logits=logits)

    @classmethod
    def decode(cls, shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> Operands:
        q = torch.randn(shape.batch, shape.heads, 1, shape.head_dim, dtype=dtype, device=device)
        cache = (shape.batch, shape.kv_heads, shape.length, shape.head_dim)
        k, v = (torch.randn(cache, dtype=dtype, device=device) for _ in "kv")
        return cls(shape, True, q, k, v, _lengths(shape, device))

    @property
    def flops(self) -> float:
        """Operations of the two products; causal prefill counts half, as its peers count it."""
        shape, num_queries = self.shape, self.q.shape[2]
        share = 0.5 if self.causal and num_queries > 1 else 1.0
        return 4.0 * shape.batch * shape.heads * num_queries * shape.length * shape.head_dim * share

    @property
    def nbytes(self) -> int:
        """Moved at least: each operand read and the output written once."""
        return 2 * self.q.nbytes + self.k.nbytes + self.v.nbytes


@dataclass(frozen=True)
class Engine:
    """One implementation. prepare: builds a call on operands, which returns out [batch, heads, queries, head_dim].

    graph: whether its calls can be recorded (nothing is read back to the host). scores_bytes: the memory that its
    scores take per element, 0 for one that never stores them. cache_bytes: of a number in the cache that it reads; None
    for the operands' own.
    """

    name: str
    prepare: Callable[[Operands], Callable[[], Tensor]]
    graph: bool = True
    scores_bytes: int = 0
    cache_bytes: int | None = None

    def nbytes(self, operands: Operands) -> int:
        """Moved at least by a call on such operands."""
        if self.cache_bytes is None:
            return operands.nbytes
        return 2 * operands.q.nbytes + (operands.k.numel() + operands.v.numel()) * self.cache_bytes


@dataclass(frozen=True)
class AttentionResult:
    """seconds a call, or why there are none. difference: largest one of the output to ours. error: root of the mean
    square of its difference to the reference's output, by that output's. ratio: of speeds, ours to this engine's."""

    operator: str
    engine: str
    operands: tuple[AttentionShape, bool]
    flops: float
    nbytes: int
    seconds: Summary | None
    failure: str | None = None
    difference: float | None = None
    error: float | None = None
    ratio: float | None = None
    logits: str | None = None

    @property
    def tflops(self) -> float | None:
        """10^12 operations a second at the median."""
        return self.flops * 1e-12 / self.seconds.p50 if self.seconds else None

    @property
    def terabytes_per_second(self) -> float | None:
        """10^12 bytes a second at the median."""
        return self.nbytes * 1e-12 / self.seconds.p50 if self.seconds else None

    def share(self, matmul: Ceiling, read: Ceiling) -> float | None:
        """Return the share of the bounding ceiling: matmul for prefill, read for a decode step."""
        if self.tflops is None or self.terabytes_per_second is None:
            return None
        return self.tflops / matmul.value if self.operator in PREFILLS else self.terabytes_per_second * 1e3 / read.value

    def details(self, dtype: str, matmul: Ceiling, read: Ceiling) -> dict[str, Any]:
        shape, causal = self.operands
        return {
            "operator": self.operator,
            "implementation": self.engine,
            "shape": str(shape),
            "causal": causal,
            "dtype": dtype,
            "us": self.seconds.p50 * 1e6 if self.seconds else None,
            "tflops": self.tflops,
            "terabytes_per_second": self.terabytes_per_second,
            "bytes": self.nbytes,
            "ceiling_share": self.share(matmul, read),
            "onewave_speed_ratio": self.ratio,
            "max_difference": self.difference,
            "rms_error": self.error,
            "failure": self.failure,
        } | ({} if self.logits is None else {"logits": self.logits})

    def measurement(self, dtype: str, matmul: Ceiling, read: Ceiling) -> Measurement | None:
        """The ledger's line; None for an engine that failed."""
        if self.seconds is None:
            return None
        (shape, causal), prefill = self.operands, self.operator in PREFILLS
        model = f"{shape} {'causal' if causal else 'full'}" if prefill else str(shape)
        model += "" if self.logits is None else f" logits {self.logits}"
        extra = {k: v for k, v in self.details(dtype, matmul, read).items() if k not in ("operator", "us", "failure")}
        return Measurement(model, self.operator, "us", self.seconds.scaled(1e6), matmul if prefill else read, extra)


def compare(
    operator: str, engines: Sequence[Engine], make: Callable[[], Operands], *, rounds: int
) -> list[AttentionResult]:
    """Time every engine on the same operands. rounds: how often each has its turn.

    Engines that store all scores are run where these fit most of a GPU's free memory, 4 GiB on a CPU.
    """
    first = make()
    device = first.q.device
    max_scores_bytes = torch.cuda.mem_get_info(device)[0] * 3 // 4 if device.type == "cuda" else _CPU_SCORES_BYTES
    copies = min(_MAX_COPIES, max(2, -(-_BYTES_IN_ROTATION[device.type] // first.nbytes)))
    operands = [first, *(make() for _ in range(copies - 1))]
    failures: dict[str, str] = {}
    outputs: dict[str, Tensor] = {}
    runs: dict[str, tuple[Callable[[], object], int]] = {}
    scores = first.shape.batch * first.shape.heads * first.q.shape[2] * first.shape.length
    with torch.inference_mode():
        for engine in engines:
            if scores * engine.scores_bytes > max_scores_bytes:
                failures[engine.name] = f"not run: its scores take {scores * engine.scores_bytes / 2**30:.0f} GiB"
                continue
            try:
                # One copy is enough for an engine that stores its scores: they exceed any cache.
                calls = [engine.prepare(each) for each in (operands[:1] if engine.scores_bytes else operands)]
                outputs[engine.name] = calls[0]().clone()
                calls = calls * repetitions(operator, engine, len(calls), device)
                runs[engine.name] = (recorded(calls, device, graph=engine.graph), len(calls))
            except Exception as error:  # a peer may fail in any way; the table says how
                failures[engine.name] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        seconds = time_in_rounds(runs, device, rounds=rounds)
    if device.type == "cuda":
        # The graphs' pools and the scores; the next shape needs them elsewhere.
        runs.clear()
        torch.cuda.empty_cache()
    ours = seconds.get(OURS)
    return [
        AttentionResult(
            operator=operator,
            engine=engine.name,
            operands=(first.shape, first.causal),
            flops=first.flops,
            nbytes=engine.nbytes(first),
            seconds=seconds.get(engine.name),
            failure=failures.get(engine.name),
            difference=_compared(outputs, engine.name, OURS, lambda off, _: off.abs().max().item()),
            error=_compared(outputs, engine.name, REFERENCE, lambda off, by: _rms(off) / (_rms(by) or 1.0)),
            ratio=seconds[engine.name].p50 / ours.p50 if ours and engine.name in seconds else None,
            logits=first.logits,
        )
        for engine in engines
    ]


def repetitions(operator: str, engine: Engine, num_calls: int, device: torch.device) -> int:
    """How often a recording goes through its calls: more than once where a decode step's operands are few and large."""
    if operator in PREFILLS or device.type != "cuda" or not engine.graph:
        return 1
    return -(-_FEWEST_RECORDED // num_calls)


def _compared(
    outputs: Mapping[str, Tensor], name: str, other: str, measure: Callable[[Tensor, Tensor], float]
) -> float | None:
    """Measure (float32 difference, other output), where there are two outputs of one shape."""
    found, by = outputs.get(name), outputs.get(other)
    if found is None or by is None or found.shape != by.shape:
        return None
    return measure(found.float() - by.float(), by.float())


def _rms(values: Tensor) -> float:
    return values.pow(2).mean().item() ** 0.5


def hardened(q: Tensor, k: Tensor, logits: str) -> None:
    """Make scores adversarial in place: "first" or "last" scales that key 30 times, "x16" (any number) all scores.

    What follows a row's maximum from tile to tile has most to do where it comes late. Raises InvalidArgumentError.
    """
    scaled = re.fullmatch(r"x(\d{1,4}(?:\.\d{1,4})?)", logits)
    if logits in ("first", "last"):
        k[:, :, 0 if logits == "first" else -1] *= _HUGE
    elif scaled:
        for tensor in (q, k):
            tensor *= float(scaled[1]) ** 0.5
    else:
        raise InvalidArgumentError("--logits", got=repr(logits[:60]), allowed="first, last or a factor such as x16")


def _lengths(shape: AttentionShape, device: torch.device) -> Tensor:
    return torch.full((shape.batch,), shape.length, dtype=torch.int32, device=device)
