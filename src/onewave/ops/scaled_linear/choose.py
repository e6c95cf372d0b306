"""Chooses kernels for one-byte operands: Hopper's persistent product, a Triton kernel on other GPUs, loops on a CPU."""

from dataclasses import dataclass, field
from functools import lru_cache

import torch

from onewave.base.errors import UnsupportedError
from onewave.ops.choice import Asked, Choice, Counted, because, empty_on_meta
from onewave.ops.linear.choose import ProductChoice, blocks_of, box_rows_of
from onewave.ops.scaled_linear.call import ScaledCall, check, check_operands

_FOLDER = "scaled_linear"
_CPU = Choice(
    "cpu", "numba_impl", f"{_FOLDER}/numba_impl.py", (because("exact sums: int32 of int8, float64 of float8"),)
)
_REFERENCE = Choice("reference", "reference", f"{_FOLDER}/reference.py", (because("asked for"),))
_EXACT = because("sums in int32 are exact: their order does not matter")
_PROMOTED = because("sums of 128 columns are added to float32 registers one after another, whatever the tile")

# Microseconds of 128 columns of K with a tile's warpgroups and columns, and of a tile beside them, measured at 64 to
# 2,048 tokens of an 8B on an H200. Float8 holds two blocks of sums beside a tile's own, so its tiles are narrower.
_STEPS_US = {
    torch.int8: {
        (1, 32): 0.13, (1, 64): 0.15, (1, 128): 0.21, (2, 64): 0.22, (2, 128): 0.37, (1, 192): 0.31, (1, 256): 0.41,
        (2, 192): 0.60, (2, 256): 0.72,
    },
    torch.float8_e4m3fn: {(1, 32): 0.13, (1, 64): 0.15, (1, 128): 0.23, (2, 64): 0.23, (2, 128): 0.38},
}  # fmt: skip
_TILE_US = 2.0


@dataclass(frozen=True)
class TileChoice(Counted, Choice):
    """product_kernel: a program owns block_m tokens and block_n rows of the weights."""

    block_m: int
    block_n: int
    block_k: int
    num_programs: int
    num_warps: int = 4
    num_stages: int = 3

    @property
    def tile(self) -> str:
        return f"{self.block_m} x {self.block_n} x {self.block_k}, {self.num_warps} warps, {self.num_stages} stages"


@dataclass(frozen=True)
class HopperChoice(ProductChoice):
    """scaled_kernel: such tiles of 128 columns of K a slice; see hopper/kernel.py. exact: sums are int32."""

    exact: bool = field(kw_only=True)

    @property
    def slices(self) -> int:
        """Slices of 128 columns a stage."""
        return 2 if not self.exact or self.warpgroups * self.columns <= 64 else 1

    @property
    def extra(self) -> int:
        """Columns beyond the first 128."""
        return max(0, self.columns - 128)


def choose(call: ScaledCall) -> Choice:
    """Return what runs; see ops/choice.py."""
    if call.backend == "reference":
        return _REFERENCE
    if not call.on_gpu:
        return _CPU
    x, weight, device = call.x, call.weight, call.device
    (tokens, cols), rows = x.shape, weight.shape[0]
    addressable = weight.is_contiguous() and cols % 16 == 0 and weight.data_ptr() % 16 == 0
    on_hopper = device.capability == (9, 0) and addressable and tokens > 0 and rows > 0 and cols > 0
    if call.backend == "gluon" and not on_hopper:
        what, got = f"{call.name} (backend=gluon)", f"sm_{'{}{}'.format(*device.capability or (0, 0))}, {cols} columns"
        raise UnsupportedError(what, got=got, allowed="sm_90, contiguous weights, columns in multiples of 16")
    if on_hopper and call.backend != "triton":
        to_map = call.out_dtype in (torch.bfloat16, torch.float16) and rows % 8 == 0
        return _on_hopper(x.dtype, (tokens, rows, cols), device.num_sms, to_map=to_map)
    return _on_gpu(x.dtype, tokens, rows, hopper=device.capability == (9, 0))


@lru_cache(maxsize=1024)
def _on_hopper(kind: torch.dtype, shape: tuple[int, int, int], sms: int, *, to_map: bool) -> HopperChoice:
    """shape: tokens, rows, columns of K. to_map: whether TMA can write the result."""
    tokens, rows, cols = shape

    def us(tile: tuple[int, int]) -> float:
        down, right = blocks_of(tile, tokens, rows)
        return -(-down * right // sms) * (-(-cols // 128) * steps_us[tile] + _TILE_US)

    steps_us = _STEPS_US[kind]
    best = min(steps_us, key=us)
    down, right = blocks_of(best, tokens, rows)
    kernel = f"{_FOLDER}/hopper/kernel.py: scaled_kernel"
    exact = kind is torch.int8
    return HopperChoice(
        "gluon", "hopper.launch", kernel, (_EXACT if exact else _PROMOTED,), *best, box_rows_of(tokens), down, right,
        min(sms, down * right), to_map, exact=exact,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _on_gpu(kind: torch.dtype, tokens: int, rows: int, *, hopper: bool) -> TileChoice:
    """hopper: where tiles of 64 tokens of float8 would sum in another order than those of 32."""
    high = 32 if hopper and kind is not torch.int8 else 128
    block_m = min(high, max(16, 1 << (tokens - 1).bit_length())) if tokens else 16
    block_n, warps = (64, 4) if block_m <= 64 else (128, 8)
    programs = -(-tokens // block_m) * -(-rows // block_n)
    kernel = f"{_FOLDER}/triton_impl.py: product_kernel"
    why = _EXACT if kind is torch.int8 else because("float8 is widened to float16, exactly; one order along K")
    block_k = 128 if kind is torch.int8 else 64  # widened operands of 128 columns would not fit registers
    return TileChoice("triton", "triton_impl", kernel, (why,), block_m, block_n, block_k, programs, warps)


def describe(asked: Asked) -> ScaledCall:
    """A question: x, weight."""
    kind = torch.int8 if asked.operator == "linear_int8" else torch.float8_e4m3fn
    asked.allow({"out_dtype", "backend"})
    x, weight = (empty_on_meta(shape, kind) for shape in asked.take((2,), (2,)))
    out_dtype = asked.options.get("out_dtype")
    if out_dtype is not torch.int32:
        out_dtype = asked.dtype_of("out_dtype", asked.dtype)
    call = ScaledCall(x, weight, out_dtype, **asked.given("backend"), described=asked.device)
    check_operands(asked.operator, kind, x, weight, call.epilogue)
    check(call)
    return call
