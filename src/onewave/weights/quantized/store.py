"""A quantised checkpoint as a store of matrices: the parts of each are one tensor under the usual name."""

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import torch

from onewave.base.errors import WeightsError
from onewave.base.grouped import GroupedMatrix
from onewave.base.quantized import QuantizedRows
from onewave.weights.quantized.readers import NAMES, Plan, plan, read
from onewave.weights.quantized.scheme import Scheme
from onewave.weights.store import TensorInfo, WeightStore, quote

# Codes in a file's own dtype that are not the matrix itself.
_CODES = ("I8", "U8", "F8_E4M3", "F8_E5M2", "I32")
# Scales of a quantised KV cache, which engine/load/kv_format.py reads.
_UNUSED = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale", ".k_zero_point", ".v_zero_point")


_ENDINGS = tuple(f".{part}" for names in NAMES.values() for part in (names.main, names.scale) if part != "weight")


def open_matrices(store: WeightStore, scheme: Scheme | None) -> WeightStore:
    """A checkpoint's store whose matrices are whole. Raises WeightsError, for parts without a scheme too."""
    if scheme is not None:
        return QuantizedStore(store, scheme)
    part = next((info for name, info in store.tensors.items() if name.endswith(_ENDINGS)), None)
    if part is not None:
        raise WeightsError(
            f"{part.file}: tensor {quote(part.name)}",
            got="a part of a quantised matrix, but the config has no quantization_config",
            next="Fetch config.json again.",
        )
    return store


class QuantizedStore(WeightStore):
    """Another store's tensors.

    A matrix whose parts are `X.qweight`, `X.scales` and so on is `X.weight`; whatever is not quantised is there as it
    is, and so is a part that belongs to no matrix.
    """

    def __init__(self, store: WeightStore, scheme: Scheme) -> None:
        """Raises WeightsError for parts that do not fit together."""
        self._store, self.description = store, store.description
        self._plans: dict[str, Plan] = {}
        tensors = {name: info for name, info in store.tensors.items() if not name.endswith(_UNUSED)}
        each: Scheme | None = scheme
        while each is not None:
            self._find(each, tensors)
            each = each.beside
        self.tensors: Mapping[str, TensorInfo] = tensors | {
            name: TensorInfo(name, made.shape, made.label, made.nbytes, made.main.file)
            for name, made in self._plans.items()
        }

    def _find(self, scheme: Scheme, tensors: dict[str, TensorInfo]) -> None:
        """Take the parts of one packing's matrices out of the tensors."""
        names = NAMES[scheme.packing]
        ending = f".{names.main}"
        own = names.main != "weight"
        for name in [name for name in tensors if name.endswith(ending) and (own or tensors[name].dtype in _CODES)]:
            module = name.removesuffix(ending)
            parts = {
                part: tensors.pop(f"{module}.{part}")
                for part in (names.main, names.scale, *names.needed, *names.other)
                if f"{module}.{part}" in tensors
            }
            if names.scale not in parts and f"{module}.{names.or_scale}" in tensors:
                parts[names.scale] = tensors.pop(f"{module}.{names.or_scale}")
            shape = tuple(self._array(parts["weight_shape"]).flat) if "weight_shape" in parts else None
            made = plan(scheme, parts, shape)
            weight = f"{module}.weight"
            if weight in tensors:
                raise WeightsError(str(made.main.file), got=f"tensors {weight!r} and {made.main.name!r}", allowed="one")
            self._plans[weight] = made

    def load(self, name: str) -> torch.Tensor:
        """Return one tensor; a quantised one in float32. Raises WeightsError, UnsupportedError."""
        matrix = self.load_grouped(name)
        return self._store.load(name) if matrix is None else torch.as_tensor(matrix.dequantize())

    def load_quantized(self, name: str) -> QuantizedRows | None:
        """Return what the store below has: none in safetensors files."""
        return None if name in self._plans else self._store.load_quantized(name)

    def load_grouped(self, name: str, device: torch.device | None = None) -> GroupedMatrix | None:
        """Return a quantised matrix in groups, or None. Raises WeightsError."""
        made = self._plans.get(name)
        if made is None:
            return self._store.load_grouped(name, device)
        return read(made, {part: self._array(info) for part, info in made.parts.items()}, device)

    def close(self) -> None:
        """Let go of the files."""
        self._store.close()

    def _array(self, info: TensorInfo) -> npt.NDArray[Any]:
        tensor = self._store.load(info.name)
        if info.dtype == "F8_E4M3":
            return tensor.view(torch.uint8).numpy()
        return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
