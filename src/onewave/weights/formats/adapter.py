"""LoRA adapters: differences to a model that lies elsewhere. None is applied here; each is refused by that name."""

import os
from collections.abc import Iterable
from pathlib import Path

from onewave.base.errors import UnsupportedError

_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


def adapter_error(where: str) -> UnsupportedError:
    """Return the error for an adapter in place of a model."""
    return UnsupportedError(
        where,
        got="a LoRA adapter alone",
        allowed="a whole model",
        next="Merge it into its base model (peft's merge_and_unload), save that, and give its directory.",
    )


def refuse_adapter_directory(directory: Path) -> None:
    """Raise UnsupportedError for a directory with the files of an adapter. For one without those of a model."""
    if any(os.path.lexists(directory / name) for name in _FILES):
        raise adapter_error(str(directory))


def refuse_adapter_tensors(where: str, names: Iterable[str]) -> None:
    """Raise UnsupportedError where tensors are those of an adapter, whatever else there is beside them."""
    if any(".lora_A." in name or ".lora_B." in name for name in names):
        raise adapter_error(where)
