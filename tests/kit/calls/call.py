"""One call whose kernels are compiled ahead of time."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """make: the call. capability, sms: of the device that is not there.

    kernels: names of the launches that count; none named: all. inside: what is changed while it is recorded and
    compiled. check: reports more on a launch, with what it was compiled to.
    """

    make: Callable[[], object]
    capability: tuple[int, int] = (9, 0)
    sms: int = 132
    kernels: tuple[str, ...] = ()
    inside: Callable[[], AbstractContextManager[object]] = nullcontext
    check: Callable[[Any, Any], dict[str, Any]] | None = None


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16, **given: Any) -> Tensor:
    """A tensor on the device, of any contents."""
    return torch.empty(shape, dtype=dtype, device="cuda", **given)
