"""By what name Triton keeps a compiled kernel: hashes of a kernel's functions, in an order that every process has.

Triton walks the syntax tree of each function that a kernel may call: a second of Python for all that a load launches.
What a process has found is remembered for the next one, which has the same files (first_launch.py).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Any

from triton.runtime.jit import JITCallable

Hashes = dict[str, dict[str, str]]
"""By module and name the hash of each of its functions."""
_hashed: Hashes = {}
_remembered: Hashes = {}
_taken: set[str] = set()
"""Modules whose functions have remembered hashes, and not what Triton finds out beside a hash."""
_hashing = threading.RLock()


def hash_in_order(function: Any) -> None:
    """Hash all functions of a kernel's modules, those of a module's imports first, each module's as they stand.

    By what name Triton keeps a compiled kernel depends on which of its functions have been hashed before, for another
    kernel: without an order a process would not find what another one has compiled.
    """
    with _hashing:
        _visit(function.__module__, anew=False)


def remember(hashes: Mapping[str, Mapping[str, str]]) -> None:
    """Take what another process has found, of the very same files."""
    with _hashing:
        _remembered.update((module, dict(functions)) for module, functions in hashes.items())


def all_hashes() -> Hashes:
    """All that is known of this process's modules and of remembered ones."""
    with _hashing:
        return {**_remembered, **_hashed}


def _visit(name: str, *, anew: bool) -> None:
    if name not in sys.modules or name.startswith("triton."):
        return
    if name in _hashed and not (anew and name in _taken):
        return
    functions = {key: value for key, value in vars(sys.modules[name]).items() if isinstance(value, JITCallable)}
    own = {key: one for key, one in functions.items() if one.__module__ == name}
    if not anew and _take(name, own):
        return
    if name in _taken:  # a caller's hash is also of what Triton finds out beside this one's
        _taken.discard(name)
        for one in own.values():
            one.hash = None
    found = _hashed[name] = dict[str, str]()
    for one in functions.values():
        _visit(one.__module__, anew=True)
    for key, one in own.items():
        found[key] = one.cache_key


def _take(name: str, own: Mapping[str, Any]) -> bool:
    known = _remembered.get(name, {})
    if not known or known.keys() != own.keys() or any(one.hash is not None for one in own.values()):
        return False
    for key, one in own.items():
        one.hash = known[key]
    _hashed[name] = known
    _taken.add(name)
    return True
