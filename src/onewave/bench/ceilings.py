"""Measures a device's ceilings, in the same run as the figures compared with them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onewave.bench.clock import Summary, time_calls
from onewave.ops.stream_read import stream_read

_CUDA_READ_BYTES = 4 * 2**30
# Far beyond the last-level cache of any processor whose memory is worth asking about.
_CPU_READ_BYTES = 2**30
_CUDA_MATRIX, _CPU_MATRIX = 8192, 1024


@dataclass(frozen=True)
class Ceiling:
    """name: what is bounded. value: the best that was seen, in `unit`. method: how. summary: of the samples."""

    name: str
    value: float
    unit: str
    method: str
    summary: Summary


def read_bandwidth(device: torch.device, *, num_bytes: int | None = None, reps: int = 10) -> Ceiling:
    """Bytes read from memory a second, in GB/s (10^9): the median of a streaming read.

    On CUDA our streaming-sum kernel over several GiB; on a CPU the best of several of PyTorch's reductions with all the
    threads it is set to. num_bytes: size of the buffer, a multiple of 64 KiB.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        size = num_bytes or min(_CUDA_READ_BYTES, free // 2)
        buffer = torch.ones(size // 65536 * 16384, dtype=torch.int32, device=device)
        methods: dict[str, Callable[[], object]] = {"streaming sum kernel": lambda: stream_read(buffer)}
    else:
        # Every word is the float 1.0: sums of denormals would be slow.
        buffer = torch.full(((num_bytes or _CPU_READ_BYTES) // 4,), 0x3F800000, dtype=torch.int32)
        methods = _cpu_reads(buffer)
    best: Ceiling | None = None
    for method, call in methods.items():
        seconds = time_calls([call], device, reps=reps, warmup=1, graph=False)
        rates = _inverted(seconds, buffer.nbytes * 1e-9)
        if best is None or rates.p50 > best.value:
            best = Ceiling("read bandwidth", rates.p50, "GB/s", method, rates)
    assert best is not None
    return best


def matmul_rate(device: torch.device, *, size: int | None = None, reps: int = 10) -> Ceiling:
    """Floating-point operations a second of PyTorch's bf16 product of two size x size matrices, in TFLOP/s.

    Random values: products of zeros draw less power and run faster. size: 8192 on CUDA, 1024 on a CPU.
    """
    size = size or (_CUDA_MATRIX if device.type == "cuda" else _CPU_MATRIX)
    generator = torch.Generator(device).manual_seed(0)

    def matrix() -> Tensor:
        return torch.randn(size, size, generator=generator, device=device, dtype=torch.float32).to(torch.bfloat16)

    a, b = matrix(), matrix()
    seconds = time_calls([lambda: torch.mm(a, b)], device, reps=reps, warmup=3)
    rates = _inverted(seconds, 2 * size**3 * 1e-12)
    return Ceiling("bf16 matmul", rates.p50, "TFLOP/s", f"torch.mm {size}^3", rates)


def _cpu_reads(buffer: Tensor) -> dict[str, Callable[[], object]]:
    """PyTorch reductions that read every byte once. buffer: int32."""
    floats, longs = buffer.view(torch.float32), buffer.view(torch.int64)
    return {
        "torch.sum float32": lambda: torch.sum(floats),
        "torch.sum int64": lambda: torch.sum(longs),
        "torch.amax float32": lambda: torch.amax(floats),
    }


def _inverted(seconds: Summary, work: float) -> Summary:
    """From seconds for some work to work a second; the 80th percentile of the time gives the 20th of the rate."""
    return Summary(
        n=seconds.n,
        p20=work / seconds.p80,
        p50=work / seconds.p50,
        p80=work / seconds.p20,
        mean=work / seconds.mean,
        sd=work * seconds.sd / seconds.mean**2,
    )
