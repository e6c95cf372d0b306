"""Prepares a forked child to compute with PyTorch on a CPU.

OpenMP keeps a team of threads for each thread that has computed with several. A fork copies that record but not the
threads, so the forking thread would wait in the child for ever. It computes alone there; threads that the child starts
get teams of their own, and the engine's is one of them.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import torch

_Result = TypeVar("_Result")


def _compute_alone() -> None:
    """Give the calling thread one thread to compute with, and later ones as many as before."""
    with suppress(RuntimeError):  # no more threads: then all compute with one
        # The number that a new thread would have; the caller's own may be that of an earlier fork.
        num_threads = _in_new_thread(torch.get_num_threads)
        torch.set_num_threads(1)
        _in_new_thread(lambda: torch.set_num_threads(num_threads))
        return
    torch.set_num_threads(1)


def _in_new_thread(work: Callable[[], _Result]) -> _Result:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_compute_alone)
