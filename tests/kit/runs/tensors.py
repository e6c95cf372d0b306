"""Runs a recorded launch's PTX on the launch's own tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kit.build import Built
from kit.ptx.ptx_in_numpy import Access, Block, Program
from kit.ptx.ptx_memories import Global


def run(built: Built, given: dict[str, Any], programs: int, written: set[str]) -> set[Access]:
    """Run all blocks of a launch. given: its arguments by name. written: names of tensors that it may write, and does.

    Nothing else is written, and nothing outside the tensors is read. Returns the accesses of shared memory.
    """
    program, memory = Program(built.ptx), Global()
    values: list[Any] = []
    places: dict[int, int] = {}
    for name, value in given.items():
        if name.isupper():
            continue
        if isinstance(value, Tensor):
            storage, own = addressed(value)
            at = places.get(value.untyped_storage().data_ptr())
            if at is None:
                at = memory.put(storage.numpy())
                memory.readable[at : at + len(storage)] = False
                places[value.untyped_storage().data_ptr()] = at
            allowed = memory.writable if name in written else memory.readable
            allowed[at : at + len(storage)] |= own.numpy()
            values.append(at + value.storage_offset() * value.element_size())
        else:
            values += value if isinstance(value, tuple) else [value]
    values += [0] * (len(program.parameters) - len(values))
    arguments = {name: value for (_, name), value in zip(program.parameters, values, strict=True)}
    accesses: set[Access] = set()
    for block in range(programs):
        accesses |= Block(program, memory, arguments, block, built.shared).run().accesses
    for name in written:
        storage, _ = addressed(given[name])
        at = places[given[name].untyped_storage().data_ptr()]
        storage.copy_(torch.from_numpy(memory.bytes[at : at + len(storage)].copy()))
    return accesses


def addressed(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """(bytes of a tensor's whole memory, which of them are its own elements')."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    elements = torch.arange(len(storage) // tensor.element_size())
    own = torch.zeros(len(elements), dtype=torch.bool)
    if tensor.numel():
        own[elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).reshape(-1)] = True
    return storage, own.repeat_interleave(tensor.element_size())
