"""`onewave env`: what a bug report should say about this machine."""

import json
import platform
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from onewave.base.settings import Settings
from onewave.bench import machine
from onewave.cli import options

_PACKAGES = (
    "onewave",
    "torch",
    "triton",
    "numpy",
    "numba",
    "safetensors",
    "gguf",
    "tokenizers",
    "huggingface_hub",
    "transformers",
    "llama-cpp-python",
)


def env(as_json: options.Json = False) -> None:
    """Print versions, processor, GPUs and caches."""
    facts = _gather()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    width = max(len(name) for group in facts.values() for name in group)
    for title, group in facts.items():
        print(title)
        for name, value in group.items():
            print(f"  {name:<{width}}  {_text(value)}")


def _gather() -> dict[str, dict[str, Any]]:
    settings = Settings.from_env()
    return {
        "versions": {
            "python": platform.python_version(),
            "system": platform.platform(),
            **{name: machine.package_version(name) for name in _PACKAGES},
            "commit": machine.source_commit(settings),
        },
        "cpu": {
            "name": machine.cpu_name(),
            "threads": settings.num_threads,
            "features": machine.cpu_features(),
        },
        "gpu": {
            "torch_sees": _torch_cuda(),
            **{
                f"gpu_{i}": f"{gpu.name}, {gpu.memory_mib} MiB, driver {gpu.driver}"
                for i, gpu in enumerate(machine.gpus())
            },
        },
        "cache": {
            "directory": str(settings.cache_dir),
            "used_bytes": _size(settings.cache_dir),
            "free_bytes": _free(settings.cache_dir),
        },
    }


def _torch_cuda() -> str | None:
    """The CUDA version that torch was built for and how many GPUs it can use."""
    try:
        import torch
    except ImportError:
        return None
    built_for: Any = torch.version.cuda
    if built_for is None:
        return "no GPU (a build of torch without CUDA)"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"{count} GPU(s), CUDA {built_for}"


def _size(directory: Path) -> int:
    total = 0
    with suppress(OSError):  # a name that the system does not take
        for path in directory.rglob("*"):
            with suppress(OSError):
                total += path.lstat().st_size if path.is_file() else 0
    return total


def _free(directory: Path) -> int | None:
    """Free bytes of the disk that holds a directory, or will."""
    for place in (directory, *directory.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None


def _text(value: object) -> str:
    if value is None:
        return "not installed"
    if isinstance(value, list):
        return " ".join(str(item) for item in value) or "none known"  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    return str(value)
