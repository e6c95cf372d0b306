"""GGUF files: their metadata, and the model in them against the HF checkpoint of the same weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kit.models.tiny_gguf import convert, metadata_of
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
from onewave.base.errors import CapacityError, ConfigError, UnsupportedError
from onewave.engine.load import checkpoint
from onewave.models.config.gguf import from_gguf
from onewave.models.config.hf import from_hf
from onewave.models.config.model_config import ModelConfig
from onewave.models.rope import inv_freq
from onewave.ops.linear import PackedWeight

# Rows of 160 = 5 blocks of 32, heads of 80: nothing is a power of two.
SIZES: dict[str, Any] = {
    "hidden_size": 192, "intermediate_size": 160, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64,
}  # fmt: skip
CHUNKS = [11] + [1] * 8
MIXES: dict[str, dict[str, str]] = {
    "F32": {"default": "F32"},
    "F16": {"default": "F16"},
    "BF16": {"default": "BF16"},
    "Q8_0": {"default": "Q8_0"},
    "Q4_0": {"default": "Q4_0"},
    "Q4_1 and Q8_0": {"default": "Q4_1", "embed_tokens": "Q8_0"},
    "q, k, v of different types": {"default": "Q8_0", "v_proj": "F16", "k_proj": "Q4_1", "up_proj": "Q5_1"},
    "Q5_0": {"default": "Q5_0"},
    "a type without a CPU kernel": {"default": "MXFP4"},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen3": {"attention_bias": True},
}


def test_quantized_weights_take_the_memory_that_they_take_in_their_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = converted(tmp_path, config_of("llama", **SIZES, tie_word_embeddings=True), "Q8_0")
    monkeypatch.setattr(checkpoint, "available_bytes", lambda: file.stat().st_size)
    assert ours(file, packed=True).weights.layers
    with pytest.raises(CapacityError, match=r"weights of tiny.gguf: at least .* GiB on a CPU with"):
        ours(file, packed=False)


def converted(directory: Path, config: Any, mix: str, architecture: str = "llama", **more: Any) -> Path:
    """A GGUF of random weights, and the HF checkpoint of the same beside it."""
    save_checkpoint(directory, config)
    convert(directory, directory / "tiny.gguf", architecture, config, MIXES[mix], **more)
    return directory / "tiny.gguf"


def check_same_model(file: Path, *, packed: bool = False) -> None:
    ids = tokens(19)
    expected = oracle_logits(oracle(file.parent), ids, CHUNKS)
    assert relative_error(our_logits(ours(file, packed=packed), ids, CHUNKS), expected) <= 1e-4


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mix", MIXES)
def test_every_storage_type_is_the_checkpoint_of_the_same_weights(mix: str, packed: bool, tmp_path: Path) -> None:
    config = config_of("llama", **SIZES, tie_word_embeddings=True)
    check_same_model(converted(tmp_path, config, mix), packed=packed)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reads_its_own_row_order_and_biases(family: str, packed: bool, tmp_path: Path) -> None:
    config = config_of(family, **SIZES, **FAMILIES[family])
    check_same_model(converted(tmp_path, config, "Q8_0", family), packed=packed)


def test_rope_divisors_are_llama3_scaling(tmp_path: Path) -> None:
    config = config_of("llama", "llama3", **SIZES)
    rope = from_hf(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}).rope
    scaled, _ = inv_freq(rope, seq_len=1, max_position=16)
    plain = 1.0 / rope.theta ** (torch.arange(0, 64, 2).float() / 64)
    check_same_model(converted(tmp_path, config, "F32", divisors=(plain / scaled).numpy()))


def test_mistral_is_a_llama_with_a_window(tmp_path: Path) -> None:
    config = config_of("mistral", **SIZES, sliding_window=5)
    check_same_model(converted(tmp_path, config, "F16", extra={"llama.attention.sliding_window": 5}))


@pytest.mark.parametrize("rope", ["linear", "yarn"])
def test_rope_scaling_keys_are_honoured(rope: str, tmp_path: Path) -> None:
    import gguf  # not on every machine that collects these tests

    config = config_of("qwen2", rope, **SIZES)
    extra = {
        gguf.Keys.Rope.SCALING_TYPE.format(arch="qwen2"): rope,
        gguf.Keys.Rope.SCALING_FACTOR.format(arch="qwen2"): config.rope_parameters["factor"],
    }
    if rope == "yarn":
        extra[gguf.Keys.Rope.SCALING_ORIG_CTX_LEN.format(arch="qwen2")] = 16
        extra[gguf.Keys.Rope.SCALING_YARN_BETA_FAST.format(arch="qwen2")] = 8.0
    check_same_model(converted(tmp_path, config, "F32", "qwen2", extra=extra))


def test_every_weight_stays_packed_in_its_own_type(tmp_path: Path) -> None:
    file = converted(tmp_path, config_of("llama", **SIZES), "q, k, v of different types")
    weights = ours(file, packed=True).weights
    layer = weights.layers[0]
    kinds = [
        [piece.kind for piece in weight.pieces]
        for weight in (layer.qkv, layer.gate_up, layer.down, weights.head)
        if isinstance(weight, PackedWeight)
    ]
    assert kinds == [["Q8_0", "Q4_1", "F16"], ["Q8_0", "Q5_1"], ["Q8_0"], ["Q8_0"]]


# Metadata alone.

SHAPES: dict[str, tuple[int, ...]] = {"token_embd.weight": (131, 192), "output_norm.weight": (192,)}


def base(**changes: Any) -> dict[str, Any]:
    metadata = {"general.architecture": "llama"} | metadata_of("llama", config_of("llama", **SIZES))
    return metadata | {key.replace("__", "."): value for key, value in changes.items()}


def read(*absent: str, shapes: dict[str, tuple[int, ...]] = SHAPES, **changes: Any) -> ModelConfig:
    metadata = base(**changes)
    return from_gguf({key: value for key, value in metadata.items() if key not in absent}, shapes, source="x.gguf")


def test_absent_keys_have_llama_cpp_defaults() -> None:
    absent = ("attention.key_length", "attention.value_length", "attention.head_count_kv", "rope.freq_base")
    config = read(*(f"llama.{key}" for key in absent))
    assert (config.head_dim, config.num_kv_heads, config.rope.theta) == (32, 6, 10000.0)
    assert (config.rope.kind, config.rope.rotary_dim, config.layer_windows) == ("default", 32, (None,) * 3)


def test_the_vocabulary_is_that_of_the_tokenizer() -> None:
    assert read("llama.vocab_size").vocab_size == 131
    assert read(llama__vocab_size=140).vocab_size == 140
    assert read(tokenizer__ggml__tokens=["a"] * 150).vocab_size == 150
    with pytest.raises(ConfigError, match=r"^x\.gguf: llama\.vocab_size: missing"):
        read("llama.vocab_size", shapes={})


def test_every_end_token_ends_text() -> None:
    config = read(tokenizer__ggml__eot_token_id=7, tokenizer__ggml__eom_token_id=2)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 7))


@pytest.mark.parametrize("none", [-1, 131, 2**32 - 1])
def test_token_ids_that_no_token_has_are_none(none: int) -> None:
    keys = {f"tokenizer__ggml__{name}_token_id": none for name in ("bos", "eos", "eot", "eom")}
    config = read(**keys)
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())
    assert read(**keys | {"tokenizer__ggml__eot_token_id": 130}).eos_token_ids == (130,)


def test_a_window_may_be_that_of_some_layers_only() -> None:
    def windows(pattern: Any) -> tuple[int | None, ...]:
        return read(llama__attention__sliding_window=8, llama__attention__sliding_window_pattern=pattern).layer_windows

    assert windows([True, False, True]) == (8, None, 8)
    assert windows([True] * 3) == (8,) * 3
    assert windows([False] * 3) == (None,) * 3
    with pytest.raises(ConfigError, match=r"sliding_window_pattern: 2 entries; allowed: block_count=3 of them"):
        windows([True, False])
    with pytest.raises(UnsupportedError, match=r"sliding_window_pattern: 2; allowed: true or false"):
        windows(2)


def test_scaling_keys_that_change_nothing_are_accepted() -> None:
    plain = {"llama__rope__scaling__attn_factor": 1.0, "llama__rope__scaling__yarn_attn_factor": 1.0}
    assert read(**plain, llama__rope__scaling__yarn_ext_factor=-1.0).rope == read().rope
    yarn = {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0}
    assert read(**yarn, llama__rope__scaling__yarn_ext_factor=1.0).rope == read(**yarn).rope


def test_head_and_biases_are_what_the_file_holds() -> None:
    assert read().tie_word_embeddings
    more = {"output.weight": (131, 192), "blk.0.attn_q.bias": (384,), "blk.0.ffn_gate.bias": (160,)}
    config = read(shapes=SHAPES | more)
    assert (config.tie_word_embeddings, config.qkv_bias, config.o_bias, config.mlp_bias) == (False, True, False, True)


def test_a_list_of_equal_values_per_layer_is_that_value() -> None:
    assert read(llama__feed_forward_length=[160, 160, 160]).intermediate_size == 160
    with pytest.raises(ConfigError, match=r"llama\.feed_forward_length: \[160, 192, 160\]"):
        read(llama__feed_forward_length=[160, 192, 160])


@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_a_missing_or_malformed_key_is_named(key: str) -> None:
    key = f"llama.{key}"
    with pytest.raises(ConfigError, match=rf"^x\.gguf: {key}: missing"):
        read(key)
    for value in ("7", 0, -3, float("nan"), [], True):
        with pytest.raises(ConfigError, match=rf"^x\.gguf: {key}: "):
            read(**{key: value})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"general__type": "adapter"}, "x.gguf: a LoRA adapter alone"),
        ({"general__architecture": "mamba"}, "general.architecture: 'mamba'; allowed: llama, qwen2, qwen3"),
        ({"llama__rope__scaling__type": "longrope"}, "'longrope'; allowed: none, linear, yarn"),
        ({"llama__expert_count": 8}, "llama.expert_count"),
        ({"llama__attention__value_length": 32}, "llama.attention.value_length: 32"),
        ({"llama__attention__scale": 0.5}, "llama.attention.scale: 0.5"),
        ({"llama__attention__scale": 1.0}, "llama.attention.scale: 1.0"),
        ({"llama__attention__causal": False}, "llama.attention.causal: False"),
        ({"llama__final_logit_softcapping": 30.0}, "llama.final_logit_softcapping: 30.0"),
        ({"llama__attention__temperature_scale": 0.1}, "llama.attention.temperature_scale: 0.1"),
        ({"llama__attention__temperature_length": 16}, "llama.attention.temperature_length: 16"),
        ({"llama__rope__scaling__yarn_attn_factor": 2.0}, "llama.rope.scaling.yarn_attn_factor: 2.0"),
        ({"llama__rope__scaling__attn_factor": 2.0}, "attn_factor: 2.0; allowed: 1 where rope.scaling.type is linear"),
        ({"llama__rope__scaling__yarn_ext_factor": 0.5}, "llama.rope.scaling.yarn_ext_factor: 0.5; allowed: 0"),
        (
            {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__yarn_ext_factor": 0.0},
            "llama.rope.scaling.yarn_ext_factor: 0.0; allowed: 1 where rope.scaling.type is yarn",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with refused(UnsupportedError, said):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"llama__attention__head_count_kv": 4}, "llama.attention.head_count_kv: 4"),
        ({"llama__attention__key_length": 63}, "llama.attention.key_length: 63"),
        ({"llama__rope__dimension_count": 128}, "llama.rope.dimension_count: 128"),
        ({"llama__rope__freq_base": -1.0}, "llama.rope.freq_base: -1.0"),
        ({"llama__rope__scaling__factor": float("inf")}, "llama.rope.scaling.factor: inf"),
        ({"general__architecture": 7}, "general.architecture: 7"),
        ({"tokenizer__ggml__eos_token_id": "x"}, "tokenizer.ggml.eos_token_id: 'x'"),
        ({"tokenizer__ggml__tokens": 3}, "tokenizer.ggml.tokens: 3"),
    ],
)
def test_an_impossible_value_is_named(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**changes)
    assert str(caught.value).startswith(f"x.gguf: {key}")


def test_rope_divisors_must_fit_the_rotation() -> None:
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight: 3 values; allowed: 32"):
        from_gguf(base(), SHAPES, rope_divisors=[1.0, 2.0, 3.0], source="x.gguf")


def test_a_partly_rotating_head_rotates_its_leading_pairs() -> None:
    from onewave.engine.load.checkpoint import _half_split_rows

    rows = _half_split_rows(read(llama__rope__dimension_count=8), 2)
    assert rows[:10].tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 9]
    assert np.array_equal(np.sort(rows), np.arange(128))
