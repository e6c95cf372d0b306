"""The GPU that tests run on, and the marks of those that need one of a kind."""

import pytest
import torch

from onewave.wave.launch.launch import runs_here

GPU = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
ON_WAVE = [
    pytest.mark.gpu,
    pytest.mark.skipif(not runs_here(GPU), reason="needs a GPU of compute capability 9.0"),
]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
ON_HOPPER = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs sm_90")]
