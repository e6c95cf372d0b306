"""`onewave info`: what a model is made of, without loading its weights."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from onewave.base.errors import TokenizerError
from onewave.base.json_files import read_json_object
from onewave.base.settings import Settings
from onewave.cli import options

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from onewave.weights.fetch.sources import ModelLocation
    from onewave.weights.store import TensorInfo

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}


def info(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As for --model of the other commands.")],
    revision: options.Revision = None,
    as_json: options.Json = False,
) -> None:
    """Print a model's configuration, tensors, sizes, KV-cache bytes a token and tokenizer."""
    from onewave.models.config.read import load_config
    from onewave.weights.fetch.sources import resolve

    # "dummy": names without weights are welcome, and a hub model's weights are not fetched for this.
    location = resolve(model, Settings.from_env(), revision=revision, load_format="dummy")
    config = load_config(location)
    tensors, metadata = _tensors(location)
    kv_values = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    facts: dict[str, Any] = {
        "model": location.name,
        "kind": location.kind,
        "path": str(location.path),
        "config": asdict(config),
        "parameters": None if tensors is None else _num_parameters(tensors.values()),
        "weight_bytes": None if tensors is None else sum(tensor.nbytes for tensor in tensors.values()),
        "weight_dtypes": None if tensors is None else dict(Counter(t.dtype for t in tensors.values()).most_common()),
        "weight_formats": None if tensors is None else _formats(tensors.values()),
        "kv_bytes_per_token": {name: kv_values * width for name, width in _BYTES.items()},
        "tokenizer": _tokenizer(location, metadata),
        "tensors": None
        if tensors is None
        else [
            {
                "name": t.name,
                "shape": list(t.shape),
                "dtype": t.dtype,
                "bytes": t.nbytes,
                "bits_per_weight": _bits(t.nbytes, [t]),
                "file": t.file.name,
            }
            for t in tensors.values()
        ],
    }
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)


def _tensors(location: ModelLocation) -> tuple[Mapping[str, TensorInfo] | None, Mapping[str, object]]:
    """The tensors that the files describe (None where there are no files), and a GGUF file's metadata."""
    if location.kind == "gguf" and location.path is not None:
        from onewave.weights.formats.gguf_store import GGUFStore

        store = GGUFStore.open(location.path)
        found, metadata = dict(store.tensors), dict(store.metadata)
        store.close()
        return found, metadata
    if location.kind == "hf" and location.path is not None and any(location.path.glob("*.safetensors")):
        from onewave.models.config.read import load_scheme
        from onewave.weights.formats.safetensors_store import SafetensorsStore
        from onewave.weights.quantized.store import open_matrices

        return open_matrices(SafetensorsStore.open(location.path), load_scheme(location)).tensors, {}
    return None, {}


def _num_parameters(tensors: Iterable[TensorInfo]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)


def _bits(nbytes: int, tensors: Iterable[TensorInfo]) -> float:
    return round(8 * nbytes / max(1, _num_parameters(tensors)), 3)


def _formats(tensors: Iterable[TensorInfo]) -> dict[str, dict[str, float]]:
    """Tensors, bytes, and bits a weight with its share of the scales, by format."""
    found: dict[str, list[TensorInfo]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    sizes = {name: sum(tensor.nbytes for tensor in those) for name, those in found.items()}
    return {
        name: {"tensors": len(found[name]), "bytes": size, "bits_per_weight": _bits(size, found[name])}
        for name, size in sorted(sizes.items(), key=lambda entry: -entry[1])
    }


def _tokenizer(location: ModelLocation, metadata: Mapping[str, object]) -> str | None:
    """Return the kind of tokenizer that comes with the model, in a few words; None when there is none."""
    kind, before = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind is not None:
        words = f"{kind} (GGUF)" + (f", pre-tokenizer {before}" if before is not None else "")
        pieces = metadata.get("tokenizer.ggml.tokens")
        return words + (f", {len(cast('list[object]', pieces))} tokens" if hasattr(pieces, "__len__") else "")
    if location.kind != "hf" or location.path is None:
        return None
    return _hf_tokenizer(location.path / "tokenizer.json")


def _hf_tokenizer(path: Path) -> str | None:
    if not path.exists():
        return None
    try:
        model = read_json_object(path, TokenizerError)["model"]
        return f"{model.get('type') or 'BPE'} (tokenizer.json), {len(model['vocab'])} tokens"
    except (TokenizerError, KeyError, TypeError, AttributeError):
        return f"unreadable ({path.name})"


def _print(facts: dict[str, Any]) -> None:
    config = dict(facts["config"])
    rope = {name: value for name, value in config.pop("rope").items() if value is not None}
    windows = cast("tuple[int | None, ...]", config.pop("layer_windows"))
    rope.pop("factor_divisors", None)
    lines: dict[str, object] = {"model": facts["model"], "kind": facts["kind"], "path": facts["path"]} | config
    lines["rope"] = ", ".join(f"{name} {value}" for name, value in rope.items())
    lines["sliding window"] = ", ".join(
        f"{'none' if window is None else window} ({count} layers)" for window, count in Counter(windows).items()
    )
    if facts["tensors"] is None:
        lines["weights"] = "not on this machine"
    else:
        gigabytes = facts["weight_bytes"] / 1e9
        lines["weights"] = f"{facts['parameters']:,} parameters in {len(facts['tensors'])} tensors, {gigabytes:.3f} GB"
        lines["weight formats"] = ", ".join(
            f"{name} x {of['tensors']} ({of['bits_per_weight']:g} bits a weight, {of['bytes'] / 1e6:.1f} MB)"
            for name, of in facts["weight_formats"].items()
        )
    lines["KV cache a token"] = ", ".join(f"{size:,} B in {n}" for n, size in facts["kv_bytes_per_token"].items())
    lines["tokenizer"] = facts["tokenizer"] or "none"
    width = max(len(name) for name in lines)
    for name, value in lines.items():
        print(f"{name:<{width}}  {_plain(str(value))}")
    for tensor in facts["tensors"] or ():
        shape = "x".join(str(length) for length in tensor["shape"])
        size = f"{tensor['dtype']:<10} {tensor['bits_per_weight']:>6g} bits {tensor['bytes']:>14,} B"
        print(f"  {_plain(tensor['name']):<48} {shape:<16} {size}")


def _plain(text: str) -> str:
    """Text of a file, on one line: what a terminal would obey is written as Python writes it."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
