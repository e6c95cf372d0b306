"""Print what the prefill attention kernels take of an SM, compiled here for sm_90 and sm_80; no GPU is needed.

`python tools/resources.py 64 128` shows registers, spills, shared memory and occupancy for these head_dims.
"""

import argparse
import json
import re
import subprocess
import sys
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
from onewave.gpu.launch import launches_nowhere, without_collection
from onewave.gpu.prebuilt import compiled_from
from onewave.ops.attention.call import AttentionCall, Extras
from onewave.ops.attention.choose import choose
from onewave.ops.attention.masks import Options
from onewave.ops.attention.mma.plan import mma_tile
from onewave.ops.backends import load

# Limits of an SM of sm_80 and sm_90. A program takes 1 KiB of shared memory beside its own.
_REGISTERS, _THREADS, _PROGRAMS, _WARP = 64 << 10, 2048, 32, 32
_SHARED_BYTES = {80: 164 << 10, 90: 228 << 10}
_SHARED_BESIDE = 1 << 10
# Registers are handed out to a warp in portions of 256.
_REGISTER_PORTION = 8
# The call to compile for: batch, heads, tokens. So many programs fill an H200, but not 10,000 SMs.
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


def kernels_of(head_dim: int, *, causal: bool) -> list[Resources]:
    """Compile Hopper's kernel for sm_90, and the portable and the m16n8k16 ones for sm_90 and sm_80.

    The last one has a narrow tile, too, where many SMs ask for it.
    """
    found = [_compiled("gluon", Device((9, 0), H200_SMS), head_dim, causal=causal)]
    for capability in ((9, 0), (8, 0)):
        found += [_compiled(kind, Device(capability, H200_SMS), head_dim, causal=causal) for kind in ("triton", "mma")]
        if mma_tile(head_dim) != mma_tile(head_dim, narrow=True):
            found.append(_compiled("mma", Device(capability, _MANY_SMS), head_dim, causal=causal))
    return found


def _compiled(backend: str, device: Device, head_dim: int, *, causal: bool) -> Resources:
    """Compile what a call with bfloat16 tensors launches on a device."""
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
        # Measure what a first call waits for, not what a cache holds.
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


def main(arguments: list[str]) -> None:
    """Print a row for each kernel, head_dim and mask, as JSON lines with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("head_dims", nargs="*", type=int, default=[64, 128, 256])
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    row = "{:>8} {:<7} {:<10} {:>5} {:>8} {:>10} {:>8} {:>8} {:>6} {:>10} {:>9}"
    columns = ("threads", "registers", "spilled", "shared", "an SM", "occupancy", "compiled")
    if not asked.json:
        print(row.format("head_dim", "mask", "kernel", "GPU", *columns))
    for head_dim in asked.head_dims:
        for causal in (False, True):
            for found in kernels_of(head_dim, causal=causal):
                if asked.json:
                    own = {"head_dim": head_dim, "causal": causal, "programs_an_sm": found.programs_an_sm}
                    print(json.dumps(own | vars(found) | {"occupancy": found.occupancy}))
                    continue
                print(row.format(
                    head_dim, "causal" if causal else "", found.kernel, f"sm_{found.capability}", found.threads,
                    found.registers, f"{found.stack} B", f"{found.shared / 1024:.0f} KiB", found.programs_an_sm,
                    f"{found.occupancy:.0%}", f"{found.seconds:.1f} s",
                ))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
