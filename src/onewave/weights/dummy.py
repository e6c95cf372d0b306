"""Seeded random weights, for measuring a model's shape without its checkpoint."""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path

import torch

from onewave.weights.store import TensorInfo, WeightStore

_STD = 0.02
_NORM_STD = 0.1


class DummyStore(WeightStore):
    """A WeightStore that makes each tensor up when asked, directly on `device`.

    A tensor depends only on (seed, name, shape, dtype) and the kind of device (a CPU and a GPU draw differently):
    not on which tensors were made before it, nor in which thread. Norm weights ("norm" in the name) are uniform in
    1 ± 0.1, all others normal with standard deviation 0.02, about what trained models have.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, seed: int, device: torch.device | str
    ) -> None:
        self.description = f"dummy weights (seed {seed})"
        self._dtype, self._seed, self._device = dtype, seed, torch.device(device)
        dtype_name = str(dtype).removeprefix("torch.")
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, tuple(shape), dtype_name, math.prod(shape) * dtype.itemsize, Path("dummy"))
            for name, shape in shapes.items()
        }

    def load(self, name: str) -> torch.Tensor:
        """Make one tensor on the store's device. Raises WeightsError for an unknown name."""
        tensor = self.find(name)
        identity = f"{self._seed}\0{name}\0{tensor.shape}\0{tensor.dtype}".encode()
        seed = int.from_bytes(hashlib.sha256(identity).digest()[:8], "little") >> 1
        generator = torch.Generator(self._device).manual_seed(seed)
        values = torch.empty(tensor.shape, dtype=self._dtype, device=self._device)
        if "norm" in name:
            return values.uniform_(1 - _NORM_STD, 1 + _NORM_STD, generator=generator)
        return values.normal_(0, _STD, generator=generator)

    def close(self) -> None:
        """Nothing to let go of."""
