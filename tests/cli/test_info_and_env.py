"""`onewave info` and `onewave env`."""

import json
import subprocess
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from kit.models.quantized_files import compressed, packed, quantise_checkpoint

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}


def test_info_describes_a_directory(onewave, tiny_model):
    facts = json.loads(onewave("info", tiny_model, "--json").out)
    assert facts["kind"] == "hf"
    assert facts["config"]["num_kv_heads"] == 2
    assert facts["kv_bytes_per_token"] == {"float32": 256, "bfloat16": 128, "float16": 128, "int8": 64, "fp8": 64}
    assert facts["weight_dtypes"] == {"F32": len(facts["tensors"])}
    assert facts["weight_bytes"] == 4 * facts["parameters"] == sum(tensor["bytes"] for tensor in facts["tensors"])
    assert facts["tokenizer"] == "BPE (tokenizer.json), 256 tokens"


def test_info_describes_a_gguf_file(onewave, smollm2_path):
    facts = json.loads(onewave("info", smollm2_path, "--json").out)
    assert facts["parameters"] == 134_515_008
    assert facts["kv_bytes_per_token"]["bfloat16"] == 2 * 30 * 3 * 64 * 2
    assert facts["tokenizer"] == "gpt2 (GGUF), pre-tokenizer smollm, 49152 tokens"
    assert facts["weight_dtypes"]["Q4_1"] == 210
    assert facts["weight_formats"]["Q4_1"]["bits_per_weight"] == 5


def test_info_describes_a_quantised_checkpoint_by_matrix(onewave, own_model):
    quantise_checkpoint(own_model, partial(packed, group=16), compressed("pack-quantized", **INT4))
    facts = json.loads(onewave("info", own_model, "--json").out)
    assert set(facts["weight_dtypes"]) == {"int4 g16", "F32"}
    (down,) = (tensor for tensor in facts["tensors"] if tensor["name"] == "model.layers.1.mlp.down_proj.weight")
    rows, cols = down["shape"]
    assert down["bytes"] == rows * cols // 2 + 2 * rows * cols // 16 + 16  # codes, scales, and the shape itself
    assert "int4 g16 x 14 (" in onewave("info", own_model).out


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b", "qwen3-8b"])
def test_info_describes_a_built_in_configuration(onewave, name):
    done = onewave("info", name)
    assert done.status == 0
    assert "not on this machine" in done.out


def test_info_prints_every_tensor(onewave, tiny_model):
    out = onewave("info", tiny_model).out
    assert "model.layers.1.mlp.down_proj.weight" in out
    assert "32x48" in out


def test_info_prints_names_that_a_terminal_would_obey_as_they_are_written(onewave, own_model):
    file = own_model / "model.safetensors"
    save_file(load_file(file) | {"a\x1b[2J\nb": torch.zeros(1)}, file)
    out = onewave("info", own_model).out
    assert r"  a\x1b[2J\nb " in out
    assert "\x1b" not in out


def test_info_does_not_read_the_weights(onewave, own_model):
    """Weights of the right length whose every byte is a NaN's are none of its business."""
    path = own_model / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1000:] = b"\xff" * 1000
    path.write_bytes(data)
    assert onewave("info", own_model).status == 0


def test_env_names_versions_processor_and_cache(onewave, tmp_path):
    facts = json.loads(onewave("env", "--json").out)
    assert facts["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["versions"]["torch"]
    assert facts["cpu"]["threads"] >= 1
    assert facts["cache"]["directory"] == str(tmp_path / "cache")
    assert facts["cache"]["used_bytes"] == 0
    assert "torch" in onewave("env").out


def test_env_works_where_nvidia_smi_fails(onewave, monkeypatch):
    def fail(*args, **options):
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    monkeypatch.setattr(subprocess, "run", fail)
    assert onewave("env").status == 0
