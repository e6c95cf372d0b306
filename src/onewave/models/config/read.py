"""From a model's place on disk to its ModelConfig."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from onewave.base.errors import ConfigError, InvalidArgumentError, shown
from onewave.base.json_files import read_json_object
from onewave.models.config.fields import Fields
from onewave.models.config.gguf import ROPE_DIVISORS, from_gguf
from onewave.models.config.hf import from_hf
from onewave.models.config.model_config import ModelConfig
from onewave.models.config.quantization import read_largest_of_kv, read_scheme, scheme_of
from onewave.weights.fetch.sources import BUILTIN_DIR, ModelLocation, builtin_names
from onewave.weights.quantized.scheme import Scheme

if TYPE_CHECKING:
    from onewave.weights.formats.gguf_store import GGUFStore


def builtin_models() -> tuple[str, ...]:
    """Return the names of the configurations that ship with onewave."""
    return builtin_names()


def builtin_config(name: str) -> ModelConfig:
    """Read a configuration that ships with onewave. name: one of builtin_models()."""
    file = BUILTIN_DIR / f"{name}.json"
    return from_hf(read_json_object(file, ConfigError), source=file.name)


def find_config(model: str) -> ModelConfig:
    """Read a configuration without weights. model: a built-in name, a config.json, its directory, or a GGUF file.

    Fetches nothing, and loads no torch but for a GGUF file. Raises ConfigError, UnsupportedError, InvalidArgumentError,
    WeightsError for a GGUF file that can't be read.
    """
    if model in builtin_names():
        return builtin_config(model)
    path = Path(os.path.expanduser(model))
    if model.endswith(".json"):
        return from_hf(read_json_object(path, ConfigError), source=str(path))
    if os.path.isdir(path):
        return _read_directory(path)
    if path.suffix.lower() == ".gguf" and path.is_file():
        return load_config(ModelLocation("gguf", path, path.stem))
    allowed = f"{', '.join(builtin_names())}, the path of a config.json, its directory, or a GGUF file"
    raise InvalidArgumentError("model", got=shown(model), allowed=allowed)


def load_config(location: ModelLocation) -> ModelConfig:
    """Read the description of a model: an HF directory, a GGUF file or a built-in config.

    Raises ConfigError, UnsupportedError; WeightsError for a GGUF file that can't be read.
    """
    if location.kind == "builtin":
        return builtin_config(location.name)
    assert location.path is not None, "only built-in configs have no path"
    if location.kind == "gguf":
        from onewave.weights.formats.gguf_store import GGUFStore

        store = GGUFStore.open(location.path, location.headers)
        try:
            return _read_gguf(store)
        finally:
            store.close()
    return _read_directory(location.path)


def load_scheme(location: ModelLocation) -> Scheme | None:
    """How a Hugging Face directory's matrices are quantised; None where they are not, and for everything else.

    Raises ConfigError, UnsupportedError.
    """
    if location.kind != "hf" or location.path is None:
        return None
    return read_scheme(_fields_of(location.path)) or _scheme_beside(location.path)


def _scheme_beside(directory: Path) -> Scheme | None:
    """The quantisation that the first AutoGPTQ and AutoAWQ wrote into a file of its own."""
    for file in (directory / name for name in ("quantize_config.json", "quant_config.json")):
        values = read_json_object(file, ConfigError) if os.path.lexists(file) else {}
        if "bits" in values or "w_bit" in values:
            method = "awq" if "zero_point" in values else "gptq"
            return scheme_of(Fields({"quant_method": method, **values}, str(file)))
    return None


def load_largest_of_kv(location: ModelLocation) -> float:
    """read_largest_of_kv of a Hugging Face directory."""
    assert location.path is not None, "only such a directory has stored scales"
    return read_largest_of_kv(_fields_of(location.path))


def _fields_of(directory: Path) -> Fields:
    file = directory / "config.json"
    return Fields(read_json_object(file, ConfigError), str(file))


def _read_directory(path: Path) -> ModelConfig:
    config, generation = path / "config.json", path / "generation_config.json"
    # lexists: a link to where one may not look is there, and reading it says why it can't be read.
    if not os.path.lexists(config):
        raise ConfigError(
            str(config), got="missing", next="Give a directory with config.json and *.safetensors, or a GGUF file."
        )
    return from_hf(
        read_json_object(config, ConfigError),
        read_json_object(generation, ConfigError) if os.path.lexists(generation) else None,
        source=str(config),
        generation_source=str(generation),
    )


def _read_gguf(store: GGUFStore) -> ModelConfig:
    shapes = {name: tensor.shape for name, tensor in store.tensors.items()}
    divisors = [float(value) for value in store.load(ROPE_DIVISORS).flatten()] if ROPE_DIVISORS in shapes else None
    return from_gguf(store.metadata, shapes, rope_divisors=divisors, source=store.description)
