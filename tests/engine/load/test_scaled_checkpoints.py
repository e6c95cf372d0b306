"""Checkpoints whose config asks for 8-bit activations: prompts and decode steps compute with them, as defined."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kit.models.quantized_files import FP8, Stored, blocks, compressed, plain, quantise_checkpoint
from kit.models.tiny_models import (
    config_of,
    oracle,
    oracle_logits,
    our_logits,
    ours,
    relative_error,
    save_checkpoint,
    tokens,
)
from kit.refusals import refused
from onewave.base.errors import UnsupportedError, WeightsError
from onewave.base.weight_formats import find_quantization
from onewave.engine.load.load import asks_for_scaled, load
from onewave.engine.load.options import LoadOptions
from onewave.models.config.read import load_config, load_scheme
from onewave.models.llama import MATRICES
from onewave.ops.linear import PackedWeight
from onewave.ops.scaled_linear import ScaledMatrix
from onewave.weights.fetch.sources import ModelLocation

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
BY_TOKEN = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "symmetric": True, "strategy": "tensor", "dynamic": False}


def static(rows: int, cols: int, *, kind: str = "int8", share: str = "channel") -> Stored:
    """With an input scale, another one for matrices of other sizes."""
    stored = plain(rows, cols, kind=kind, share=share)
    scale = torch.tensor([(0.03 if kind == "int8" else 0.01) * (1 + rows / 1000)])
    return Stored(stored.parts | {"input_scale": scale}, stored.values)


def asking(form: str, activations: dict[str, Any], strategy: str = "channel") -> dict[str, Any]:
    kind = "int" if form.startswith("int") else "float"
    config = compressed(form, num_bits=8, type=kind, strategy=strategy)
    config["config_groups"]["group_0"]["input_activations"] = activations | {"type": kind}
    return config


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "int8 by token": (plain, asking("int-quantized", BY_TOKEN)),
    "int8 static": (static, asking("int-quantized", STATIC)),
    "fp8 by token": (partial(plain, kind="fp8"), asking("float-quantized", BY_TOKEN)),
    "fp8 static, one weight scale": (
        partial(static, kind="fp8", share="tensor"),
        asking("float-quantized", STATIC, "tensor"),
    ),
    "fp8": (partial(plain, kind="fp8", share="tensor"), FP8),
    "fp8, static": (partial(static, kind="fp8", share="tensor"), FP8 | {"activation_scheme": "static"}),
}


def made(directory: Path, kind: str, family: str = "qwen2") -> None:
    make, config = KINDS[kind]
    save_checkpoint(directory, config_of(family, **SIZES, num_hidden_layers=2))
    quantise_checkpoint(directory, make, config)


def rounding(directory: Path, kind: str) -> Any:
    """transformers' model of the same values, its projections' inputs rounded to what the 8 bits hold."""
    model, stored = oracle(directory / "plain"), load_file(directory / "model.safetensors")

    def quantise(x: Tensor, scale: Tensor | None) -> Tensor:
        if "fp8" in kind:
            scale = x.abs().amax(-1, keepdim=True) / torch.tensor(448.0) if scale is None else scale
            return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        scale = x.abs().amax(-1, keepdim=True) / torch.tensor(127.5) if scale is None else scale
        return (x / scale).round().clamp(-128, 127) * scale

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            scale = stored.get(f"{name}.input_scale")
            module.register_forward_pre_hook(lambda _, given, scale=scale: (quantise(given[0], scale),))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_and_steps_multiply_rounded_activations(kind: str, tmp_path: Path) -> None:
    made(tmp_path, kind)
    model = ours(tmp_path, packed=True, scaled=True)
    for layer in model.weights.layers:
        for name in MATRICES:
            matrix = getattr(layer, name)
            assert isinstance(matrix, ScaledMatrix)
            # q has another input scale than k and v, the gate the same as the projection up.
            assert len(matrix.parts) == (2 if "static" in kind and name == "qkv" else 1)
    assert isinstance(model.weights.head, PackedWeight)
    ids, chunks = tokens(12), [9, 1, 2]
    right, plainly = (
        oracle_logits(rounding(tmp_path, kind), ids, chunks),
        oracle_logits(oracle(tmp_path / "plain"), ids, chunks),
    )
    found = our_logits(model, ids, chunks)
    # A sum rounded otherwise may move an activation by one code.
    assert relative_error(found, right) <= 0.25 * relative_error(plainly, right)
    assert relative_error(our_logits(model, ids, [12]), found) <= 0.25 * relative_error(plainly, right)


def test_the_engines_load_follows_the_checkpoint_and_the_wave_does_not(tmp_path: Path, caplog: Any) -> None:
    made(tmp_path, "int8 by token", "llama")
    location = ModelLocation("hf", tmp_path, "m")
    options = LoadOptions(dtype=torch.float32, device=torch.device("cpu"))
    model, wave = load("eager", location, load_config(location), options)
    assert wave is None
    assert isinstance(model.weights.layers[0].down, ScaledMatrix)
    caplog.clear()
    found, _ = load("auto", location, load_config(location), options)
    assert isinstance(found.weights.layers[0].down, ScaledMatrix)
    assert "the checkpoint asks for activations in 8 bits" in caplog.text
    with pytest.raises(UnsupportedError, match="one wave"):
        load("wave", location, load_config(location), options)
    assert not asks_for_scaled(location, LoadOptions(torch.float32, torch.device("cpu"), load_format="dummy"))


@pytest.mark.parametrize(
    ("make", "config", "said"),
    [
        (blocks, FP8 | {"weight_block_size": [128, 128]}, "dynamic e4m3 by groups of columns"),
        (plain, asking("int-quantized", BY_TOKEN | {"symmetric": False}), "dynamic int8 by token with zero points"),
        (plain, asking("int-quantized", BY_TOKEN | {"num_bits": 4}), "dynamic int4 by token"),
        (plain, asking("int-quantized", BY_TOKEN | {"strategy": "group"}), "dynamic int8 by group"),
    ],
)
def test_what_is_not_followed_is_said(
    make: Any, config: dict[str, Any], said: str, tmp_path: Path, caplog: Any
) -> None:
    save_checkpoint(tmp_path, config_of("llama", **SIZES, num_hidden_layers=1))
    quantise_checkpoint(tmp_path, make, config)
    scheme = load_scheme(ModelLocation("hf", tmp_path, "m"))
    assert scheme.activations is None
    assert isinstance(ours(tmp_path, packed=True, scaled=True).weights.layers[0].down, PackedWeight)
    assert f"activations stay in 16 bits or more: the checkpoint asks for {said}" in caplog.text


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("input_scale", None, "weight': its input_scale is missing"),
        ("input_scale", torch.tensor([torch.inf]), "input_scale': a scale of inf; allowed: a finite number greater"),
        ("input_scale", torch.tensor([0.0]), "input_scale': a scale of 0;"),
        ("input_scale", torch.ones(2), "input_scale': shape [2]; allowed: one number"),
        ("input_scale", torch.tensor([1]), "input_scale': dtype I64"),
        ("weight_scale", torch.ones(63, 1), "weight_scale': shape [63, 1]"),
        ("input_zero_point", torch.tensor([3], dtype=torch.int8), "input_zero_point': a zero point; allowed: 0"),
    ],
)
def test_a_broken_part_is_one_line_naming_file_and_tensor(
    part: str, value: Tensor | None, said: str, tmp_path: Path
) -> None:
    made(tmp_path, "int8 static", "llama")
    parts = {name: tensor.clone() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    name = f"model.layers.1.self_attn.q_proj.{part}"
    parts.pop(name, None)
    save_file(parts if value is None else parts | {name: value}, tmp_path / "model.safetensors")
    with refused(WeightsError, said, "model.layers.1.self_attn.q_proj"):
        ours(tmp_path, scaled=True)


@pytest.mark.parametrize(("name", "kind"), [("w8a8", torch.int8), ("fp8-w8a8", torch.float8_e4m3fn)])
def test_16_bit_matrices_are_rounded_as_they_load(name: str, kind: torch.dtype, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of("llama", **SIZES, num_hidden_layers=1))
    location, options = ModelLocation("hf", tmp_path, "m"), LoadOptions(torch.float32, torch.device("cpu"))
    before, _ = load("eager", location, load_config(location), options)
    options = replace(options, weight_format=find_quantization(name))
    found, _ = load("eager", location, load_config(location), options)
    exact = before.weights.layers[0].down.dequantize()
    rounded = found.weights.layers[0].down
    assert isinstance(rounded, ScaledMatrix)
    assert rounded.parts[0].codes.dtype is kind
    step = exact.abs().amax(dim=1, keepdim=True) / (254 if name == "w8a8" else 16)
    assert ((rounded.dequantize() - exact).abs() <= step * 1.001).all()
    ids = tokens(9)
    assert relative_error(our_logits(found, ids, [9]), our_logits(before, ids, [9])) < 0.1
    with pytest.raises(UnsupportedError, match=rf"decode wave: activations in 8 bits \({name}\)"):
        load("wave", location, load_config(location), options)


def test_a_config_that_asks_for_an_unknown_scheme_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of("llama", **SIZES, num_hidden_layers=1))
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(described | {"quantization_config": FP8 | {"activation_scheme": "x"}})
    )
    with pytest.raises(UnsupportedError, match="activation_scheme: 'x'; allowed: dynamic, static"):
        ours(tmp_path)
