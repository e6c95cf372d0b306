"""A measurement's machine and software, for `onewave env`. Never fails: what can't be found out is None or unknown."""

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import onewave
from onewave.base.settings import Settings

SIMD_FEATURES = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"),
    *("avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimddp", "bf16", "i8mm", "sve"),
)
"""CPU features that matter to the kernels, as Linux names them (x86-64, then arm64)."""

_SOURCE_TREE = Path(__file__).parents[3]


@dataclass(frozen=True)
class GPU:
    """One CUDA GPU as the driver describes it."""

    name: str
    driver: str
    memory_mib: int


def gpus() -> list[GPU]:
    """The GPUs that nvidia-smi lists; none where there is no driver."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits"]
    found: list[GPU] = []
    for line in _output(query).splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[2].isdecimal():
            found.append(GPU(fields[0], fields[1], int(fields[2])))
    return found


def package_version(name: str) -> str | None:
    """The installed version of a Python package, without importing it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cpu_name() -> str:
    found = re.search(r"^(?:model name|Model name)\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine() or "unknown"


def cpu_features() -> list[str]:
    """Those of SIMD_FEATURES that this processor has; empty where Linux's /proc does not say."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    flags = set(found.group(1).split()) if found else set[str]()
    return [feature for feature in SIMD_FEATURES if feature in flags]


def device_slug(name: str) -> str:
    """A short file name for a device: "NVIDIA H200" -> h200, "cpu" -> cpu."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word not in ("", "nvidia", "geforce", "tesla")]
    return "-".join(words) or "unknown"


def source_commit(settings: Settings) -> str:
    """ONEWAVE_COMMIT; else the commit this code is from by git, with -dirty when its sources have changed since, or
    "unknown"."""
    if settings.commit:
        return settings.commit
    git = ["git", "-C", str(_SOURCE_TREE)]
    top = _output([*git, "rev-parse", "--show-toplevel"]).strip()
    commit = _output([*git, "rev-parse", "--short=12", "HEAD"]).strip()
    if not commit or not Path(onewave.__file__).is_relative_to(top) or Path(top) != _SOURCE_TREE:
        return "unknown"
    changed = _output([*git, "status", "--porcelain", "--", "src", "pyproject.toml", "constraints"])
    return f"{commit}-dirty" if changed.strip() else commit


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _output(command: list[str]) -> str:
    """Return a program's output, or nothing when it isn't there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, cwd=os.sep)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return done.stdout
