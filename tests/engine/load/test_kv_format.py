"""Scales of keys and values in 8 bits: stored ones as they are, others measured, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kit.models.quantized_files import FP8, plain, quantise_checkpoint
from kit.models.tiny_models import CPU, config_of, save_checkpoint, tokens
from onewave.base.errors import UnsupportedError, WeightsError
from onewave.engine.load.kv_format import measured_scales, scale_of
from onewave.engine.load.load import load
from onewave.engine.load.options import LoadOptions
from onewave.models.config.read import load_config
from onewave.models.llama import Llama
from onewave.weights.fetch.sources import ModelLocation

SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_hidden_layers": 2,
}  # fmt: skip


def loaded(directory: Path, kv_dtype: torch.dtype, decode: str = "eager") -> Llama:
    location = ModelLocation("hf", directory, "m")
    options = LoadOptions(dtype=torch.float32, device=CPU, max_model_len=64, kv_dtype=kv_dtype)
    return load(decode, location, load_config(location), options)[0]


def checkpoint(directory: Path, scales: dict[str, Tensor], **config: Any) -> None:
    """A checkpoint in fp8 with these tensors beside attention."""
    save_checkpoint(directory, config_of("llama", **SIZES))
    quantise_checkpoint(directory, lambda *shape: plain(*shape, kind="fp8", share="tensor"), FP8)
    file = directory / "model.safetensors"
    save_file(load_file(file) | {f"model.layers.{name}": scale for name, scale in scales.items()}, file)
    text = json.loads((directory / "config.json").read_text())
    text["quantization_config"] |= config
    (directory / "config.json").write_text(json.dumps(text))


def test_scales_of_a_cache_alone_come_with_16_bit_weights(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of("llama", **SIZES))
    file = tmp_path / "model.safetensors"
    scales = {f"model.layers.{layer}.self_attn.{kind}_scale": torch.rand(1) for layer in (0, 1) for kind in "kv"}
    save_file(load_file(file) | scales, file)
    alone = {"format": "dense", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    text = json.loads((tmp_path / "config.json").read_text())
    text["quantization_config"] = {"quant_method": "compressed-tensors"} | alone
    (tmp_path / "config.json").write_text(json.dumps(text))
    found = loaded(tmp_path, torch.float8_e4m3fn).kv_format.k_scale
    assert found is not None
    assert found[1].tolist() == scales["model.layers.1.self_attn.k_scale"].tolist() * 2


@pytest.mark.parametrize(
    ("k_name", "v_name", "shape", "kind", "ratio"),
    [
        ("k_scale", "v_scale", (), {}, 1.0),
        ("attn.k_scale", "attn.v_scale", (2, 1, 1), {"num_bits": 8, "type": "float"}, 1.0),
        ("k_proj.output_scale", "v_proj.output_scale", (1,), {"num_bits": 8, "type": "int"}, 127 / 448),
        ("qkv_proj.k_scale", "qkv_proj.v_scale", (1,), {}, 1.0),
        ("kv_scale", "kv_scale", (1,), "static", 1.0),
    ],
)
def test_a_checkpoint_s_scales_are_used(
    k_name: str, v_name: str, shape: tuple[int, ...], kind: dict[str, Any] | str, ratio: float, tmp_path: Path
) -> None:
    scales = {f"{layer}.self_attn.{name}": torch.rand(shape) + 0.01 for layer in (0, 1) for name in {k_name, v_name}}
    checkpoint(tmp_path, scales, **({"kv_cache_scheme": kind} if kind else {}))
    for dtype, factor in ((torch.float8_e4m3fn, 1.0), (torch.int8, 448 / 127)):
        form = loaded(tmp_path, dtype).kv_format
        for found, name in ((form.k_scale, k_name), (form.v_scale, v_name)):
            assert found is not None
            expected = torch.stack([scales[f"{layer}.self_attn.{name}"].flatten().expand(2) for layer in (0, 1)])
            torch.testing.assert_close(found, expected * ratio * factor)


@pytest.mark.parametrize(
    ("names", "value", "kind", "error", "match"),
    [
        (("0.self_attn.k_scale", "1.self_attn.k_scale"), 1.0, {}, WeightsError, "both or none"),
        (("0.self_attn.k_scale", "0.self_attn.v_scale"), 1.0, {}, WeightsError, "no scale .*1.self_attn.k_scale"),
        (("0.self_attn.k_scale", "1.self_attn.k_scale"), float("nan"), {}, WeightsError, "finite numbers above 0"),
        (
            tuple(f"{layer}.self_attn.{kind}_scale" for layer in (0, 1) for kind in "kv"),
            1.0,
            {"num_bits": 8, "type": "int", "symmetric": False},
            UnsupportedError,
            "int8 with zero points",
        ),
    ],
)
def test_scales_that_can_not_be_used_are_refused(
    names: tuple[str, ...], value: float, kind: dict[str, Any], error: type[Exception], match: str, tmp_path: Path
) -> None:
    checkpoint(tmp_path, {name: torch.tensor(value) for name in names}, kv_cache_scheme=kind or None)
    with pytest.raises(error, match=match):
        loaded(tmp_path, torch.float8_e4m3fn)


def test_without_stored_ones_they_are_measured_and_hold_what_was_seen(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of("qwen2", **SIZES))
    model = loaded(tmp_path, torch.int8)
    again = loaded(tmp_path, torch.int8)
    assert again.kv_format.k_scale is not None
    assert torch.equal(model.kv_format.k_scale, again.kv_format.k_scale)
    assert model.kv_format.k_scale.shape == (2, 2)
    plain_model = loaded(tmp_path, torch.int8)
    plain_model.kv_format = type(model.kv_format)(torch.float32)
    k_scale, v_scale = measured_scales(plain_model, tokens(20), torch.float8_e4m3fn)
    for scale in (*k_scale.flatten(), *v_scale.flatten()):
        assert torch.frexp(scale).mantissa == 0.5  # a power of two


def test_the_scale_of_a_largest_number() -> None:
    largest = torch.tensor([0.0, 127.0, 112.0, 113.0, 1e-6, float("inf")])
    assert scale_of(largest, torch.int8)[:2].tolist() == [1.0, 1.25]
    fp8 = scale_of(largest, torch.float8_e4m3fn)
    assert fp8[:4].tolist() == [1.0, 2.0, 2.0, 2.0]
    assert fp8[5] == 1.0
    assert bool((largest[1:5] / fp8[1:5] <= 112).all())
