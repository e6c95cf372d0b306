"""Every environment variable that onewave reads: resolved once into a frozen dataclass, but for what a launch asks."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onewave.base.errors import InvalidArgumentError

# More than the cores of any machine we know; far more threads than cores only slow the kernels down.
MAX_THREADS = 1024


def _platform_cache_dir(env: Mapping[str, str]) -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "onewave"
    if sys.platform == "win32":
        return Path(env.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "onewave" / "cache"
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onewave"


@dataclass(frozen=True)
class Settings:
    """The settings that the environment gives.

    cache_dir: where models and the wave's programs are kept (ONEWAVE_CACHE; default: the platform's cache directory).
    num_threads: CPU threads for the decode kernels (ONEWAVE_NUM_THREADS; default: the cores this process may use).
    commit: what measurements name as the source's commit instead of asking git (ONEWAVE_COMMIT).
    debug: operators check lengths and block tables, at the price of a device synchronisation a call (ONEWAVE_DEBUG=1).
    """

    cache_dir: Path
    num_threads: int
    commit: str | None = None
    debug: bool = False

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> "Settings":
        """Read the ONEWAVE_* variables of `env` (os.environ by default). Raises InvalidArgumentError."""
        env = os.environ if env is None else env
        cache = env.get("ONEWAVE_CACHE")
        try:
            cache_dir = Path(os.path.expanduser(cache)) if cache else _platform_cache_dir(env)
        except RuntimeError as error:  # Path.home() of an unknown user, as in containers
            raise InvalidArgumentError("cache directory", got="no home", next="Set ONEWAVE_CACHE.") from error
        return cls(
            cache_dir=cache_dir,
            num_threads=_num_threads(env.get("ONEWAVE_NUM_THREADS")),
            commit=env.get("ONEWAVE_COMMIT") or None,
            debug=_flag("ONEWAVE_DEBUG", env.get("ONEWAVE_DEBUG") or "0"),
        )


def takes_prebuilt(env: Mapping[str, str] | None = None) -> bool:
    """Whether prebuilt kernels are taken (unless ONEWAVE_PREBUILT=0). Not among the settings, whose errors
    are none of a launch's. Raises InvalidArgumentError."""
    return _flag("ONEWAVE_PREBUILT", (os.environ if env is None else env).get("ONEWAVE_PREBUILT") or "1")


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with some variables changed, for a child process."""
    return {**os.environ, **changes}


def _flag(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise InvalidArgumentError(name, got=repr(text[:40]), allowed="0 or 1")
    return text == "1"


def _num_threads(text: str | None) -> int:
    if not text:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # The length first: int() refuses thousands of digits with an error of its own.
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= MAX_THREADS:
        allowed = f"a whole number from 1 to {MAX_THREADS}"
        raise InvalidArgumentError("ONEWAVE_NUM_THREADS", got=repr(text[:40]), allowed=allowed)
    return int(text)
