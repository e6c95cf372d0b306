"""Quantised matrices as other programs store them, packed by loops of their own."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Stored:
    """One matrix: the tensors beside each other in the file, by their short names, and the values that they mean."""

    parts: dict[str, Tensor]
    values: NDArray[np.float32]


def words(codes: NDArray[Any], bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack along the last axis, the lowest bits first; the number of codes is filled up with zeros."""
    per_word = 32 // bits
    padded = np.pad(codes.astype(np.uint32), [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % per_word)])
    out = np.zeros((*padded.shape[:-1], padded.shape[-1] // per_word), np.uint32)
    for place in range(per_word):
        out |= padded[..., (order or range(per_word))[place] :: per_word] << np.uint32(bits * place)
    return torch.from_numpy(out.view(np.int32).copy())


def _random(
    rows: int, cols: int, bits: int, group: int, seed: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.float32]]:
    """Codes [rows, cols], zero points 1 to the largest [rows, groups], and scales that float16 and bfloat16 hold."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, (rows, cols))
    zeros = rng.integers(1, 1 << bits, (rows, cols // group))
    scales = (rng.integers(128, 256, (rows, cols // group)) / 2**15).astype(np.float32)
    return codes, zeros, scales


def gptq(
    rows: int,
    cols: int,
    *,
    bits: int = 4,
    group: int = 32,
    sym: bool = False,
    act_order: bool = False,
    version: int = 1,
) -> Stored:
    """As AutoGPTQ packs: words down the columns, zero points less one in the first version."""
    codes, zeros, scales = _random(rows, cols, bits, group, rows + cols)
    if sym:
        zeros[:] = 1 << bits - 1
    index = np.arange(cols) // group
    if act_order:
        index = np.random.default_rng(7).permutation(index)
    values = (codes - zeros[:, index]) * scales[:, index]
    parts = {
        "qweight": words(codes, bits).T.contiguous(),
        "qzeros": words((zeros - (version == 1)).T, bits),
        "scales": torch.from_numpy(scales.T.copy()).half(),
        "g_idx": torch.from_numpy(index).int(),
    }
    return Stored(parts, values.astype(np.float32))


def awq(rows: int, cols: int, *, group: int = 32) -> Stored:
    """As AutoAWQ's GEMM packs: words along the rows, interleaved."""
    codes, zeros, scales = _random(rows, cols, 4, group, rows * cols)
    index = np.arange(cols) // group
    parts = {
        "qweight": words(codes.T, 4, _AWQ_ORDER),
        "qzeros": words(zeros.T, 4, _AWQ_ORDER),
        "scales": torch.from_numpy(scales.T.copy()).half(),
    }
    return Stored(parts, ((codes - zeros[:, index]) * scales[:, index]).astype(np.float32))


def packed(
    rows: int,
    cols: int,
    *,
    bits: int = 4,
    group: int = 32,
    sym: bool = True,
    act_order: bool = False,
    wide: bool = False,
) -> Stored:
    """As compressed-tensors' pack-quantized. wide: zero points as int8, as its first versions have them."""
    codes, zeros, scales = _random(rows, cols, bits, group, rows - cols + 1000)
    middle = 1 << bits - 1
    if sym:
        zeros[:] = middle
    index = np.arange(cols) // group
    if act_order:
        index = np.random.default_rng(8).permutation(index)
    parts = {
        "weight_packed": words(codes, bits),
        "weight_scale": torch.from_numpy(scales).bfloat16(),
        "weight_shape": torch.tensor([rows, cols]),
    }
    if act_order:
        parts["weight_g_idx"] = torch.from_numpy(index).int()
    if not sym:
        small = torch.from_numpy((zeros - middle).astype(np.int8))
        parts["weight_zero_point"] = small if wide else words(zeros.T, bits).T.contiguous()
    return Stored(parts, ((codes - zeros[:, index]) * scales[:, index]).astype(np.float32))


def plain(rows: int, cols: int, *, kind: str = "int8", share: str = "channel", number: str = "bfloat16") -> Stored:
    """As int-quantized and float-quantized. share: channel or tensor."""
    rng = np.random.default_rng(rows)
    scale = torch.from_numpy(rng.uniform(1e-3, 2e-3, (rows if share == "channel" else 1, 1)).astype(np.float32))
    scale = scale.to(getattr(torch, number))
    if kind == "int8":
        codes = torch.from_numpy(rng.integers(-128, 128, (rows, cols)).astype(np.int8))
    else:
        codes = torch.from_numpy(rng.normal(size=(rows, cols)).astype(np.float32) * 100).to(torch.float8_e4m3fn)
    values = (codes.float() * scale.float()).numpy()
    return Stored({"weight": codes, "weight_scale": scale if share == "channel" else scale.reshape(1)}, values)


def blocks(rows: int, cols: int, *, block: int = 128) -> Stored:
    """As fine-grained fp8: float32 scales of blocks, the last ones cut off."""
    rng = np.random.default_rng(cols)
    scale = rng.uniform(1e-3, 2e-3, (-(-rows // block), -(-cols // block))).astype(np.float32)
    codes = torch.from_numpy(rng.normal(size=(rows, cols)).astype(np.float32) * 100).to(torch.float8_e4m3fn)
    spread = scale.repeat(block, 0)[:rows].repeat(block, 1)[:, :cols]
    parts = {"weight": codes, "weight_scale_inv": torch.from_numpy(scale)}
    return Stored(parts, codes.float().numpy() * spread)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group of modules."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True} | weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}


def quantise_checkpoint(
    directory: Path, make: Callable[[int, int], Stored], config: dict[str, Any]
) -> dict[str, NDArray[np.float32]]:
    """Replace a saved checkpoint's projections by quantised ones of random values; return those by name.

    The checkpoint of the very values is written to `directory / "plain"`.
    """
    file = directory / "model.safetensors"
    state = {name: tensor.clone() for name, tensor in load_file(file).items()}
    held, values = dict(state), {}
    for name, tensor in state.items():
        if "_proj.weight" in name:
            del held[name]
            stored = make(*tensor.shape)
            held |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in stored.parts.items()}
            values[name] = stored.values
    save_file(held, file)
    described = json.loads((directory / "config.json").read_text())
    (directory / "plain").mkdir()
    (directory / "plain" / "config.json").write_text(json.dumps(described))
    save_file(state | {n: torch.from_numpy(v) for n, v in values.items()}, directory / "plain" / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(described | {"quantization_config": config}))
    return values
