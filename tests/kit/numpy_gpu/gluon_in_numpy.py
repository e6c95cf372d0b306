"""Runs the wave kernel's own source in NumPy: Gluon's functions as arrays, partitions as threads, barriers as barriers.

Every statement of every partition is executed as it stands, one Python thread a partition and block, with real mbarrier
phases, shared memory whose bytes are reinterpreted as the kernel does, and polls that wait for other blocks; every
access to shared memory must be ordered with those before it (happens_before). What this can't show is what a layout
does to registers, or what a missing barrier inside a partition does to shared memory.
16-bit operands are fp16 numbers, or bfloat16 ones as ml_dtypes has them: NumPy has none.
"""

import inspect
import math
import textwrap
import threading
import time
import types
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from triton.language.core import constexpr
from triton.runtime.jit import ConstexprFunction

from kit.numpy_gpu import happens_before
from kit.numpy_gpu.numpy_barriers import FAILED, Barrier, Barriers, Patience, run_side_by_side
from kit.numpy_gpu.numpy_memory import WITHOUT_PTX, Array, Memory, Pointer, PointerType, multiplied, wrapped
from kit.numpy_gpu.numpy_shared import Shared
from kit.numpy_gpu.numpy_tensor_maps import Boxes, Descriptor, Matrix


class Fault(NamedTuple):
    """A mistake in a kernel's function: `wrong` instead of `right`, wherever that stands."""

    function: str
    right: str
    wrong: str


def issue(name: str, *sources: Any) -> None:
    """The partition that is here has "products" or "stores" read shared memory beside it."""
    units = happens_before.Units.here(name)
    if units is not None:
        units.issue([part for source in sources if hasattr(source, "raw") for part in source.raw])


def wait_for(name: str, pending: int) -> None:
    """It waits until no more than `pending` of them go on."""
    units = happens_before.Units.here(name)
    if units is not None:
        units.wait(pending)


def products_end(pending: int, deps: Sequence[Array]) -> Any:
    """warpgroup_mma_wait."""
    wait_for("products", pending)
    return deps[0] if len(deps) == 1 else tuple(deps)


def mbarriers(pause: Callable[[], None] = lambda: None) -> types.SimpleNamespace:
    """The kernel's `mbarrier`. pause: done before each wait."""

    def wait(barrier: Barrier, parity: Any, pred: Any = True, *, hears: bool = True) -> None:
        pause()
        if np.all(pred):
            barrier.wait(int(parity), hears=hears)

    return types.SimpleNamespace(
        MBarrierLayout=lambda: "barrier",
        init=lambda barrier, count: setattr(barrier, "count", count),
        expect=lambda barrier, size: barrier.add(1, int(size), 0),
        wait=wait,
        luck=partial(wait, hears=False),
        arrive=lambda barrier, count, pred=True: barrier.add(count, 0, 0) if np.all(pred) else None,
    )


class Stores(threading.local):
    """TMA stores of one thread: shared memory is read at the latest when they are waited for, memory written then."""

    def __init__(self) -> None:
        self.issued: list[tuple[Matrix, list[int], Shared]] = []
        self.read: list[tuple[Matrix, list[int], np.ndarray]] = []

    def issue(self, matrix: Matrix, at: Sequence[Any], source: Shared) -> None:
        issue("stores", source)
        self.issued.append((matrix, [int(n) for n in at], source))

    def wait_until_read(self, pendings: int = 0) -> None:
        wait_for("stores", pendings)
        ended = len(self.issued) - pendings
        self.read += [(matrix, at, np.asarray(source.peek())) for matrix, at, source in self.issued[: max(0, ended)]]
        del self.issued[: max(0, ended)]

    def wait_until_written(self) -> None:
        self.wait_until_read()
        for matrix, at, values in self.read:
            matrix.put(at, values)
        self.read.clear()


def first_of(x: Array, axis: int, size: int) -> np.ndarray:
    """The first of every so many neighbours along an axis."""
    return np.asarray(x).take(range(0, x.shape[axis], size), axis)


def as_in_numpy(compute: Callable[..., Any]) -> Callable[..., Array]:
    """A function of `gl` that NumPy has, too."""
    return lambda gl, *given, **named: wrapped(compute(*given, **named))


def summed(compute: Callable[..., np.ndarray]) -> Callable[..., Array]:
    """The same, of sums: in their operands' dtype."""
    return lambda gl, x, axis: wrapped(compute(np.asarray(x), axis=axis, dtype=x.dtype))


class Gluon:
    """The kernel's `gl`, for one block."""

    int8, int16, int32, int64 = np.int8, np.int16, np.int32, np.int64
    float16, float32, bfloat16, float64 = np.float16, np.float32, np.float16, np.float64
    float8e4nv = ml_dtypes.float8_e4m3fn
    constexpr = int
    static_range = range
    pointer_type = PointerType
    abs, floor, exp, exp2, sqrt = map(as_in_numpy, (np.abs, np.floor, np.exp, np.exp2, np.sqrt))
    minimum, broadcast_to, full_like = map(as_in_numpy, (np.minimum, np.broadcast_to, np.full_like))
    maximum = as_in_numpy(lambda a, b, propagate_nan=True: np.maximum(a, b))
    zeros_like, expand_dims, max, min = map(as_in_numpy, (np.zeros_like, np.expand_dims, np.max, np.min))
    PropagateNan = types.SimpleNamespace(ALL=True)
    rsqrt = as_in_numpy(lambda x: np.float32(1) / np.sqrt(x))
    div_rn = as_in_numpy(lambda a, b: np.divide(a, b, dtype=np.float32))
    to_tensor = as_in_numpy(np.int32)
    sum, cumsum = map(summed, (np.sum, np.cumsum))

    def __init__(self, memory: Memory, block: int, blocks: tuple[int, int], lock: threading.Lock):
        self.memory, self.block, self.blocks, self.lock = memory, block, blocks, lock

    def program_id(self, axis: int) -> Array:
        return wrapped(np.int32(self.block % self.blocks[0] if axis == 0 else self.block // self.blocks[0]))

    def num_programs(self, axis: int) -> Array:
        return wrapped(np.int32(self.blocks[axis]))

    def num_warps(self) -> int:
        return 4

    def _registers(self, *_: Any, **__: Any) -> str:
        return "registers"

    BlockedLayout = SliceLayout = NVMMADistributedLayout = DotOperandLayout = DistributedLinearLayout = _registers

    def NVMMASharedLayout(self, *parts: Any, **named: Any) -> str:
        return "swizzled 128"

    def SwizzledSharedLayout(self, *_: Any, **__: Any) -> str:
        return "rows"

    def allocate_shared_memory(self, item: Any, shape: Sequence[int], layout: Any) -> Any:
        if layout == "barrier":
            return Barriers(Barrier() for _ in range(shape[0]))
        filled = np.full(math.prod(shape) * np.dtype(item).itemsize, 0xFF, dtype=np.uint8)  # NaN until written
        unit = np.dtype(item).itemsize if layout == "rows" else 128
        return Shared(happens_before.allocate(filled, unit), item, shape, layout)

    def load(self, pointer: Pointer, mask: Any = True, other: Any = 0, cache_modifier: str = "") -> Array:
        real = np.asarray(True if mask is None else mask).astype(bool)
        other = 0 if other is None else other
        found = self.memory.load(self.where(real, pointer, Pointer(256, pointer.item)))
        return wrapped(np.where(real, found, pointer.item.type(other)))

    def store(self, pointer: Pointer, values: Any, mask: Any = True) -> None:
        self.memory.store(pointer, values, True if mask is None else mask)

    def atomic_add(self, pointer: Pointer, value: int, sem: str, scope: str) -> Array:
        with self.lock:
            before = wrapped(self.memory.load(pointer).copy())
            self.memory.store(pointer, before + value, True)
        return before

    def fma(self, a: Any, b: Any, c: Any) -> Array:
        exact = np.asarray(a, np.float64) * np.asarray(b, np.float64) + np.asarray(c, np.float64)
        return wrapped(exact.astype(np.float32))

    def trans(self, x: Array) -> Array:
        return x.T

    def range(self, *bounds: Any, **hints: Any) -> Any:
        return (wrapped(np.int32(n)) for n in range(*(int(n) for n in bounds)))

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        if isinstance(a, Pointer) or isinstance(b, Pointer):
            assert a.item == b.item
            return Pointer(np.where(np.asarray(condition), a.address, b.address), a.item)
        return wrapped(np.where(np.asarray(condition), a, b))

    def arange(self, first: int, end: int, layout: Any) -> Array:
        return wrapped(np.arange(first, end, dtype=np.int32))

    def full(self, shape: Sequence[int], value: Any, dtype: Any, layout: Any = None) -> Array:
        return wrapped(np.full([int(n) for n in shape], value, dtype=dtype))

    def zeros(self, shape: Sequence[int], dtype: Any, layout: Any = None) -> Array:
        return self.full(shape, 0, dtype, layout)

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        return wrapped(np.asarray(x).reshape([int(n) for n in shape]))

    def permute(self, x: Array, order: tuple[int, ...]) -> Array:
        return wrapped(np.asarray(x).transpose(order))

    def split(self, x: Array) -> tuple[Array, Array]:
        assert x.shape[-1] == 2
        return wrapped(x[..., 0]), wrapped(x[..., 1])

    def join(self, a: Array, b: Array) -> Array:
        both = np.empty((*a.shape, 2), np.result_type(a, b))
        both[..., 0], both[..., 1] = a, b
        return wrapped(both)

    def convert_layout(self, x: Array, layout: Any, assert_trivial: bool = False) -> Array:
        return x

    def multiple_of(self, x: Any, sizes: Any) -> Any:
        if isinstance(sizes, int):
            assert ((x.address if isinstance(x, Pointer) else x) % sizes == 0).all()
        else:  # the first of every so many neighbours along each axis
            assert all((first_of(x, axis, size) % size == 0).all() for axis, size in enumerate(sizes))
        return x

    def max_contiguous(self, x: Array, sizes: Sequence[int]) -> Array:
        for axis, size in enumerate(sizes):
            steps = np.arange(x.shape[axis]).reshape([-1 if at == axis else 1 for at in range(x.ndim)]) % size
            assert (x == first_of(x, axis, size).repeat(size, axis) + steps).all()
        return x

    def max_constancy(self, x: Array, sizes: Sequence[int]) -> Array:
        for axis, size in enumerate(sizes):
            assert (x == first_of(x, axis, size).repeat(size, axis)).all()
        return x

    def broadcast(self, a: Array, b: Array) -> tuple[Array, ...]:
        return tuple(wrapped(both) for both in np.broadcast_arrays(a, b))

    def static_assert(self, holds: bool) -> None:
        assert holds

    def thread_barrier(self) -> None:
        pass

    def associative_scan(self, x: Array, axis: int, combine: Callable[..., Any]) -> Array:
        scan = {"added": np.add, "higher": np.maximum}[combine.__name__]
        return wrapped(scan.accumulate(np.asarray(x), axis=axis, dtype=x.dtype))

    def log2(self, x: Any) -> Array:
        return wrapped(np.log2(np.maximum(x, 1e-45)))

    def erf(self, x: Array) -> Array:
        return wrapped(np.vectorize(math.erf)(x).astype(np.float32))

    def warp_specialize(self, parts: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], *sizes: Any) -> None:
        happens_before.agents_of(parts, run_side_by_side)


_ATTEND = "attend.byte_cache attend.combine attend.streamed attend.cached attend.publish attend.attend attend.merge"
_WIDEN = (
    "widen.operands widen.digits widen.nested_digits widen.halves widen.six_bits widen.groups widen.wide widen.widen"
)
_NAMES = f"records finish {_ATTEND} exchange hand_over {_WIDEN} load kernel"
WAVE = tuple(import_module(f"onewave.wave.kernel.{name}") for name in _NAMES.split())
"""The modules of the wave kernel."""


def function(raw: types.FunctionType, space: dict[str, Any], planted: Sequence[Fault]) -> types.FunctionType:
    """A kernel's function over the names of `space`, with the faults that are planted in it."""
    faults = [fault for fault in planted if fault.function == raw.__name__]
    if not faults:
        return types.FunctionType(raw.__code__, space, raw.__name__, raw.__defaults__)
    text = textwrap.dedent(inspect.getsource(raw))
    text = text[text.index("def ") :]
    for fault in faults:
        assert fault.right in text, f"{raw.__name__} has no {fault.right!r}"
        text = text.replace(fault.right, fault.wrong)
    exec("from __future__ import annotations\n" + text, space)
    return space[raw.__name__]


def _namespace(
    gl: Gluon,
    delays: Callable[[], None],
    modules: Sequence[types.ModuleType],
    pause: Callable[[], None],
    planted: Sequence[Fault],
    before: Callable[[], None],
) -> dict[str, Any]:
    """The kernel's modules with NumPy under their names."""

    def loaded(addresses: Array) -> Array:
        real = addresses != 0
        return wrapped(np.where(real, gl.memory.load(Pointer(np.where(real, addresses, 256), np.int32)), 0))

    def poll(addresses: Array, watch: Any, block: Any, step: Any, WORDS: int) -> Array:
        waiting = Patience(f"block {int(block)} step {int(step)}: data never came")
        packets = np.asarray(addresses).reshape(-1, 4)
        assert (packets[packets[:, 0] != 0, 0] % 16 == 0).all(), "a packet that is not 16-byte aligned"
        while True:
            found = loaded(addresses)
            if not (found == -1).any():
                return found
            waiting.look()
            time.sleep(0.0005)

    def poll_splits(
        pointers: Array,
        lses: Array,
        counts: Array,
        site: Any,
        WAITS: bool,
        WORDS: int,
        STRIDE: int,
    ) -> tuple[Array, ...]:
        split, packet = np.arange(8)[:, None], np.arange(len(pointers)) % 4
        # The first address of a packet counts.
        first, lse_first, count = (np.repeat(np.asarray(x)[::4], 4) for x in (pointers, lses, counts))
        places = wrapped(np.where(split < count, (first + packet * 4) + split * STRIDE, 0))
        number = packet + 4 * np.arange(2)[:, None]
        real = (lse_first != 0) & (number < count)  # not every word of their packets will come
        of_lses = wrapped(np.where(real, lse_first + number * 4, 0))
        if WAITS:
            lse, words = poll(of_lses, *site, 4), poll(places, *site, WORDS)
        else:
            lse, words = loaded(of_lses), loaded(places)
        none = np.where(number > 0, np.float32(-np.inf), np.float32(0)).view(np.int32)
        lse = np.where(real, lse, none)
        return (*(wrapped(row) for row in words), *(wrapped(row) for row in lse))

    def spin(pointers: Array, values: Array, watch: Any, block: Any, step: Any) -> None:
        waiting = Patience(f"block {int(block)} step {int(step)}: a counter never rose")
        real = pointers != 0
        while not (gl.memory.load(Pointer(pointers[real], np.int32)) - values[real] >= 0).all():
            waiting.look()
            time.sleep(0.0005)

    def nearer(pointers: Pointer, wanted: Any) -> None:
        gl.memory.load(gl.where(wanted, pointers, Pointer(256, np.int32)))
        gl.memory.lines.update(np.asarray(pointers.address)[np.broadcast_to(wanted, pointers.address.shape)].tolist())

    def copy(descriptor: Descriptor | Matrix | Boxes, at: Sequence[Any], barrier: Barrier, slot: Shared) -> None:
        box = descriptor.box(at)
        assert box.shape == slot.shape
        clock = happens_before.bring(barrier.heard, *slot.raw)
        slot.put(box)
        barrier.add(0, 0, box.nbytes, clock)

    def product(a: Shared | Array, b: Shared, acc: Array, use_acc: Any, is_async: bool) -> Array:
        in_registers = isinstance(a, Array)
        issue("products", *(() if in_registers else (a,)), b)
        left = a if in_registers else a.peek()
        return (acc if use_acc else 0.0 * acc) + multiplied(left, b.peek())

    stores = Stores()
    space: dict[str, Any] = {}
    raws: dict[str, types.FunctionType] = {}
    for module in modules:
        for name, thing in vars(module).items():
            raw = getattr(thing, "fn", None)
            if isinstance(thing, constexpr):
                space[name] = thing.value
            elif isinstance(thing, ConstexprFunction):
                number = thing.fn.__annotations__.get("return") in ("int", int)
                space[name] = thing.fn if number else lambda *sizes: "rows"
            elif isinstance(thing, type) and issubclass(thing, tuple):
                space[name] = thing
            elif isinstance(raw, types.FunctionType):
                assert raws.setdefault(name, raw) is raw, f"two functions {name}: one of them would be called for both"
                space[name] = function(raw, space, planted)
    space |= WITHOUT_PTX | {
        "gl": gl,
        "tl": gl,
        "cuda": types.SimpleNamespace(gdc_wait=before, gdc_launch_dependents=lambda: None),
        "poll_words": poll,
        "poll_splits": poll_splits,
        "load_words": lambda pointers, WORDS: loaded(pointers),
        "spin_counter": spin,
        "prefetch_lines": nearer,
        "prefetch_bytes": lambda pointers, wanted, BYTES: gl.memory.prefetched.extend(
            (gl.block, int(address), BYTES) for address in np.asarray(pointers)[np.asarray(wanted)]
        ),
        "nanoseconds": lambda after: 0,
        "fence": lambda: None,
        "worked_out": lambda number: number,
        "delay": lambda nanos: delays(),
        "fence_async_shared": happens_before.fence,
        "warpgroup_mma": product,
        "mma_v2": lambda a, b, acc: acc + multiplied(a, b),
        "warpgroup_mma_wait": products_end,
        "tma": types.SimpleNamespace(
            async_copy_global_to_shared=copy,
            async_copy_shared_to_global=stores.issue,
            store_wait=stores.wait_until_read,
        ),
        # These functions of chain_kernel_impl are PTX.
        "landed": stores.wait_until_written,
        "acquired": lambda: None,
        "stored": lambda: None,
        "mbarrier": mbarriers(pause),
        "range": range,
        "min": min,
        "max": max,
    }
    return space


def launch(
    memory: Memory,
    workers: int | tuple[int, int],
    arguments: dict[str, Any],
    delays: Callable[[], None] = lambda: None,
    *,
    modules: Sequence[types.ModuleType] = WAVE,
    name: str = "wave_kernel",
    pause: Callable[[], None] = lambda: None,
    planted: Sequence[Fault] = (),
    before: Callable[[], None] = lambda: None,
) -> None:
    """Run one launch of the kernel `name` of `modules`: arguments by name, constants included.

    workers: the grid. delays: what the kernel's own delay() does; pause: done before each wait for a barrier.
    planted: faults that tests want found. before: what has been done when the launch before has been waited for; called
    at each such wait.
    """
    grid = (workers, 1) if isinstance(workers, int) else workers
    lock = threading.Lock()
    FAILED.clear()

    def block(number: int) -> None:
        happens_before.begin()
        gl = Gluon(memory, number, grid, lock)
        _namespace(gl, delays, modules, pause, planted, before)[name](**arguments)

    run_side_by_side([lambda number=number: block(number) for number in range(math.prod(grid))])
