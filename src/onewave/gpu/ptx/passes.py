"""Which kernel's PTX gets which passes: a table by module and kernel name. All other kernels pass untouched."""

from __future__ import annotations

from onewave.gpu.ptx.evict_first import evict_first
from onewave.gpu.ptx.partition_ids import PARTITION_IDS
from onewave.gpu.ptx.per_thread_arrival import PER_THREAD_ARRIVAL
from onewave.gpu.ptx.ptx_pass import PtxPass, sources_digest
from onewave.gpu.ptx.shared_warpgroups import SHARED_WARPGROUPS

_HOPPER_PREFILL = (SHARED_WARPGROUPS, PER_THREAD_ARRIVAL, PARTITION_IDS)

PASSES: dict[tuple[str, str], tuple[PtxPass, ...]] = {
    ("onewave.wave.kernel.kernel", "wave_kernel"): (evict_first(descriptors=3),),
    ("onewave.ops.decode_attention.hopper.kernel", "stream_kernel"): (evict_first(descriptors=2),),
    ("onewave.ops.attention.hopper.kernel", "attention_kernel"): _HOPPER_PREFILL,
    ("onewave.ops.linear.hopper.packed_kernel", "packed_gemm_kernel"): (SHARED_WARPGROUPS,),
    ("onewave.ops.attention.fp8.kernel", "fp8_kernel"): _HOPPER_PREFILL,
    ("onewave.ops.post_attention.chain.kernel", "post_attention_kernel"): (PARTITION_IDS,),
}


def passes_of(module: str, kernel: str) -> tuple[PtxPass, ...]:
    """Return the passes of a kernel that apply with the installed Triton, in order."""
    return tuple(each for each in PASSES.get((module, kernel), ()) if each.applies())


def describe_passes(module: str, kernel: str) -> str:
    """Return a text that changes whenever the passes of a kernel do; "none" without any."""
    passes = passes_of(module, kernel)
    return f"{', '.join(each.name for each in passes)} {sources_digest()}" if passes else "none"
