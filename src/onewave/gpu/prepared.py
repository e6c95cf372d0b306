"""Prepared calls: all that a form of call decides is decided once; then addresses are packed and kernels launched.

An operator's call takes 200 us of a host and more: checks, the choice, the grid, descriptors, binding of arguments.
All that depends on shapes, strides, dtypes, alignment and options alone. So one call of each form is recorded
(tape.py): its launches, argument by argument. What is no address is kept as it is. An address is an operand's, a
result's or that of memory of ours, plus an offset. A prepared call makes the results, packs addresses and calls
Triton's launcher.

A call whose form decides more than that is not prepared: where an argument lies in a tensor that was made on the way
(a copy), or something other than a kernel of ours has written to a tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.nvidia import driver as launchers
from triton.runtime import driver

from onewave.gpu.scratch import held
from onewave.gpu.tape import Launched, Tape

# The launcher's arguments, and how it takes descriptors, are Triton's own affair: another version's kernels are
# launched through Triton, as before.
_KNOWN_TRITON = "3.6."
_STREAM_AT = 3
_MAX_MAPS, _MAX_STREAMS = 4096, 64
_ALONE = nullcontext()


class _At:
    """Stands for a tensor where a descriptor asks it for its address."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


_Pointer = tuple[int, int, int]
_Described = tuple[int, int, int, Callable[[int], Any], int]


class _Launch(NamedTuple):
    """launch(*args), but for addresses. pointers: (place among args, source, offset); described: with what makes TMA's
    descriptor at an address, and a number for it. compiled: kept, as the launcher knows its function by a number."""

    launch: Callable[..., object]
    args: list[Any]
    pointers: list[_Pointer]
    described: list[_Described]
    compiled: Any


# TMA's descriptors, by number and address. One that lies where another tensor lay is as right for that one.
_maps: dict[tuple[int, int], Any] = {}
_numbers = itertools.count()


class Prepared:
    """Calls of one form. Nothing of it changes but the memory that it knows by stream."""

    def __init__(
        self,
        launches: tuple[_Launch, ...],
        makers: tuple[Callable[[], Tensor], ...],
        returned: tuple[int, ...] | int,
        memory: tuple[Callable[[], Tensor], ...],
        device: torch.device,
    ) -> None:
        self._launches, self._makers, self._returned, self._memory = launches, makers, returned, memory
        self._device, self._index = device, device.index or 0
        self._stream_of: Callable[[int], int] = driver.active.get_current_stream  # pyright: ignore[reportAttributeAccessIssue]
        self._known: dict[int, tuple[list[int], list[Tensor]]] = {}

    def __call__(self, tensors: list[Tensor], addresses: list[int]) -> Any:
        """Launch on the current stream and return what the operator returns. addresses: of the tensors; it grows."""
        for make in self._makers:
            made = make()
            tensors.append(made)
            addresses.append(made.data_ptr())
        stream = self._stream_of(self._index)
        if self._memory:
            addresses += self._addresses(stream)
        with held(self._device) if len(self._launches) > 1 else _ALONE:
            for each in self._launches:
                args = _packed(each, addresses)
                args[_STREAM_AT] = stream
                each.launch(*args)
        return self._result(tensors)

    def bound(self, tensors: list[Tensor], addresses: list[int]) -> tuple[Callable[[], None], Any] | None:
        """Return what launches a call with these very operands on the current stream, again and again, and the result
        that it writes anew each time. The lists grow, as in a call. None for calls that take memory of a stream."""
        if self._memory:
            return None
        for make in self._makers:
            tensors.append(make())
            addresses.append(tensors[-1].data_ptr())
        launches = [(each, _packed(each, addresses)) for each in self._launches]
        stream_of, index = self._stream_of, self._index

        def launch() -> None:
            stream = stream_of(index)
            for each, args in launches:
                args[_STREAM_AT] = stream
                each.launch(*args)

        return launch, self._result(tensors)

    def _result(self, tensors: list[Tensor]) -> Any:
        returned = self._returned
        return tensors[returned] if type(returned) is int else tuple([tensors[at] for at in returned])  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]

    @staticmethod
    def has_hooks() -> bool:
        """Whether something, such as a profiler, wants to be called before or after each of Triton's launches."""
        runtime = knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))

    def _addresses(self, stream: int) -> list[int]:
        """Where our own memory lies for this stream."""
        known = self._known.get(stream)
        if known is None:
            blocks = [again() for again in self._memory]
            known = [block.data_ptr() for block in blocks], blocks
            if len(self._known) >= _MAX_STREAMS:
                self._known.clear()
            self._known[stream] = known
        return known[0]


def _packed(one: _Launch, addresses: list[int]) -> list[Any]:
    """A launcher's arguments, but for the stream."""
    args = one.args.copy()
    for at, source, offset in one.pointers:
        args[at] = addresses[source] + offset
    for at, source, offset, describe, number in one.described:
        address = addresses[source] + offset
        found = _maps.get((number, address))
        args[at] = _described(number, address, describe) if found is None else found
    return args


def _described(number: int, address: int, describe: Callable[[int], Any]) -> Any:
    if len(_maps) >= _MAX_MAPS:
        _maps.clear()
    made = _maps[number, address] = describe(address)
    return made


def prepare(tape: Tape, operands: Sequence[Tensor], result: Any) -> Prepared | None:
    """Return the prepared call of what a call with these operands launched; None where it can't be prepared.

    operands: on one device, with storages of their own. result: what the call returned, a tensor or a tuple of them.
    """
    if not (tape.launches and triton.__version__.startswith(_KNOWN_TRITON)):
        return None
    results: tuple[Any, ...] = result if isinstance(result, tuple) else (result,)
    if not all(type(each) is Tensor for each in results):
        return None
    # By storage: its source, and the address where offsets begin.
    sources: dict[int, tuple[int, int]] = {}
    returned: list[int] = []
    made: list[Tensor] = []
    for at, tensor in enumerate(operands):
        sources[_storage(tensor)] = at, tensor.data_ptr()
    for tensor in results:
        same = [at for at, operand in enumerate(operands) if operand is tensor]
        if not same and _storage(tensor) in sources:
            return None
        if not same:
            sources[_storage(tensor)] = len(operands) + len(made), tensor.data_ptr()
            same = [len(operands) + len(made)]
            made.append(tensor)
        returned.append(same[0])
    for at, (block, _) in enumerate(tape.memory):
        sources[_storage(block)] = len(operands) + len(made) + at, block.data_ptr()
    if not (all(map(_is_whole, made)) and all(map(_is_unwritten, (*operands, *made)))):
        return None
    launches = [each for each in (_prepared(one, sources) for one in tape.launches) if each is not None]
    used = {slot[1] for each in launches for slot in (*each.pointers, *each.described)}
    if len(launches) < len(tape.launches) or not used.issuperset(returned):
        return None
    return Prepared(
        tuple(launches),
        tuple(_maker(each) for each in made),
        tuple(returned) if isinstance(result, tuple) else returned[0],
        tuple(again for _, again in tape.memory),
        operands[0].device,
    )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _is_whole(tensor: Tensor) -> bool:
    """Whether it is all of its storage, so that an empty one of its shape and strides is as good."""
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes


def _is_unwritten(tensor: Tensor) -> bool:
    """Whether PyTorch has written nothing to it since it was made; not known of inference tensors."""
    return tensor.is_inference() or tensor._version == 0  # pyright: ignore[reportPrivateUsage]


def _maker(tensor: Tensor) -> Callable[[], Tensor]:
    return partial(torch.empty_strided, tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _prepared(one: Launched, sources: dict[int, tuple[int, int]]) -> _Launch | None:
    """Return the arguments of Triton's launcher in order, and the places of addresses; None if a source is unknown."""
    compiled = one.compiled
    if compiled is None or compiled.metadata.global_scratch_size or compiled.metadata.profile_scratch_size:
        return None
    run = compiled.run
    launch, of_descriptors = _launcher(run.launch)
    args: list[Any] = [
        *one.grid, 0, compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None,
        compiled.packed_metadata, None, None, None,
    ]  # fmt: skip
    pointers: list[_Pointer] = []
    described: list[_Described] = []
    for value in one.values:
        is_descriptor = hasattr(value, "block_shape")
        tensor = value.base if is_descriptor else value
        if isinstance(tensor, Tensor):
            source, begin = sources.get(_storage(tensor), (-1, 0))
            if source < 0 or not tensor.numel():
                return None
            metadata = of_descriptors.pop(0) if is_descriptor and of_descriptors else None
            if metadata is None:
                pointers.append((len(args), source, tensor.data_ptr() - begin))
            else:
                describe = partial(_describe, _blank(value), metadata)
                described.append((len(args), source, tensor.data_ptr() - begin, describe, next(_numbers)))
            # A descriptor's sizes and strides follow it.
            rest = launchers.make_tensordesc_arg(value, metadata)[1:] if is_descriptor else ()
            args += [0, *rest]
        elif isinstance(value, tuple) and _has_tensors(value):
            return None
        else:
            args.append(value)
    return _Launch(launch, args, pointers, described, compiled)


def _launcher(launch: Any) -> tuple[Callable[..., object], list[Any]]:
    """The compiled function in Triton's wrapper, which makes descriptors at each launch, and what it knows of them."""
    cells = getattr(launch, "__closure__", None)
    if cells is None:
        return launch, []
    names = dict(zip(launch.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))
    return names["launcher"], list(names["tensordesc_meta"])


def _has_tensors(values: tuple[Any, ...]) -> bool:
    return any(isinstance(each, Tensor) or (isinstance(each, tuple) and _has_tensors(each)) for each in values)  # pyright: ignore[reportUnknownArgumentType]


def _blank(descriptor: Any) -> Any:
    """The same without its tensor."""
    blank = copy(descriptor)
    blank.base = None
    return blank


def _describe(blank: Any, metadata: Any, address: int) -> Any:
    """TMA's descriptor of what lies at an address."""
    descriptor = copy(blank)
    descriptor.base = _At(address)
    return launchers.make_tensordesc_arg(descriptor, metadata)[0]
