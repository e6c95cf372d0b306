"""Runs Hopper's attention kernels' own source in NumPy: every statement of every partition, launched as on a GPU.

Built on gluon_in_numpy's arrays, mbarriers and threads, a thread a partition. TMA goes through the descriptors that the
launcher made; a store reads shared memory when it is waited for; named
barriers block as bar.sync does, and every access to shared memory must be ordered with those before it
(happens_before). Shared memory is laid out in blocks of 64 columns, so that pieces of a tile land where the kernel puts
them. Numbers are float32 throughout, except that P of float8 is rounded to e4m3 and
added as float16.
"""

from __future__ import annotations

import inspect
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from triton.language.core import constexpr
from triton.runtime.jit import ConstexprFunction

from kit.device import pretend
from kit.numpy_gpu import happens_before
from kit.numpy_gpu.gluon_in_numpy import (
    Array,
    Fault,
    Gluon,
    function,
    issue,
    mbarriers,
    products_end,
    wait_for,
    wrapped,
)  # fmt: skip
from kit.numpy_gpu.numpy_barriers import FAILED, Barrier, Barriers, Patience, run_side_by_side
from onewave.ops.attention.fp8 import kernel as fp8_kernel_impl
from onewave.ops.attention.fp8 import launch as fp8_impl
from onewave.ops.attention.hopper import columns as gluon_columns_impl
from onewave.ops.attention.hopper import kernel as gluon_kernel_impl
from onewave.ops.attention.hopper import launch as gluon_impl
from onewave.ops.attention.hopper import load as gluon_load_impl
from onewave.ops.attention.hopper import softmax as gluon_softmax_impl
from onewave.ops.attention.hopper import start as gluon_start_impl
from onewave.ops.attention.hopper import tiles as gluon_tiles_impl
from onewave.ops.attention.hopper import warpgroup as gluon_warpgroup_impl
from onewave.ops.attention.split import kernel as split_kernel_impl
from onewave.ops.attention.split import launch as split_impl

_ACROSS = 64
BOTH = (gluon_tiles_impl, gluon_warpgroup_impl, gluon_softmax_impl)
MODULES = {
    "attention_kernel": (*BOTH, gluon_columns_impl, gluon_start_impl, gluon_load_impl, gluon_kernel_impl),
    "fp8_kernel": (*BOTH, fp8_kernel_impl),
    "weigh_kernel": (*BOTH, gluon_start_impl, split_kernel_impl),
    "combine_kernel": (*BOTH, gluon_start_impl, split_kernel_impl),
}


class Place:
    """A pointer into a tensor's memory, or many."""

    def __init__(self, values: Any, at: Any = 0):
        self.values, self.at = values, at

    def __add__(self, steps: Any) -> Place:
        return Place(self.values, self.at + np.asarray(steps).astype(np.int64))


class Tile:
    """Shared memory: float32 in blocks of 64 columns, NaN until written."""

    def __init__(self, flat: np.ndarray, shape: Sequence[int], turned: bool = False):
        self.flat, self.shape, self.turned = flat, [int(n) for n in shape], turned

    def index(self, at: Any) -> Tile:
        size = int(np.prod(self.shape[1:]))
        assert 0 <= int(at) < self.shape[0]
        return Tile(self.flat[int(at) * size :], self.shape[1:])

    def _reinterpret(self, _: object, shape: Sequence[int], __: object) -> Tile:
        return Tile(self.flat, shape)

    def slice(self, start: int, length: int) -> Rows:
        return Rows(self, int(start), int(length))

    def permute(self, order: list[int]) -> Tile:
        assert list(order) == [1, 0]
        return Tile(self.flat, self.shape, turned=True)

    @property
    def cells(self) -> np.ndarray:
        rows, columns = self.shape[-2:]
        across = min(columns, _ACROSS)
        return self.flat[: rows * columns].reshape(columns // across, rows, across).transpose(1, 0, 2)

    @property
    def raw(self) -> list[np.ndarray]:
        return [self.flat[: self.shape[-2] * self.shape[-1]]]

    def peek(self) -> Array:
        """The values that lie there, whoever asks."""
        found = wrapped(self.cells.reshape(self.shape[-2:]).copy())
        return found.T if self.turned else found

    def put(self, values: Any) -> None:
        self.cells[...] = np.asarray(values).reshape(self.cells.shape)

    def load(self, _: object = None) -> Array:
        happens_before.reads(*self.raw)
        return self.peek()

    def store(self, values: Any) -> None:
        happens_before.writes(*self.raw)
        self.put(values)


class Rows:
    """Some rows of a tile, to read."""

    def __init__(self, tile: Tile, start: int, length: int, turned: bool = False):
        self.tile, self.start, self.length, self.turned = tile, start, length, turned

    def permute(self, order: list[int]) -> Rows:
        assert list(order) == [1, 0]
        return Rows(self.tile, self.start, self.length, turned=True)

    @property
    def raw(self) -> list[np.ndarray]:
        rows, columns = self.tile.shape[-2:]
        starts = [(block * rows + self.start) * _ACROSS for block in range(columns // _ACROSS)]
        return [self.tile.flat[start:][: self.length * _ACROSS] for start in starts]

    def peek(self) -> Array:
        found = self.tile.peek()[self.start :][: self.length]
        return found.T if self.turned else found


class Words:
    """Shared memory of single numbers, which nobody may read before they are written."""

    def __init__(self, count: int):
        self.values: list[int | None] = [None] * count
        self.marks = happens_before.allocate(np.zeros(count, np.uint8), 1)

    def index(self, at: Any) -> Word:
        return Word(self, int(at))


class Word:
    def __init__(self, words: Words, at: int):
        self.words, self.at = words, at

    def load(self, _: object = None) -> Array:
        happens_before.reads(self.words.marks[self.at :][:1])
        found = self.words.values[self.at]
        assert found is not None, "a word that nobody has written"
        return wrapped(np.array([found], dtype=np.int64))

    def store(self, values: Any) -> None:
        happens_before.writes(self.words.marks[self.at :][:1])
        self.words.values[self.at] = int(np.asarray(values)[0])


class Described:
    """A host's descriptor: what the kernel asks of it, and its memory, as TMA addresses it: coordinates times strides
    modulo 2^64, zeros out of bounds. Strides of one-byte elements count bytes."""

    def __init__(self, made: Any):
        self.base, self.shape, self.strides, self.block_shape = made.base, made.shape, made.strides, made.block_shape
        self.dtype, self.layout = np.float32, made.layout

    def rows(self, at: Sequence[Any]) -> tuple[torch.Tensor, int]:
        """A box's rows in memory from its first one inside the bounds, and where in the box that one stands."""
        at, (rows, columns), size = [int(x) for x in at], self.block_shape[-2:], self.base.element_size()
        others = [axis for axis in range(len(at)) if axis != len(at) - 2]
        if any(not 0 <= at[axis] < self.shape[axis] for axis in others):
            return self.base.new_empty(0, columns), 0
        first = max(0, -at[-2])
        inside = max(0, min(rows, self.shape[-2] - at[-2]) - first)
        at[-2] += first
        offset = size * sum(x * step for x, step in zip(at, self.strides, strict=True)) % 2**64 // size
        width = min(columns, self.shape[-1] - at[-1])
        start = self.base.storage_offset() + (offset if inside else 0)
        return self.base.as_strided((inside, width), (self.strides[-2], 1), start), first

    def read(self, at: Sequence[Any]) -> np.ndarray:
        view, first = self.rows(at)
        box = torch.zeros(self.block_shape[-2:])
        box[first : first + len(view), : view.shape[1]] = view.float()
        return box.numpy()

    def write(self, at: Sequence[Any], values: np.ndarray) -> None:
        view, first = self.rows(at)
        view.copy_(torch.from_numpy(values)[first : first + len(view), : view.shape[1]])


class Language(Gluon):
    """The kernels' `gl`, for one program."""

    float8e4nv = bfloat16 = np.float32

    def __init__(self, program: tuple[int, ...], programs: tuple[int, ...]):
        self.program, self.programs = program, programs

    def program_id(self, axis: int) -> Array:
        return wrapped(np.int64(self.program[axis]))

    def num_programs(self, axis: int) -> Array:
        return wrapped(np.int64(self.programs[axis]))

    def allocate_shared_memory(self, _: Any, shape: Sequence[int], layout: Any) -> Any:
        if layout == "barrier":
            return Barriers(Barrier() for _ in range(shape[0]))
        if layout == "rows":
            return Words(int(shape[0]))
        cells = np.full(int(np.prod(shape)), np.nan, dtype=np.float32)
        return Tile(happens_before.allocate(cells, _ACROSS * cells.itemsize), shape)

    def load(self, place: Place, mask: Any = True, other: Any = 0, **_: Any) -> Array:
        found = place.values[np.where(mask, place.at, 0)] if np.any(mask) else np.full(np.shape(place.at), other)
        return wrapped(np.where(mask, found, other))

    def store(self, place: Place, values: Any, mask: Any = True) -> None:
        keep = np.broadcast_to(np.asarray(mask), place.at.shape)
        place.values[place.at[keep]] = np.asarray(values)[keep]

    def warp_specialize(self, parts: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], *_: Any) -> None:
        """Twins run the first partition, as gpu/ptx/shared_warpgroups.py has it."""
        run = [parts[0] if part.__name__ == "twin" else (part, arguments) for part, arguments in parts]
        happens_before.agents_of(
            [(numbered(at, part), given) for at, (part, given) in enumerate(run)], run_side_by_side
        )


_PARTITION = threading.local()


def numbered(number: int, part: Callable[..., Any]) -> Callable[..., Any]:
    """A partition that knows its number, under the name of what all warpgroups do."""

    def run(*arguments: Any) -> None:
        _PARTITION.number = number
        part(*arguments)

    run.__name__ = part.__name__.removesuffix("_as_one")
    return run


class Named:
    """Named barriers of two warpgroups: a sync passes once the other one has arrived."""

    def __init__(self) -> None:
        self.changed, self.arrived = threading.Condition(), defaultdict[int, int](int)
        self.heard = defaultdict[int, happens_before.Heard](happens_before.Heard)

    def arrive(self, number: Any) -> None:
        with self.changed:
            self.arrived[int(number)] += 1
            assert self.arrived[int(number)] == 1, "two arrivals in one phase"
            self.heard[int(number)].arrive()
            self.heard[int(number)].end_phase()
            self.changed.notify_all()

    def sync(self, number: Any) -> None:
        with self.changed:
            waiting = Patience(f"nobody arrived at barrier {int(number)}")
            while not self.changed.wait_for(lambda: self.arrived[int(number)] > 0, timeout=0.05):
                waiting.look()
            self.arrived[int(number)] -= 1
            self.heard[int(number)].acquire()


def only_warpgroup(number: int) -> None:
    assert number == _PARTITION.number, "another warpgroup's way"


def take(counter: Place) -> Array:
    """gluon_tiles_impl.take; programs run one after another."""
    counter.values[counter.at] += 1
    return wrapped(np.int64(counter.values[counter.at] - 1))


def in_order(p: Array, _: object, BN: int) -> Array:
    """fp8_kernel_impl's."""
    return wrapped(p.reshape(64, BN // 16, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(64, BN))


def rounded(p: Array) -> Array:
    """fp8_kernel_impl's."""
    found = torch.from_numpy(np.ascontiguousarray(p)).clamp(max=448).to(torch.float8_e4m3fn)
    return wrapped(found.float().numpy())


def weights_of(bits: Array) -> tuple[Array, Array]:
    """fp8_kernel_impl's."""
    half = np.maximum(bits, 0).astype(np.float16).view(np.uint16)
    half = np.where(np.isnan(bits), np.uint16(0x7FFF), half)
    weights = torch.from_numpy(half.astype(np.uint8)).view(torch.float8_e4m3fn)
    return wrapped(weights.float().numpy()), wrapped((half << 7).view(np.float16))


def namespace(
    gl: Language, modules: Sequence[types.ModuleType], count: Callable[[int], None], planted: Sequence[Fault]
) -> dict[str, Any]:
    """The kernel's modules with NumPy under their names. count: told every product's multiplications."""
    named, pending = Named(), threading.local()

    def product(a: Any, b: Tile | Rows, acc: Array, use_acc: bool = True, is_async: bool = False) -> Array:
        issue("products", a, b)
        left = a.peek() if isinstance(a, Tile) else a
        right = np.asarray(b.peek(), np.float32)
        count(left.shape[0] * right.size)
        found = np.asarray(left, np.float32) @ right
        return wrapped(np.asarray(acc) + found if use_acc else found)

    def bring(descriptor: Described, at: Sequence[Any], barrier: Barrier, box: Tile) -> None:
        values = descriptor.read(at)
        assert list(values.shape) == box.shape[-2:]
        clock = happens_before.bring(barrier.heard, *box.raw)
        box.put(values)
        barrier.add(0, 0, values.size * descriptor.base.element_size(), clock)

    def send(descriptor: Described, at: Sequence[Any], box: Tile) -> None:
        issue("stores", box)
        pending.stores = [*getattr(pending, "stores", []), (descriptor, [int(x) for x in at], box)]

    def sent(still: int) -> None:
        wait_for("stores", still)
        stores = getattr(pending, "stores", [])
        pending.stores = stores[max(0, len(stores) - still) :] if still else []
        for descriptor, at, box in stores[: max(0, len(stores) - still)]:
            descriptor.write(at, np.ascontiguousarray(box.peek()))

    space: dict[str, Any] = {}
    for module in modules:
        for name, thing in vars(module).items():
            raw = getattr(thing, "fn", None)
            if isinstance(thing, constexpr):
                space[name] = thing.value
            elif isinstance(thing, ConstexprFunction):
                space[name] = compile_time(thing.fn)
            elif isinstance(thing, type) and issubclass(thing, tuple):
                space[name] = thing
            elif isinstance(raw, types.FunctionType):
                space[name] = function(raw, space, planted)
    # An aggregate keeps its constructor, which closes over its fields, among what it is hashed by.
    names = list(inspect.getclosurevars(gluon_tiles_impl.Problem.hash_attrs[0].fn).nonlocals["fields"])
    space |= {
        "gl": gl,
        "Problem": lambda *values: SimpleNamespace(**dict(zip(names, values, strict=True))),
        "barrier_sync": named.sync,
        "barrier_arrive": named.arrive,
        "declare_vote": lambda _: None,
        "cast_ballots": lambda _, ballots: setattr(_PARTITION, "found", int(np.any(ballots))),
        "vote": lambda *_: None,
        "voted": lambda _: _PARTITION.found,
        "own_warpgroup": lambda *_: _PARTITION.number,
        "only_warpgroup": only_warpgroup,
        "in_order": in_order,
        "rounded": rounded,
        "weights_of": weights_of,
        "take": take,
        "fence_async_shared": happens_before.fence,
        "warpgroup_mma": product,
        "warpgroup_mma_wait": products_end,
        "tma": SimpleNamespace(
            async_copy_global_to_shared=bring, async_copy_shared_to_global=send, store_wait=sent,
        ),
        "mbarrier": mbarriers(),
        "cuda": SimpleNamespace(gdc_wait=lambda: None, gdc_launch_dependents=lambda: None),
        "min": min,
    }  # fmt: skip
    return space


def compile_time(raw: Callable[..., Any]) -> Callable[..., Any]:
    """A function of constants, which are arrays here."""
    return lambda *sizes: raw(*(int(n) if isinstance(n, Array) else n for n in sizes))


class NumpyKernel:
    """Stands for a compiled kernel: kernel[programs](*arguments). 16-bit tensors are copied, and `out` copied back."""

    def __init__(self, name: str, names: Sequence[str]):
        self.name, self.names, self.launches, self.multiplications = name, list(names), 0, 0
        self.lock, self.planted = threading.Lock(), list[Fault]()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*values: Any, num_warps: int, launch_pdl: bool = False, **constants: Any) -> None:
            assert num_warps == 4
            self.launches += 1
            given = dict(zip(self.names, values, strict=False)) | constants
            assert given.keys() == set(self.names)
            arguments = {name: self._argument(value) for name, value in given.items()}
            for program in np.ndindex(*grid):
                FAILED.clear()
                happens_before.begin()
                space = namespace(Language(program, grid), MODULES[self.name], self._count, self.planted)
                space[self.name](**arguments)
            out = given.get("out")
            if isinstance(out, torch.Tensor):
                out.copy_(torch.from_numpy(arguments["out"].values).view(out.shape))

        return launch

    def _count(self, multiplications: int) -> None:
        with self.lock:
            self.multiplications += multiplications

    @staticmethod
    def _argument(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            plain = value.dtype in (torch.int32, torch.float32)
            return Place((value if plain else value.float()).reshape(-1).numpy())
        if hasattr(value, "block_shape"):
            return Described(value)
        return value if isinstance(value, (bool, str)) else wrapped(value) if isinstance(value, int) else value


def kernels_in_numpy(monkeypatch: pytest.MonkeyPatch, *, programs: int) -> dict[str, NumpyKernel]:
    """Have CPU tensors go the way of a GPU's with so many SMs, into the kernels' source. Returns kernels by name."""
    made = {
        "attention_kernel": NumpyKernel("attention_kernel", gluon_impl.attention_kernel.arg_names),
        "fp8_kernel": NumpyKernel("fp8_kernel", fp8_impl.fp8_kernel.arg_names),
        "weigh_kernel": NumpyKernel("weigh_kernel", split_impl.weigh_kernel.arg_names),
        "combine_kernel": NumpyKernel("combine_kernel", split_impl.combine_kernel.arg_names),
    }
    for name in ("weigh_kernel", "combine_kernel"):
        monkeypatch.setattr(split_impl, name, made[name])
    monkeypatch.setattr(gluon_impl, "attention_kernel", made["attention_kernel"])
    monkeypatch.setattr(fp8_impl, "fp8_kernel", made["fp8_kernel"])
    pretend(monkeypatch, num_sms=programs)
    return made
