"""Kernels under test run in Triton's interpreter where there is no card; this must be set before they are imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
