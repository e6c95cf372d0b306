"""What the attention kernels take of an SM: compiled ahead of time, for GPUs that need not be here."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from onewave.base.device import H200_SMS, Device
from onewave.base.errors import UnsupportedError
from onewave.gpu.launch import launches_nowhere, without_collection
from onewave.gpu.prebuilt import compiled_from
from onewave.ops.attention.call import AttentionCall, Extras
from onewave.ops.attention.choose import choose
from onewave.ops.attention.masks import Options
from onewave.ops.backends import load

# Of an SM of sm_80 and sm_90. A program takes 1 KiB of shared memory beside its own.
_REGISTERS, _THREADS, _PROGRAMS, _WARP = 64 << 10, 2048, 32, 32
_SHARED_BYTES = {80: 164 << 10, 90: 228 << 10}
_SHARED_BESIDE = 1 << 10
# Registers are handed out to a warp in portions of 256.
_REGISTER_PORTION = 8
# Of the call that is compiled for: batch, heads, tokens. So many programs fill an H200, but not 10,000 SMs.
_CALL = (4, 16, 4096)
_MANY_SMS = 10_000


@dataclass(frozen=True)
class Resources:
    """One compiled kernel. registers: of a thread at its launch; stack and shared: bytes; seconds: of compilation."""

    kernel: str
    capability: int
    threads: int
    registers: int
    stack: int
    shared: int
    seconds: float

    @property
    def programs_an_sm(self) -> int:
        """How many fit an SM at once."""
        registers = -(-self.registers // _REGISTER_PORTION) * _REGISTER_PORTION * self.threads
        shared = _SHARED_BYTES[self.capability] // (self.shared + _SHARED_BESIDE)
        return min(_REGISTERS // registers, shared, _THREADS // self.threads, _PROGRAMS)

    @property
    def occupancy(self) -> float:
        """Share of the threads that an SM can hold."""
        return self.programs_an_sm * self.threads / _THREADS


def hopper(head_dim: int, *, causal: bool = False) -> Resources:
    """Return what Hopper's kernel takes with the tile of tuned.json."""
    return _compiled("gluon", Device((9, 0), H200_SMS), head_dim, causal=causal)


def portable(head_dim: int, capability: int = 90, *, causal: bool = False) -> Resources:
    """Return what the portable kernel takes with its plan's tile."""
    major, minor = divmod(capability, 10)
    return _compiled("triton", Device((major, minor), H200_SMS), head_dim, causal=causal)


def mma(head_dim: int, capability: int = 90, *, narrow: bool = False, causal: bool = False) -> Resources:
    """Return what the m16n8k16 kernel takes with its wide or narrow tile, which many SMs ask for."""
    major, minor = divmod(capability, 10)
    device = Device((major, minor), _MANY_SMS if narrow else H200_SMS)
    return _compiled("mma", device, head_dim, causal=causal)


def _compiled(backend: str, device: Device, head_dim: int, *, causal: bool) -> Resources:
    """Compile what a call with bfloat16 tensors launches on a device."""
    if knobs.runtime.interpret:
        what = "attention resources: Triton's interpreter compiles nothing"
        raise UnsupportedError(what, got="TRITON_INTERPRET=1", next="Unset it.")
    assert device.capability is not None
    q = torch.empty(*_CALL, head_dim, dtype=torch.bfloat16)
    options = Options(head_dim**-0.5, right=0 if causal else None)
    call = AttentionCall(q, q, q, Extras(), options, backend, described=device)
    choice = choose(call)
    with launches_nowhere() as made:
        load("attention", choice.module).run(call, choice)
    capability = 10 * device.capability[0] + device.capability[1]
    target = GPUTarget("cuda", capability, _WARP)
    source, chosen = compiled_from(made[-1], target)
    with knobs.compilation.scope(), without_collection():
        # What a first call waits for, not what a cache holds.
        knobs.compilation.always_compile = True
        begun = time.perf_counter()
        compiled: Any = cast("Any", triton).compile(source, target=target, options=chosen.__dict__)
        seconds = time.perf_counter() - begun
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    # With the warps of other partitions, padded to warpgroups.
    threads, shared = _WARP * int(compiled.metadata.num_warps), int(compiled.metadata.shared)
    name = {"gluon": "Hopper's", "triton": "portable"}.get(backend, f"mma x {choice.block_m}")
    return Resources(name, capability, threads, int(found[1]), int(found[2]), shared, seconds)
