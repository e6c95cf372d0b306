"""What the attention kernels take of an SM: all are compiled ahead of time, for GPUs that need not be here."""

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
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from onewave.base.device import H200_SMS, Device
from onewave.base.errors import UnsupportedError
from onewave.gpu.launch import without_collection
from onewave.ops.attention.fp8.kernel import fp8_kernel  # pyright: ignore[reportUnknownVariableType]
from onewave.ops.attention.fp8.plan import FP8_TILE, WARPGROUPS
from onewave.ops.attention.hopper.kernel import attention_kernel as hopper_kernel  # pyright: ignore[reportUnknownVariableType]
from onewave.ops.attention.hopper.plan import columns_of, config, knows_limit
from onewave.ops.attention.masks import Options
from onewave.ops.attention.mma.kernel import mma_kernel  # pyright: ignore[reportUnknownVariableType]
from onewave.ops.attention.mma.plan import mma_tile
from onewave.ops.attention.plan import Facts
from onewave.ops.attention.triton.kernel import attention_kernel as portable_kernel  # pyright: ignore[reportUnknownVariableType]
from onewave.ops.attention.triton.plan import plan_portable

# Kernels, of unknown type.
_HOPPER, _FP8, _PORTABLE, _MMA = cast("list[Any]", [hopper_kernel, fp8_kernel, portable_kernel, mma_kernel])
_ALIGNED = [["tt.divisibility", 16]]
# Of an SM of sm_80 and sm_90. A program takes 1 KiB of shared memory beside its own.
_REGISTERS, _THREADS, _PROGRAMS, _WARP = 64 << 10, 2048, 32, 32
_SHARED_BYTES = {80: 164 << 10, 90: 228 << 10}
_SHARED_BESIDE = 1 << 10
# Registers are handed out to a warp in portions of 256.
_REGISTER_PORTION = 8


@dataclass(frozen=True)
class Resources:
    """One compiled kernel. registers: of a thread at its launch; stack and shared: bytes; seconds: of compilation.

    code: its instructions, as nvdisasm prints them; ir: its TritonGPU text; ptx: its PTX.
    """

    kernel: str
    capability: int
    threads: int
    registers: int
    stack: int
    shared: int
    seconds: float
    code: str
    ir: str
    ptx: str = ""

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

    def count(self, word: str) -> int:
        """How often an instruction occurs in the code."""
        return len(re.findall(rf"\b{re.escape(word)}", self.code))


def hopper(head_dim: int, dtype: str = "bf16", **given: Any) -> Resources:
    """Hopper's kernel with the tile of tuned.json. given: constants of hopper/kernel.py, such as RIGHT for causal."""
    columns = columns_of(head_dim)
    flags = dict.fromkeys(("RAGGED", "TOP_LEFT", "LEFT", "RIGHT", "SOFTCAP", "SINKS", "LSE"), False)
    constants = flags | config(columns) | {"D": columns, "HEADROOM": 12 if dtype == "fp16" else 40}
    constants |= {"ORDER": 1 if given.get("RIGHT") and not given.get("RAGGED") else 0, "PAGE": 0} | given
    constants["RIGHT"] |= knows_limit(columns, packed=bool(constants["RAGGED"]))
    rank = 5 if constants["RAGGED"] else 4
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)
    types: dict[str, str] = dict.fromkeys(("scale_log2", "inner", "outer"), "fp32")
    types |= dict.fromkeys(("lse", "sinks"), "*fp32")
    types |= dict.fromkeys(("starts_q", "starts_k", "order", "block_table"), "*i32")
    types |= dict.fromkeys(("lse_batch", "lse_head"), "i64")
    page = constants["PAGE"]
    keys = [min(page, constants["BN"]), 64] if page else [constants["BN"], columns]
    for name, box in (("q", [64, columns]), ("out", [64, columns]), ("k", keys), ("v", keys)):
        types[name] = f"tensordesc<{dtype}{[1] * (rank - 2) + box},{layout!r}>"
    _check_compiler()
    names: list[str] = _HOPPER.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    hints = {(at,): _ALIGNED for at, name in enumerate(names) if signature[name].startswith("*")}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    # The loader's warp is padded to a warpgroup.
    threads = 128 * (constants["WARPGROUPS"] + 1)
    return _compiled("Hopper's", GluonASTSource(_HOPPER, signature, fixed, hints), 90, threads, num_warps=4)


def fp8(dtype: str = "bf16", **given: Any) -> Resources:
    """Hopper's kernel for float8, whatever the head_dim. dtype: of the output; given: constants of fp8/kernel.py."""
    flags = dict.fromkeys(("RAGGED", "TOP_LEFT", "LEFT", "RIGHT", "SOFTCAP", "SINKS", "LSE"), False)
    constants = flags | FP8_TILE | {"ORDER": 1 if given.get("RIGHT") else 0} | given
    rank = 5 if constants["RAGGED"] else 4
    flat, packed, wide = (
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=axes)
        for bits, axes in ((8, 2), (8, rank), (16, rank))
    )
    columns, keys, outer = constants["D"], constants["BN"], [1] * (rank - 2)
    types: dict[str, str] = dict.fromkeys(("scale_log2", "inner", "outer"), "fp32")
    types |= dict.fromkeys(("q_scale", "k_scale", "v_scale", "lse", "sinks"), "*fp32")
    types |= dict.fromkeys(("starts_q", "starts_k", "order"), "*i32")
    types |= dict.fromkeys(("lse_batch", "lse_head"), "i64")
    types |= {
        "q": f"tensordesc<fp8e4nv{[*outer, 64, columns]},{packed!r}>",
        "k": f"tensordesc<fp8e4nv{[*outer, keys, columns]},{packed!r}>",
        "v": f"tensordesc<fp8e4nv{[columns, keys]},{flat!r}>",
        "out": f"tensordesc<{dtype}{[*outer, 64, columns]},{wide!r}>",
    }
    _check_compiler()
    names: list[str] = _FP8.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    hints = {(at,): _ALIGNED for at, name in enumerate(names) if signature[name].startswith("*")}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    return _compiled("fp8", GluonASTSource(_FP8, signature, fixed, hints), 90, 128 * (WARPGROUPS + 1), num_warps=4)


def portable(head_dim: int, capability: int = 90, dtype: str = "bf16", **given: Any) -> Resources:
    """The portable kernel with its plan's tile. given: constants of triton/kernel.py: RIGHT, TAIL for causal."""
    major, minor = divmod(capability, 10)
    device = Device((major, minor), H200_SMS)
    plan = plan_portable(
        Facts("attention", "triton", device, torch.bfloat16, Options(1.0), 4, 16, 16, 4096, 4096, head_dim)
    )
    flags = dict.fromkeys(("RAGGED", "TOP_LEFT", "LEFT", "RIGHT", "SOFTCAP", "SINKS", "ALIBI", "LSE", "TAIL"), False)
    constants = flags | {
        "PACK": 1, "HEAD_DIM": head_dim, "WIDTH": plan.width, "BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n,
        "TMA": plan.descriptors, "BIAS": 0, "POSITIVE": True,
    } | given  # fmt: skip
    keys = f"tensordesc<{dtype}[1, 1, {plan.block_n}, {plan.width}]>" if plan.descriptors else f"*{dtype}"
    strides = ("stride_q", "stride_k", "stride_v", "stride_out")
    types: dict[str, Any] = {"q_ptr": f"*{dtype}", "k": keys, "v": keys, "out_ptr": f"*{dtype}"}
    types |= dict.fromkeys((*strides, "stride_lse"), ("i32",) * 3)
    types |= {"stride_slopes": ("i32",) * 2, "stride_bias": ("i32",) * 4}
    types |= dict.fromkeys(("num_heads", "group", "num_queries", "num_keys", "tiles", "shift", "left", "right"), "i32")
    types |= dict.fromkeys(("scale_log2", "inner", "outer"), "fp32")
    types |= {"lse_ptr": "*fp32"} if constants["LSE"] else {}
    types |= {"bias_ptr": "*u8"} if constants["BIAS"] else {}
    types |= dict.fromkeys(("starts_q_ptr", "starts_k_ptr"), "*i32") if constants["RAGGED"] else {}
    _check_compiler()
    names: list[str] = _PORTABLE.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    fixed = {(at,): constants.get(name) for at, name in enumerate(names) if name not in types}
    hints: dict[tuple[int, ...], Any] = {}
    for at, name in enumerate(names):
        if name in strides:
            hints |= {(at, axis): _ALIGNED for axis in range(3)}
        elif str(types.get(name, "")).startswith("*"):
            hints[(at,)] = _ALIGNED
    source = ASTSource(_PORTABLE, signature, fixed, hints)
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    return _compiled("portable", source, capability, plan.num_warps * _WARP, **options)


def mma(
    head_dim: int, capability: int = 90, dtype: str = "bf16", *, narrow: bool = False, registers: int = 0, **given: Any
) -> Resources:
    """The m16n8k16 kernel with its wide or narrow tile. given: constants of mma/kernel.py, such as RIGHT for causal.

    registers: the most a thread may have, 0 for the tile's.
    """
    tile = mma_tile(head_dim, narrow=narrow)
    flags = dict.fromkeys(("RAGGED", "TOP_LEFT", "LEFT", "RIGHT", "SOFTCAP", "SINKS", "LSE"), False)
    constants = flags | {
        "PACK": 1, "HEAD_DIM": head_dim, "WIDTH": tile.width, "QUERIES": tile.queries, "KEYS": tile.keys,
        "WARPS": tile.warps, "UNIT": 8, "FOLD": True,
    } | given  # fmt: skip
    types: dict[str, Any] = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}")
    types |= dict.fromkeys(("lse_ptr", "sinks_ptr"), "*fp32")
    types |= dict.fromkeys(("starts_q_ptr", "starts_k_ptr"), "*i32")
    types |= dict.fromkeys(("scale_log2", "inner", "outer"), "fp32")
    _check_compiler()
    names: list[str] = _MMA.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    # A tensor whose rows are not whole pieces may itself begin anywhere.
    aligned = [name for name in names if str(signature[name]).startswith("*") and constants["UNIT"] > 1]
    hints = {(names.index(name),): _ALIGNED for name in aligned}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(_MMA, signature, fixed, hints)
    options = {"num_warps": constants["WARPS"], "maxnreg": registers or tile.registers}
    name = f"mma x {constants['QUERIES']}"
    return _compiled(name, source, capability, constants["WARPS"] * _WARP, **options)


def _check_compiler() -> None:
    if knobs.runtime.interpret:
        what = "attention resources: Triton's interpreter compiles nothing"
        raise UnsupportedError(what, got="TRITON_INTERPRET=1", next="Unset it.")


def _compiled(kernel: str, source: ASTSource, capability: int, threads: int, **options: int) -> Resources:
    with knobs.compilation.scope(), without_collection():
        # What a first call waits for, not what a cache holds.
        knobs.compilation.always_compile = True
        begun = time.perf_counter()
        compiled = cast("Any", triton).compile(source, target=GPUTarget("cuda", capability, _WARP), options=options)
        seconds = time.perf_counter() - begun
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tools / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    registers, stack = int(found[1]), int(found[2])
    shared = int(compiled.metadata.shared)
    return Resources(
        kernel, capability, threads, registers, stack, shared, seconds, code, str(compiled.asm["ttgir"]),
        str(compiled.asm["ptx"]),
    )  # fmt: skip
