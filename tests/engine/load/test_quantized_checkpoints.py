"""Checkpoints of other quantisers: read exactly, kept small on a CPU, refused in one line."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kit.models.quantized_files import (
    AWQ,
    FP8,
    GPTQ,
    Stored,
    awq,
    blocks,
    compressed,
    gptq,
    packed,
    plain,
    quantise_checkpoint,
)
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
from onewave.models.config.fields import Fields
from onewave.models.config.quantization import read_scheme
from onewave.models.config.read import load_scheme
from onewave.ops.linear import PackedWeight
from onewave.weights.fetch.sources import ModelLocation
from onewave.weights.formats.safetensors_store import SafetensorsStore
from onewave.weights.quantized.store import QuantizedStore

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def renamed(stored: Stored, scale: str, of: str = "weight_scale") -> Stored:
    """With another name of the scale, and a lone scale no list."""
    value = stored.parts[of]
    return Stored({"weight": stored.parts["weight"], scale: value if value.ndim == 2 else value[0]}, stored.values)


def eight_or_four() -> dict[str, Any]:
    """Two groups of modules, whose rows share a scale: the headers of scales do not tell them apart."""
    config = compressed("pack-quantized", num_bits=8, type="int", strategy="channel")
    other = compressed("pack-quantized", num_bits=4, type="int", strategy="channel")
    config["config_groups"]["group_1"] = other["config_groups"]["group_0"]
    return config


def packed_beside_fp8() -> dict[str, Any]:
    """Two groups of modules, one in packed words and one in plain bytes."""
    config = compressed("pack-quantized", **INT4) | {"format": "mixed-precision"}
    other = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
    for name, one in (("group_0", config), ("group_1", other)):
        form = "pack-quantized" if one is config else "float-quantized"
        config["config_groups"][name] = one["config_groups"]["group_0"] | {"format": form}
    return config


# The stored form of a matrix, its config, and the format that a CPU keeps it in.
KINDS: dict[str, tuple[Callable[..., Stored], dict[str, Any], str]] = {
    "gptq, symmetric": (partial(gptq, sym=True), GPTQ, "Q4_0"),
    "gptq, asymmetric": (gptq, GPTQ | {"sym": False}, "G4Z"),
    "gptq, activation order": (partial(gptq, sym=True, act_order=True), GPTQ | {"desc_act": True}, "Q4_0"),
    "gptq v2": (partial(gptq, version=2), GPTQ | {"checkpoint_format": "gptq_v2"}, "G4Z"),
    "gptq v2, as transformers says it": (partial(gptq, version=2), GPTQ | {"format": "GPTQ_v2"}, "G4Z"),
    "gptq, eight bits": (partial(gptq, bits=8, group=64), GPTQ | {"bits": 8, "group_size": 64}, "G8"),
    "gptq, other bits and groups in some modules": (
        lambda rows, cols: gptq(rows, cols, bits=8, group=64) if rows == 256 else gptq(rows, cols),
        GPTQ | {"sym": False, "dynamic": {"+:.*(gate|up)_proj": {"bits": 8, "group_size": 64}, "-:.*lm_head": {}}},
        "G4Z",
    ),
    "awq": (awq, AWQ, "G4Z"),
    "awq, as its first versions say it": (awq, {"quant_method": "awq", "w_bit": 4, "q_group_size": 32}, "G4Z"),
    "packed int4": (packed, compressed("pack-quantized", **INT4), "Q4_0"),
    "packed int4, asymmetric": (
        partial(packed, sym=False),
        compressed("pack-quantized", **INT4, symmetric=False),
        "G4Z",
    ),
    "packed int4, wide zero points": (
        partial(packed, sym=False, wide=True),
        compressed("pack-quantized", **INT4),
        "G4Z",
    ),
    "packed int4, activation order": (
        partial(packed, act_order=True),
        compressed("pack-quantized", **INT4, actorder="Dynamic"),
        "Q4_0",
    ),
    "packed int4 or int8": (
        lambda rows, cols: packed(rows, cols, bits=8 if rows == 256 else 4, group=cols),
        eight_or_four(),
        "Q4_0",
    ),
    "packed int4 beside fp8": (
        lambda rows, cols: plain(rows, cols, kind="fp8") if rows == 256 else packed(rows, cols),
        packed_beside_fp8(),
        "Q4_0",
    ),
    "packed int8": (partial(packed, bits=8), compressed("pack-quantized", **INT4 | {"num_bits": 8}), "Q8_0"),
    "int8 by row": (plain, compressed("int-quantized", num_bits=8, type="int", strategy="channel"), "Q8_0"),
    "int8, float32 scales": (
        partial(plain, number="float32"),
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        "G8",
    ),
    "fp8 by row": (
        partial(plain, kind="fp8"),
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        "GF8",
    ),
    "fp8, one scale": (partial(plain, kind="fp8", share="tensor"), FP8, "GF8"),
    "fp8, one scale, as transformers says it": (
        lambda rows, cols: renamed(plain(rows, cols, kind="fp8", share="tensor"), "weight_scale_inv"),
        FP8 | {"weight_block_size": None},
        "GF8",
    ),
    "fp8 in blocks, as compressed-tensors says it": (
        lambda rows, cols: renamed(blocks(rows, cols), "weight_scale", of="weight_scale_inv"),
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure="128x128"),
        "GF8",
    ),
    "fp8 in blocks": (blocks, FP8 | {"weight_block_size": [128, 128]}, "GF8"),
}


def location(directory: Path) -> ModelLocation:
    return ModelLocation("hf", directory, "m")


def opened(directory: Path) -> QuantizedStore:
    scheme = load_scheme(location(directory))
    assert scheme is not None
    return QuantizedStore(SafetensorsStore.open(directory), scheme)


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_checkpoint_is_the_plain_one_of_the_same_values(kind: str, tmp_path: Path) -> None:
    make, config, kept = KINDS[kind]
    save_checkpoint(tmp_path, config_of("qwen2", **SIZES, num_hidden_layers=1))
    values = quantise_checkpoint(tmp_path, make, config)
    store = opened(tmp_path)
    for name, expected in values.items():
        assert np.array_equal(store.load(name).numpy(), expected)
    small, large = ours(tmp_path, packed=True), ours(tmp_path, packed=False)
    layer = small.weights.layers[0]
    for weight, plain_weight in ((layer.qkv, large.weights.layers[0].qkv), (layer.down, large.weights.layers[0].down)):
        assert isinstance(weight, PackedWeight)
        assert [piece.kind for piece in weight.pieces] == [kept]
        assert torch.equal(weight.dequantize(), plain_weight)
    ids, chunks = tokens(12), [9, 1, 2]
    expected_logits = oracle_logits(oracle(tmp_path / "plain"), ids, chunks)
    for model in (small, large):
        assert relative_error(our_logits(model, ids, chunks), expected_logits) <= 1e-4


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (partial(gptq, 8, 8, sym=True, group=8), GPTQ | {"group_size": 8}),
        (partial(gptq, 64, 96, act_order=True), GPTQ | {"sym": False, "desc_act": True}),
        (partial(awq, 64, 96), AWQ),
        (
            partial(packed, 8, 13, group=13, sym=False),
            compressed("pack-quantized", num_bits=4, type="int", strategy="channel", symmetric=False),
        ),
        (partial(blocks, 130, 200), FP8 | {"weight_block_size": [128, 128]}),
    ],
    ids=["a word a row", "activation order", "awq", "rows that are no whole words", "fp8 in blocks"],
)
def test_a_matrix_is_the_same_where_it_is_opened_on_a_device(
    make: Callable[[], Stored], config: dict[str, Any], tmp_path: Path
) -> None:
    save_file({f"m.{part}": tensor for part, tensor in make().parts.items()}, tmp_path / "model.safetensors")
    scheme = read_scheme(Fields({"quantization_config": config}, "config.json"))
    assert scheme is not None
    store = QuantizedStore(SafetensorsStore.open(tmp_path), scheme)
    arrays, tensors = store.load_grouped("m.weight"), store.load_grouped("m.weight", torch.device("cpu"))
    assert arrays is not None
    assert tensors is not None
    assert (tensors.format, tensors.shape, tensors.inputs) == (arrays.format, arrays.shape, arrays.inputs)
    assert np.array_equal(tensors.codes.numpy(), arrays.codes)
    assert np.array_equal(tensors.scales.base.numpy(), arrays.scales.base)
    for found, expected in ((tensors.zero_points, arrays.zero_points), (tensors.columns, arrays.columns)):
        assert (found is None) == (expected is None)
        assert found is None or np.array_equal(found, expected)


def test_groups_that_are_no_whole_blocks_become_float32(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of("llama", **SIZES, num_hidden_layers=1))
    quantise_checkpoint(tmp_path, partial(packed, group=16), compressed("pack-quantized", **INT4 | {"group_size": 16}))
    weight = ours(tmp_path, packed=True).weights.layers[0].qkv
    assert isinstance(weight, PackedWeight)
    assert [piece.kind for piece in weight.pieces] == ["F32"]


def test_rows_that_are_no_whole_words_are_filled_up(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of("llama", **SIZES | {"intermediate_size": 172}, num_hidden_layers=1))
    config = compressed("pack-quantized", num_bits=4, type="int", strategy="channel", symmetric=False)
    values = quantise_checkpoint(tmp_path, lambda rows, cols: packed(rows, cols, group=cols, sym=False), config)
    down = ours(tmp_path, packed=True).weights.layers[0].down
    assert isinstance(down, PackedWeight)
    assert np.array_equal(down.dequantize().numpy(), values["model.layers.0.mlp.down_proj.weight"])


Q = "model.layers.0.self_attn.q_proj"


def change(parts: dict[str, Tensor], part: str, to: Callable[[Tensor], Tensor] | None) -> None:
    """Change a part of the first layer's q, or take it away."""
    old = parts.pop(f"{Q}.{part}")
    if to is not None:
        parts[f"{Q}.{part}"] = to(old).contiguous()


@pytest.mark.parametrize(
    ("kind", "part", "to", "said"),
    [
        ("awq", "scales", None, f"tensor '{Q}.qweight': its scales is missing"),
        ("fp8 in blocks", "weight_scale_inv", None, f"tensor '{Q}.weight': its weight_scale_inv is missing"),
        ("gptq, symmetric", "scales", lambda t: t[:-1], f"tensor '{Q}.scales': shape [3, 128]; allowed: [4, 128]"),
        ("gptq, symmetric", "qzeros", lambda t: t[:, :-1], f"tensor '{Q}.qzeros': shape [4, 15]; allowed: [4, 16]"),
        ("gptq, symmetric", "qweight", lambda t: t[:-1], "120 columns in groups of 32; allowed: a group size"),
        ("gptq, symmetric", "scales", lambda t: t.int(), f"tensor '{Q}.scales': dtype I32; allowed: F16, BF16, F32"),
        ("gptq, asymmetric", "qzeros", lambda t: t | 15, f"tensor '{Q}.qzeros': zero point 16; allowed: 1 to 15"),
        ("gptq, activation order", "g_idx", None, f"tensor '{Q}.qweight': activation order without its index"),
        ("gptq, activation order", "g_idx", lambda t: t + 1, f"tensor '{Q}.g_idx': group 4; allowed: 0 to 3"),
        ("gptq, activation order", "g_idx", lambda t: t * 0, f"tensor '{Q}.g_idx': groups of several sizes"),
        ("packed int4, activation order", "weight_g_idx", None, "weight_packed': activation order without its index"),
        ("packed int4", "weight_scale", lambda t: t * torch.inf, "weight_scale': a scale that is no finite number"),
        ("packed int4", "weight_shape", lambda t: t + 1, f"tensor '{Q}.weight_shape': [129, 129]; allowed: [128, 128]"),
        ("packed int4, asymmetric", "weight_zero_point", None, "weight_packed': its weight_zero_point is missing"),
        ("packed int4, wide zero points", "weight_zero_point", lambda t: t * 0 + 9, "zero point 9; allowed: -8 to 7"),
        ("fp8 by row", "weight", lambda t: t.float().to(torch.float8_e5m2), "F8_E5M2; allowed: F8_E4M3"),
        ("fp8, one scale", "weight", lambda t: t.view(torch.int8), f"tensor '{Q}.weight': dtype I8; allowed: F8_E4M3"),
        ("fp8 by row", "weight", lambda t: (t.view(torch.uint8) | 127).view(t.dtype), "weights that are no numbers"),
    ],
)
def test_a_broken_part_is_one_line_naming_file_and_tensor(
    kind: str, part: str, to: Callable[[Tensor], Tensor] | None, said: str, tmp_path: Path
) -> None:
    make, config, _ = KINDS[kind]
    save_checkpoint(tmp_path, config_of("llama", **SIZES, num_hidden_layers=1))
    quantise_checkpoint(tmp_path, make, config)
    parts = {name: tensor.clone() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    change(parts, part, to)
    save_file(parts, tmp_path / "model.safetensors")
    with refused(WeightsError, said, "model.safetensors"):
        ours(tmp_path, packed=True)


@pytest.mark.parametrize(
    ("kind", "file"), [("gptq, asymmetric", "quantize_config.json"), ("awq", "quant_config.json"), ("awq", None)]
)
def test_a_config_in_a_file_of_its_own_is_read_and_one_that_is_missing_said(
    kind: str, file: str | None, tmp_path: Path
) -> None:
    make, config, kept = KINDS[kind]
    save_checkpoint(tmp_path, config_of("llama", **SIZES, num_hidden_layers=1))
    quantise_checkpoint(tmp_path, make, config)
    described = json.loads((tmp_path / "config.json").read_text())
    del described["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(described))
    if file is None:
        with pytest.raises(WeightsError, match=r"a part of a quantised matrix, but the config has no quantization"):
            ours(tmp_path)
        return
    (tmp_path / file).write_text(json.dumps({k: v for k, v in config.items() if k != "quant_method"}))
    weight = ours(tmp_path, packed=True).weights.layers[0].qkv
    assert isinstance(weight, PackedWeight)
    assert [piece.kind for piece in weight.pieces] == [kept]


def test_biases_of_zeros_are_passed_over_and_others_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of("llama", **SIZES, num_hidden_layers=1))
    quantise_checkpoint(tmp_path, gptq, GPTQ)
    parts = {name: tensor.clone() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(parts | {f"{Q}.bias": torch.zeros(128).half()}, tmp_path / "model.safetensors")
    assert ours(tmp_path).weights.layers[0].qkv_bias is None
    save_file(parts | {f"{Q}.bias": torch.eye(128)[5].half()}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"has tensor '{Q}.bias', which the config does not call for"):
        ours(tmp_path)


@pytest.mark.parametrize("left", ["scales", "qweight"])
def test_parts_that_nothing_uses_are_an_error(left: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of("llama", **SIZES, num_hidden_layers=1))
    quantise_checkpoint(tmp_path, awq, AWQ)
    parts = load_file(tmp_path / "model.safetensors")
    extra = {name.replace(Q, "extra"): tensor.clone() for name, tensor in parts.items() if name.startswith(Q)}
    kept = extra if left == "qweight" else {"extra.scales": extra["extra.scales"]}
    save_file(parts | kept, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model.safetensors: has tensor 'extra\.(scales|weight)'"):
        ours(tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method: 'bitsandbytes'; allowed: gptq, awq"),
        ({"load_in_4bit": True}, "quant_method: 'missing'"),
        (GPTQ | {"bits": 3}, "bits: 3; allowed: 4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format: True; allowed: false"),
        (AWQ | {"version": "gemv"}, "version: 'gemv'; allowed: gemm"),
        (AWQ | {"version": None, "format": "llm-awq"}, "format: 'llm-awq'; allowed: gemm"),
        (compressed("nvfp4-pack-quantized", **INT4), "format: 'nvfp4-pack-quantized'"),
        (
            compressed("pack-quantized", **INT4) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config",
        ),
        (compressed("int-quantized", **INT4), "type: 'plain int4'"),
        (FP8 | {"fmt": "e5m2"}, "fmt: 'e5m2'"),
    ],
)
def test_what_is_not_read_is_refused_by_name(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of("llama", **SIZES, num_hidden_layers=1))
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(described | {"quantization_config": config}))
    with refused(UnsupportedError, said, "config.json"):
        ours(tmp_path)
