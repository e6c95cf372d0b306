"""Recognises errors of running out of memory."""

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch, NumPy or Python found no memory. For a CPU PyTorch says so with a plain RuntimeError."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
