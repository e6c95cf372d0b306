"""A decode step in int8, as docs/reference/operators.md writes it: from int8 to int8 through masked attention."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kit.numpy_gpu.mmha_model import mmha_in_numpy, quantise_in_numpy

DOC = Path(__file__).parents[3] / "docs" / "reference" / "operators.md"


def test_a_decode_step_in_int8_equals_a_model_in_numpy_bit_for_bit() -> None:
    section = DOC.read_text(encoding="utf-8").partition("## One-byte products")[2]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    before, step = code[1].split("\n\nqkv = ")
    torch.manual_seed(3)
    given: dict[str, Any] = {}
    exec(before, given)
    keys, values = given["cache_k"].clone(), given["cache_v"].clone()
    exec(f"qkv = {step}", given)

    x, w_qkv, w_o = (given[name].numpy().astype(np.int64) for name in ("x", "w_qkv", "w_o"))
    qkv = x @ w_qkv.T
    assert np.array_equal(given["qkv"].numpy(), qkv)
    scale = given["w_scale"].numpy() * np.float32(given["activation_scale"])
    shape = (given["rows"], -1, given["head_dim"])
    attended, keys, values = mmha_in_numpy(
        given["qkv"].view(shape), keys, values, given["lengths"],
        qkv_out_scale=torch.from_numpy(scale).view(shape[1:]), out_shift=given["shift"], out_smooth=given["smooth"],
    )  # fmt: skip
    codes = quantise_in_numpy(attended, given["out_scale"], "half_away", 127.0, -127.0).reshape(given["rows"], -1)
    assert np.array_equal(given["attended"].numpy(), codes)
    assert np.array_equal(given["cache_k"].double().numpy(), keys)
    assert np.array_equal(given["cache_v"].double().numpy(), values)
    sums = (codes.astype(np.int64) @ w_o.T).astype(np.float32)
    y = sums * given["o_scale"].numpy() * np.float32(1 / (127 * given["out_scale"]))
    assert np.array_equal(given["y"].numpy(), y)
    assert codes.min() < -20
    assert codes.max() > 20
