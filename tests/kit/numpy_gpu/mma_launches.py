"""Records what the m16n8k16 kernel of attention is launched with, so that its PTX or its source may be run instead."""

from dataclasses import dataclass
from typing import Any

import pytest

from kit.device import pretend
from onewave.ops.attention.mma import launch as mma_impl


@dataclass
class Launch:
    """One launch. given: the kernel's arguments by name, constants included."""

    programs: int
    given: dict[str, Any]
    options: dict[str, int]


class Recorder:
    """Stands for the compiled kernel: recorder[(programs,)](*arguments)."""

    def __init__(self, names: list[str]) -> None:
        self.names = self.arg_names = names
        self.launches = list[Launch]()

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*values: Any, num_warps: int, maxnreg: int, **constants: Any) -> None:
            given = dict(zip(self.names, values, strict=False)) | constants
            assert given.keys() == set(self.names)
            options = {"num_warps": num_warps, "maxnreg": maxnreg}
            self.launches.append(Launch(grid[0], given, options))

        return launch


def record(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (8, 0), *, num_sms: int = 1) -> Recorder:
    """From now on CPU tensors go the way of a GPU's as far as the kernel. num_sms: many ask for narrow tiles."""
    found = Recorder(list(mma_impl.mma_kernel.arg_names))
    monkeypatch.setattr(mma_impl, "mma_kernel", found)
    pretend(monkeypatch, capability, num_sms=num_sms)
    return found
