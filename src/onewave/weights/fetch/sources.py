"""From what a user typed as a model to the files it means."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from onewave.base.errors import ConfigError, InvalidArgumentError, ModelNotFoundError, check_one_of, shown
from onewave.base.settings import Settings
from onewave.weights.fetch import download, hub
from onewave.weights.fetch.aliases import ALIASES
from onewave.weights.formats.adapter import adapter_error, refuse_adapter_directory
from onewave.weights.formats.gguf_pieces import GGUF_MAGIC, piece_paths

if TYPE_CHECKING:
    from onewave.weights.formats.gguf_file import Headers

LOAD_FORMATS = ("auto", "dummy")
"""auto: the checkpoint's own weights. dummy: seeded random weights of the shapes that its configuration says."""

BUILTIN_DIR = Path(__file__).parents[2] / "models" / "builtin"
_HF_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*", re.ASCII)
_FILE_ENDINGS = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class ModelLocation:
    """Where a model is.

    kind: "hf", a directory with config.json; "gguf", a file; "builtin", a configuration that ships with onewave.
    path: that directory, GGUF file (the first piece of a split one) or JSON file. name: what to call the model.
    headers: of GGUF files that were read for it.
    """

    kind: Literal["hf", "gguf", "builtin"]
    path: Path | None
    name: str
    headers: Headers = field(default_factory=dict[tuple[Path, int], Any], compare=False, repr=False)


def resolve(
    model: str | os.PathLike[str],
    settings: Settings,
    *,
    revision: str | None = None,
    load_format: str = "auto",
    progress: bool = True,
) -> ModelLocation:
    """Find a model: an existing path, an alias, a built-in configuration (dummy weights only), or a Hugging Face id.

    Fetches what is not on this machine yet. revision: branch, tag or commit of a Hugging Face id. progress: show
    progress bars on stderr. Raises ModelNotFoundError, ConfigError, DownloadError, CapacityError, InvalidArgumentError,
    UnsupportedError for a LoRA adapter alone.
    """
    text = os.fspath(model)
    check_one_of("load_format", load_format, LOAD_FORMATS)
    if not text.strip():
        raise InvalidArgumentError("model", got=repr(text), allowed=_accepted())
    if revision is not None and not (isinstance(revision, str) and revision.strip()):  # pyright: ignore[reportUnnecessaryIsInstance] (callers may be untyped)
        raise InvalidArgumentError("revision", got=shown(revision), allowed="a branch, a tag or a commit, or None")
    location = _local(text)
    if revision is not None and (location is not None or text in ALIASES or text in builtin_names()):
        raise InvalidArgumentError("revision", got=shown(revision), allowed="only with a Hugging Face id")
    if location is not None:
        return location
    if text in ALIASES:
        return ModelLocation("gguf", download.fetch(ALIASES[text], settings.cache_dir, progress=progress), text)
    if text in builtin_names():
        return _builtin(text, load_format)
    if _looks_like_path(text) or not _HF_ID.fullmatch(text):
        raise ModelNotFoundError("no such model", got=repr(text), allowed=_accepted())
    path = hub.snapshot(text, revision=revision, weights=load_format != "dummy", progress=progress)
    if not os.path.exists(path / "config.json"):
        refuse_adapter_directory(path)
        raise ConfigError(
            f"Hugging Face model {text}",
            got="has no config.json",
            next="If it holds GGUF files, download one of them and give its path.",
        )
    return ModelLocation("hf", path, text)


def builtin_names() -> tuple[str, ...]:
    """Return the names of the configurations that ship with onewave."""
    return tuple(sorted(path.stem for path in BUILTIN_DIR.glob("*.json")))


def _local(text: str) -> ModelLocation | None:
    """Return the model at an existing path, or None when `text` is not one."""
    path = Path(os.path.expanduser(text))
    if os.path.isdir(path):
        is_model = os.path.exists(path / "config.json") or len(_gguf_models(path)) == 1
        if not is_model and (text in ALIASES or text in builtin_names()):
            # An unrelated directory that happens to be called so must not hide the model of that name.
            return None
        return _directory(path, path.resolve().name or text)
    if not os.path.exists(path):
        return None
    if not path.is_file() or not (path.suffix.lower() == ".gguf" or _begins_as_gguf(path)):
        if path.stem == "adapter_model":
            raise adapter_error(str(path))
        raise ModelNotFoundError(
            "not a model file",
            got=str(path),
            allowed="a GGUF file, or a directory with config.json and *.safetensors",
        )
    return _gguf(path)


def _begins_as_gguf(path: Path) -> bool:
    """Whether a file is a GGUF by its first bytes: ollama names its files by their digests."""
    try:
        with path.open("rb") as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:
        return False


def _directory(path: Path, name: str) -> ModelLocation:
    if os.path.exists(path / "config.json"):
        return ModelLocation("hf", path, name)
    refuse_adapter_directory(path)
    gguf = _gguf_models(path)
    if len(gguf) == 1:
        return _gguf(gguf[0])
    if gguf:
        names = ", ".join(file.name for file in gguf)
        raise ConfigError("several GGUF models", got=f"{path} ({names})", next="Give the path of one of the files.")
    raise ConfigError(
        "no config.json", got=str(path), allowed="a directory with config.json, or with exactly one GGUF model"
    )


def _gguf(path: Path) -> ModelLocation:
    name = path.stem if path.suffix.lower() == ".gguf" else path.name
    return ModelLocation("gguf", piece_paths(path)[0], name)


def _gguf_models(directory: Path) -> list[Path]:
    """Return the GGUF models of a directory, a split one by its first piece."""
    try:
        files = [entry for entry in directory.iterdir() if entry.suffix.lower() == ".gguf"]
    except OSError:
        return []
    return sorted({piece_paths(file)[0] for file in files})


def _builtin(name: str, load_format: str) -> ModelLocation:
    if load_format != "dummy":
        raise ModelNotFoundError(
            f"{name} is a built-in configuration without weights",
            got=f"load_format={load_format}",
            next=f'Add load_format="dummy" for random weights, or give a checkpoint of {name}.',
        )
    return ModelLocation("builtin", BUILTIN_DIR / f"{name}.json", name)


def _looks_like_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or "\\" in text or text.lower().endswith(_FILE_ENDINGS)


def _accepted() -> str:
    return (
        f"a directory with config.json, a GGUF file, an alias ({', '.join(ALIASES)}), a built-in configuration with "
        f"load format dummy ({', '.join(builtin_names())}), or a Hugging Face id such as org/name"
    )
