"""Chooses the implementation of decode attention: Hopper's kernel, Triton's, compiled CPU loops, or the reference."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from onewave.base.errors import InvalidArgumentError, UnsupportedError, shown
from onewave.ops.backends import load
from onewave.ops.choice import Asked, Choice, Kept, Reason, because, empty_on_meta
from onewave.ops.decode_attention.call import CPU_TAKES, DecodeCall, check, check_backend
from onewave.ops.decode_attention.hopper.plan import StreamCall, refusal, stream_tile, undescribable
from onewave.ops.decode_attention.triton.plan import DecodePlan, DecodeSizes, plan_decode

_ALIGNED_BYTES = 16
_FUSED = because(
    "decode attention's kernel with a prologue (bias, rotation, append) and an epilogue (smoothing, rounding)"
)
_STREAMS = because("a warp of its own streams keys and values by TMA, across rows; the bits are the Triton kernel's")
_EARLY = because("the next kernel may be launched early and waits on the device (programmatic dependent launch)")
_IN_ORDER = because("the next kernel follows in stream order")
_ON_CPU = {
    "asked for": (because("asked for"),),
    "loops": (because(f"compiled loops take it: {CPU_TAKES}"),),
    "no loops": (because(f"compiled loops take only {CPU_TAKES}"),),
}


@dataclass(frozen=True)
class DecodeChoice(Choice):
    """A launch on a GPU. rows, capacity: of the call; kv_itemsize: bytes of a cached number; counted_in: see
    counted_in; row_keys: explain's row."""

    plan: DecodePlan
    rows: int
    capacity: int
    kv_itemsize: int
    num_sms: int
    counted_in: int | None
    row_keys: int

    @property
    def streams(self) -> bool:
        """Whether Hopper's kernel runs."""
        return self.backend == "gluon"

    @property
    def num_shares(self) -> int:
        """Programs of a KV head, or of a tile of its query rows."""
        return self.plan.shares(self.rows, self.num_sms, in_pairs=self.streams and self.kv_itemsize == 1)

    @property
    def tile(self) -> str:
        plan, warps, stages = self.plan, f"{self.plan.num_warps} warps", self.plan.num_stages
        if self.streams:
            warps = "4 warps and a loading one"
            stages = stream_tile(self.rows, self.capacity, self.num_shares, self.kv_itemsize).stages
        return f"{plan.block_m} query rows x {plan.block_n} keys x {plan.block_d}, {warps}, {stages} stages"

    @property
    def split(self) -> str:
        split = self.plan.split_of(self.row_keys)
        return f"{split} keys, {max(1, -(-self.row_keys // split))} of a row of {self.row_keys}"

    @property
    def programs(self) -> str:
        return f"{self.num_shares} shares x {self.plan.num_kv_heads * self.plan.tiles}, on {self.num_sms} SMs"


def choose(call: DecodeCall) -> Choice:
    """Return what runs; see ops/choice.py."""
    if not call.on_gpu or call.backend == "reference":
        return _off_gpu(call)
    q, k, v, table = call.q, call.k_cache, call.v_cache, call.block_table
    facts = (
        q.shape, q.dtype, q.device, k.shape, k.stride(), k.dtype, v.shape, v.stride(),
        (k.data_ptr() | v.data_ptr()) % _ALIGNED_BYTES, None if table is None else table.shape[1],
        call.k_scale is None, call.window is None, call.split_size, call.smallest_split, call.backend,
        call.fused is None, call.described,
    )  # fmt: skip
    choice = _chosen.get(facts) or _chosen.keep(facts, _on_gpu(call))
    return choice if call.row_keys is None else replace(choice, row_keys=min(call.row_keys, choice.row_keys))


_chosen: Kept[DecodeChoice] = Kept()


def _on_gpu(call: DecodeCall) -> DecodeChoice:
    rows, heads, queries, head_dim = call.shape
    k, v, table, backend, device = call.k_cache, call.v_cache, call.block_table, call.backend, call.device
    capability = device.capability
    assert capability is not None
    if k.dtype is torch.float8_e4m3fn and capability < (8, 9):
        raise UnsupportedError("decode_attention: float8 cache", got="a GPU before sm_89", next="Use an int8 cache.")
    counted = counted_in(k, v)
    plan = plan_decode(
        DecodeSizes(
            heads, v.shape[1], queries, head_dim, call.capacity, k.element_size(), call.split_size,
            call.window is not None, call.smallest_split, counted is not None,
        )
    )  # fmt: skip
    paged, scaled = table is not None and table.shape[1] != 1, call.k_scale is not None
    stream = StreamCall(
        capability, rows, call.q.dtype, k.dtype, k.ndim == 5, v.shape[2], paged, scaled, undescribable(k, v)
    )
    refused = refusal(stream, plan) or (None if call.q.is_meta else _without_gluon())
    if backend == "gluon" and refused is not None:
        raise UnsupportedError("decode attention (backend=gluon)", got=refused, next='Use backend="auto".')
    streams = backend != "triton" and refused is None
    reasons = [] if call.fused is None else [_FUSED]
    reasons.append(_of_plan(plan))
    if streams:
        assert counted is not None, "what TMA reads is aligned"
        reasons.append(_STREAMS)
    reasons.append(_EARLY if capability >= (9, 0) else _IN_ORDER)
    if not streams and refused is not None:
        reasons.append(because("not the Hopper kernel: {}", refused))
    kernel = "hopper/kernel.py: stream_kernel" if streams else "triton/split_kv.py: split_kv_kernel"
    return DecodeChoice(
        "gluon" if streams else "triton", "triton.launch", f"decode_attention/{kernel}", tuple(reasons),
        plan, rows, call.capacity, k.element_size(), device.num_sms, counted, call.capacity,
    )  # fmt: skip


def _of_plan(plan: DecodePlan) -> Reason:
    if plan.split:
        rule = because("splits of {} keys as asked", plan.split)
    elif not plan.limits:
        rule = because("one split of up to {} keys", plan.smallest)
    else:
        largest = plan.smallest << len(plan.limits)
        text = "splits of {} to {} keys, the smallest that gives a row at most {}, of long splits {}"
        rule = because(text, plan.smallest, largest, plan.limits[0], plan.limits[-1])
    return because(
        "{}; {} query rows share each key, in a tile of {}x{}; the keys of all rows are shared evenly among the "
        "programs; where several had splits of one row, the last to finish merges them in order",
        rule, plan.block_h, plan.block_m, plan.block_n,
    )  # fmt: skip


def _off_gpu(call: DecodeCall) -> Choice:
    if call.backend == "cpu":
        check_backend(call)
    loops = call.backend != "reference" and call.suits_loops
    if loops:
        return Choice("cpu", "numba_impl", "decode_attention/numba_impl.py", _ON_CPU["loops"])
    why = "asked for" if call.backend == "reference" else "no loops"
    return Choice("reference", "reference", "decode_attention/reference.py", _ON_CPU[why])


def counted_in(k_cache: Tensor, v_cache: Tensor) -> int | None:
    """Return the unit, in elements, of the Triton kernel's head_dim and strides.

    Its compiler then knows how they are aligned: 1 where all are multiples of 16, which Triton sees itself, 8 where
    they are of 8. None where rows begin anywhere.
    """
    numbers = (v_cache.shape[3], *steps(k_cache), *steps(v_cache))
    if any(n % 8 for n in numbers) or any(keys.data_ptr() % _ALIGNED_BYTES for keys in (k_cache, v_cache)):
        return None
    return 8 if any(n % 16 for n in numbers) else 1


def steps(cache: Tensor) -> list[int]:
    """Return strides of all axes but the last, 0 of one that is 1 long: then it may be anything, and nothing uses
    it."""
    return [0 if size == 1 else step for size, step in zip(cache.shape[:-1], cache.stride(), strict=False)]


@cache
def _without_gluon() -> str | None:
    """Why Triton can't compile Hopper's kernel, None if it can."""
    try:
        load("decode_attention", "hopper.launch")
    except ImportError as error:
        return f"needs Triton 3.6's Gluon: {error}"
    return None


def describe(asked: Asked) -> DecodeCall:
    """A question: q, k_cache."""
    q, cache = asked.take((3, 4), (4, 5))
    queries = empty_on_meta(q if len(q) == 4 else (*q[:2], 1, q[2]), asked.dtype)
    k, v = caches_of(cache, asked.dtype_of("kv_dtype", asked.dtype))
    scales = {name: empty_on_meta(cache[1:2], torch.float32) for name in ("k_scale", "v_scale") if asked.has(name)}
    sinks = empty_on_meta(q[1:2], torch.float32) if asked.has("sinks") else None
    options = asked.given("scale", "window", "softcap", "split_size", "backend")
    options |= {"softcap": 1.0} if options.get("softcap") is True else {}
    call = DecodeCall(
        queries, k, v, empty_on_meta(q[:1], torch.int32), table_of(asked), **scales, sinks=sinks, **options,
        wants_lse=bool(asked.options.get("return_lse")), row_keys=asked.number("seq_len"), described=asked.device,
    )  # fmt: skip
    check(call, queries, None)
    return call.with_plain_numbers()


def caches_of(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values, by the keys' shape alone; packed: [.., head_dim / x, capacity, x]."""
    values = shape if len(shape) == 4 else (shape[0], shape[1], shape[3], shape[2] * shape[4])
    return empty_on_meta(shape, dtype), empty_on_meta(values, dtype)


def table_of(asked: Asked) -> Tensor | None:
    """Return a block table of the shape that the question gives. Raises InvalidArgumentError."""
    table: Any = asked.options.get("block_table")
    if table is None:
        return None
    try:
        rows, per_row = table
    except (TypeError, ValueError) as error:
        allowed = "its shape, (rows, blocks a row)"
        raise InvalidArgumentError("explain: block_table", got=shown(table), allowed=allowed) from error
    return empty_on_meta((rows, per_row), torch.int32)
