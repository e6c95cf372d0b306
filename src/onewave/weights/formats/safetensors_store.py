"""The weights of a Hugging Face directory: one safetensors file, or shards with an index."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn, cast

import torch
from safetensors import safe_open

from onewave.base.errors import WeightsError
from onewave.base.json_files import read_json_object
from onewave.weights.formats.adapter import refuse_adapter_tensors
from onewave.weights.formats.safetensors_header import read_header
from onewave.weights.store import TensorInfo, WeightStore, quote

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class SafetensorsStore(WeightStore):
    """Mapped safetensors files. They hold no GGUF blocks, and each part of a quantised matrix is a tensor of its own
    (weights/quantized)."""

    def __init__(self, directory: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self.description = str(directory)
        self.tensors: Mapping[str, TensorInfo] = tensors
        self._handles: dict[Path, Any] = {}
        self._lock = Lock()

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> "SafetensorsStore":
        """Find and check the safetensors files of a directory; no tensor is read yet.

        Prefers `model.safetensors`, then the shards of `model.safetensors.index.json`, then a lone `*.safetensors`.
        Raises WeightsError, also for a directory that has only pickled weights: those are never opened;
        UnsupportedError for a LoRA adapter alone.
        """
        directory = Path(directory)
        # lexists: a link to where one may not look is there, and reading it says why it can't be read.
        if os.path.lexists(directory / _SINGLE):
            tensors = read_header(directory / _SINGLE)
        elif os.path.lexists(directory / _INDEX):
            tensors = _read_shards(directory)
        else:
            tensors = read_header(_lone_file(directory))
        refuse_adapter_tensors(str(directory), tensors)
        return cls(directory, tensors)

    def load(self, name: str) -> torch.Tensor:
        """Return one tensor as a view of the mapped file. Raises WeightsError."""
        tensor = self.find(name)
        try:
            return cast(torch.Tensor, self._handle(tensor.file).get_tensor(name))
        except Exception as error:
            # The header has been checked: what is left is a file that changed or went away under us.
            raise WeightsError(str(tensor.file), got=f"tensor {quote(name)} can't be read ({error})") from error

    def close(self) -> None:
        """Let go of the mappings; each goes with the last tensor that views it."""
        with self._lock:
            self._handles.clear()

    def _handle(self, file: Path) -> Any:
        with self._lock:
            if file not in self._handles:
                self._handles[file] = safe_open(str(file), framework="pt", device="cpu")
            return self._handles[file]


def _read_shards(directory: Path) -> dict[str, TensorInfo]:
    """Read every shard that the index names and check the two against each other."""
    index = directory / _INDEX
    weight_map = _weight_map(index)
    tensors: dict[str, TensorInfo] = {}
    for shard in sorted(set(weight_map.values())):
        if not os.path.lexists(directory / shard):
            first = next(name for name, owner in weight_map.items() if owner == shard)
            _fail(
                directory / shard,
                f"missing; {_INDEX} puts tensor {quote(first)} there",
                f"Fetch all {len(set(weight_map.values()))} shards.",
            )
        for name, tensor in read_header(directory / shard).items():
            if name in tensors:
                _fail(tensor.file, f"tensor {quote(name)} is also in {tensors[name].file.name}")
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file.name != shard:
            _fail(directory / shard, f"has no tensor {quote(name)}, though {_INDEX} says so", "Fetch the model again.")
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """Return the index's table of tensor name -> shard, every shard a plain file name."""
    weight_map = read_json_object(index, WeightsError, strict=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        _fail(index, "has no weight_map from tensor names to shards")
    entries = cast("dict[str, object]", weight_map)
    for name, shard in entries.items():
        if not isinstance(shard, str) or not re.fullmatch(r"[\w][\w.\-]*\.safetensors", shard):
            _fail(
                index,
                f"puts tensor {quote(name)} in {quote(str(shard))}",
                "A shard is named by a plain *.safetensors file name beside the index.",
            )
    return cast("dict[str, str]", entries)


def _lone_file(directory: Path) -> Path:
    """Return the only safetensors file of a directory that has neither of the usual names."""
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        _fail(directory, f"can't be read ({error.strerror or error})")
    found = [name for name in names if name.endswith(".safetensors")]
    if len(found) == 1 and not _SHARD.search(found[0]):
        return directory / found[0]
    if found:
        _fail(directory / _INDEX, f"missing beside {', '.join(found[:3])}", "Fetch the index file of the shards.")
    pickled = [name for name in names if name.endswith(_PICKLES)]
    if pickled:
        _fail(
            directory,
            f"has weights only as a pickle ({pickled[0]}), which can run code when opened",
            "Convert it with transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...).",
        )
    gguf = [name for name in names if name.endswith(".gguf")]
    if gguf:
        _fail(directory, "has no *.safetensors file", f"It has {gguf[0]}: give the path of that file instead.")
    raise WeightsError(
        str(directory),
        got="has no weights",
        allowed="model.safetensors, or model.safetensors.index.json and its shards",
        next='Fetch them, or add load_format="dummy" for random weights.',
    )


def _fail(path: Path, problem: str, next: str | None = None) -> NoReturn:
    raise WeightsError(str(path), got=problem, next=next)
