"""ModelConfig from config.json: real transformers configs of both major versions, and every way one can be wrong."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kit.models.tiny_models import ROPES, config_of
from kit.refusals import refused
from onewave.base.errors import ConfigError, OnewaveError, UnsupportedError
from onewave.models.config.hf import from_hf
from onewave.models.config.model_config import ModelConfig
from onewave.models.config.read import load_config
from onewave.models.registry import FAMILIES
from onewave.weights.fetch.sources import ModelLocation, builtin_names

# As transformers 4 wrote it for Llama 2, with nothing that has a default.
LLAMA2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
NAN, INF = float("nan"), float("inf")


def hf(**changes: Any) -> ModelConfig:
    return from_hf(LLAMA2 | changes)


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in LLAMA2.items() if key not in keys}


def saved(directory: Path, config: Any, architecture: str | None = None) -> ModelConfig:
    if architecture is not None:
        config.architectures = [architecture]
    config.save_pretrained(directory)
    return load_config(ModelLocation("hf", directory, "saved"))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_that_transformers_saved_reads_back(family: str, rope: str, tmp_path: Path) -> None:
    theirs = config_of(family, rope, rms_norm_eps=1e-4, tie_word_embeddings=True, eos_token_id=[2, 5], dtype="float16")
    config = saved(tmp_path, theirs, FAMILIES[family].architecture)
    assert (config.family, config.vocab_size, config.hidden_size, config.intermediate_size) == (family, 131, 144, 172)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 9, 3, 80)
    assert (config.rms_norm_eps, config.max_position, config.tie_word_embeddings) == (1e-4, 16, True)
    assert (config.dtype, config.bos_token_id, config.eos_token_ids) == ("float16", 1, (2, 5))
    assert (config.rope.kind, config.rope.theta, config.rope.rotary_dim) == (rope, 500.0, 80)
    assert config.rope.factor == ROPES[rope].get("factor", 1.0)
    assert config.qk_norm is (family == "qwen3")
    assert config.qkv_bias is (family == "qwen2")
    assert not config.o_bias
    assert not config.mlp_bias


def test_biases_follow_the_family(tmp_path: Path) -> None:
    llama = saved(tmp_path / "llama", config_of("llama", attention_bias=True, mlp_bias=True))
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    qwen3 = saved(tmp_path / "qwen3", config_of("qwen3", attention_bias=True))
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.mlp_bias) == (True, True, False)
    qwen2 = saved(tmp_path / "qwen2", config_of("qwen2", attention_bias=True))
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias) == (True, False, False)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_windows_follow_layers(family: str, tmp_path: Path) -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 7}
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    options: list[tuple[dict[str, Any], tuple[int | None, ...]]] = [
        ({"sliding_window": 7}, (None, None, None)),
        (sliding | {"max_window_layers": 1}, (None, 7, 7)),
        (sliding | {"max_window_layers": 3}, (None, None, None)),
        (sliding | {"layer_types": types}, (7, None, 7)),
    ]
    for index, (option, windows) in enumerate(options):
        assert saved(tmp_path / str(index), config_of(family, **option)).layer_windows == windows
    # As transformers 4 wrote them, without layer_types.
    old = LLAMA2 | {"architectures": [FAMILIES[family].architecture], "num_key_value_heads": 8, "num_hidden_layers": 3}
    assert from_hf(old | sliding | {"max_window_layers": 2}).layer_windows == (None, None, 7)
    assert from_hf(old | {"sliding_window": None}).layer_windows == (None, None, None)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_models_architecture_is_its_family(family: str) -> None:
    base = FAMILIES[family].architecture.replace("ForCausalLM", "Model")
    assert from_hf(LLAMA2 | {"architectures": [base], "num_key_value_heads": 8}).family == family


def test_mistral_windows_every_layer_or_none(tmp_path: Path) -> None:
    assert saved(tmp_path / "a", config_of("mistral", sliding_window=6)).layer_windows == (6, 6, 6)
    assert saved(tmp_path / "b", config_of("mistral", sliding_window=None)).layer_windows == (None,) * 3
    old = LLAMA2 | {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 8, "num_hidden_layers": 2}
    assert from_hf(old).layer_windows == (4096, 4096)


def test_an_old_llama_gets_the_defaults_of_its_time() -> None:
    config = hf()
    assert (config.num_kv_heads, config.head_dim, config.rope.kind, config.rope.theta) == (32, 128, "default", 10000.0)
    assert (config.tie_word_embeddings, config.qkv_bias, config.dtype) == (False, False, "float16")
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())
    assert hf(torch_dtype=None).dtype == "float32"
    assert hf(torch_dtype=None, dtype="torch.bfloat16").dtype == "bfloat16"
    assert hf(num_key_value_heads=None).num_kv_heads == 32


def test_transformers_4_and_5_spell_the_same_rope() -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 16}
    expected = hf(rope_parameters={"rope_type": "yarn", "rope_theta": 7000.0} | yarn).rope
    assert expected.original_max_position == 1024
    assert hf(rope_theta=7000.0, rope_scaling={"type": "yarn"} | yarn).rope == expected
    assert hf(rope_theta=7000, rope_scaling={"rope_type": "yarn"} | yarn).rope == expected
    assert hf(rope_theta=7000.0, rope_scaling=None).rope.theta == 7000.0
    top = {"original_max_position_embeddings": 512}
    assert hf(rope_scaling={"type": "yarn"} | yarn, **top).rope.original_max_position == 512


def test_an_id_of_minus_one_is_none() -> None:
    config = from_hf(LLAMA2 | {"bos_token_id": -1, "eos_token_id": -1})
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


def test_generation_config_says_where_text_ends() -> None:
    config = LLAMA2 | {"bos_token_id": 1, "eos_token_id": 2}
    assert from_hf(config).eos_token_ids == (2,)
    assert from_hf(config, {"eos_token_id": [7, 8, 7], "bos_token_id": 3}).eos_token_ids == (7, 8)
    assert from_hf(config, {"eos_token_id": None}).eos_token_ids == (2,)
    assert from_hf(config, {"eos_token_id": -1}).eos_token_ids == (2,)
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id: \['x'\]"):
        from_hf(config, {"eos_token_id": ["x"]})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "'GPT2LMHeadModel'; allowed: LlamaForCausalLM, MistralForCausalLM, Qwen2",
        ),
        ({"architectures": [7]}, "architecture: 7; allowed: LlamaForCausalLM"),
        ({"architectures": None, "model_type": "gemma"}, "'gemma'; allowed: llama, mistral, qwen2, qwen3"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "'longrope'; allowed: default, linear, dynamic, llama3, yarn",
        ),
        ({"rope_parameters": {"rope_type": "su"}}, r"rope_parameters.rope_type: 'su'; allowed: default, linear"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one RoPE per layer type"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'; allowed: silu"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantization_config.quant_method: 'aqlm'; allowed: gptq"),
        ({"torch_dtype": "float64"}, "'float64'; allowed: bfloat16, float16, float32"),
        ({"is_causal": False}, "config.json: is_causal: False; allowed: True"),
        ({"per_layer_config": {"1": {"rms_norm_eps": 0.5}}}, "per_layer_config: layers that differ; allowed: one kind"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with refused(UnsupportedError, said):
        hf(**changes)


def test_causal_attention_and_equal_layers_may_be_said() -> None:
    assert hf(is_causal=True, per_layer_config={}) == hf(is_causal=None, per_layer_config=None) == hf()


@pytest.mark.parametrize(
    "key", [key for key in LLAMA2 if key not in ("torch_dtype",)] + ["num_key_value_heads of mistral"]
)
def test_a_missing_key_is_named(key: str) -> None:
    config = without(key)
    if key.endswith("mistral"):
        key, config = "num_key_value_heads", LLAMA2 | {"architectures": ["MistralForCausalLM"]}
    with pytest.raises(ConfigError, match=rf"^some/config\.json: {key}: missing; allowed: "):
        from_hf(config, source="some/config.json")


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("hidden_size", ["4096", 0, -1, 4096.0, True, [4096], {}, NAN, INF, 10**400, 4095]),
        ("num_attention_heads", ["32", 0, -32, 2.5, 33]),
        ("num_key_value_heads", ["8", 0, -8, 3, 64, False]),
        ("num_hidden_layers", [0, "2", 10**9]),
        ("vocab_size", [0, -1, "x", 2**40]),
        ("intermediate_size", [0, []]),
        ("head_dim", [0, -2, "64", 63, 1.5, 258]),
        ("rms_norm_eps", [0, -1e-5, NAN, INF, "1e-5", True, 10**400]),
        ("max_position_embeddings", [0, "4096", -1]),
        ("rope_theta", ["x", 0, -1.0, NAN, INF, 1]),
        ("tie_word_embeddings", ["true", 1]),
        ("attention_bias", ["no", 0]),
        ("mlp_bias", [1.0]),
        ("torch_dtype", [16]),
        ("architectures", ["LlamaForCausalLM", 3, {}]),
        ("eos_token_id", ["2", -2, [2, -1], 1.5, True]),
        ("rope_scaling", [[], "linear", 4]),
        ("hidden_act", [1]),
        ("quantization_config", ["gptq"]),
    ],
)
def test_a_value_of_the_wrong_kind_is_one_line_naming_file_and_key(key: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError) as caught:
            hf(**{key: value})
        message = str(caught.value)
        assert message.startswith("config.json: "), message
        assert key in message or (key == "num_attention_heads" and "hidden_size" in message), (value, message)
        assert "\n" not in message
        assert len(message) < 300


@pytest.mark.parametrize(
    ("scaling", "key"),
    [
        ({"type": "linear"}, "factor: missing"),
        ({"factor": 2.0}, "rope_type: missing"),
        ({"rope_type": "linear", "factor": 0}, "factor: 0"),
        ({"rope_type": "linear", "factor": "2"}, "factor: '2'"),
        ({"rope_type": "dynamic", "factor": NAN}, "factor: nan"),
        ({"rope_type": "dynamic", "factor": -2}, "factor: -2"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor: missing"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 1}, "high_freq_factor: 1"),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0},
            "original_max_position_embeddings",
        ),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": "yes"}, "truncate: 'yes'"),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": -1}, "attention_factor: -1"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1.5}, "partial_rotary_factor: 1.5"),
        ({"rope_type": 3}, "rope_type: 3"),
    ],
)
def test_a_malformed_rope_names_its_key(scaling: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hf(rope_scaling=scaling)
    assert str(caught.value).startswith(f"config.json: rope_scaling.{key}")


def test_layer_types_must_fit_the_layers() -> None:
    qwen = LLAMA2 | {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 8, "num_hidden_layers": 2}
    with pytest.raises(ConfigError, match="layer_types: 1 entries; allowed: num_hidden_layers=2"):
        from_hf(qwen | {"layer_types": ["full_attention"]})
    with pytest.raises(UnsupportedError, match="layer_types: 'chunked_attention'"):
        from_hf(qwen | {"layer_types": ["full_attention", "chunked_attention"]})
    with pytest.raises(ConfigError, match="sliding_window"):
        from_hf(qwen | {"layer_types": ["full_attention", "sliding_attention"]})
    with pytest.raises(ConfigError, match="max_window_layers: -1"):
        from_hf(qwen | {"use_sliding_window": True, "max_window_layers": -1})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "missing"),
        ("directory", "a directory"),
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"vocab_size": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"{}", "architectures: missing"),
    ],
)
def test_an_unreadable_config_file_is_one_line_naming_it(
    content: bytes | str | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
    with pytest.raises(OnewaveError) as caught:
        load_config(ModelLocation("hf", tmp_path, "broken"))
    assert isinstance(caught.value, ConfigError)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_pipe_and_a_link_that_leads_nowhere_are_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA2))
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=rf"{name}: can't be read"):
        load_config(ModelLocation("hf", tmp_path, "broken"))
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=rf"{name}: not a file"):
        load_config(ModelLocation("hf", tmp_path, "broken"))


def test_a_broken_generation_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA2))
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"generation_config\.json: not a JSON object"):
        load_config(ModelLocation("hf", tmp_path, "broken"))


def test_the_built_in_configs_are_the_published_models() -> None:
    configs = {name: load_config(ModelLocation("builtin", None, name)) for name in builtin_names()}
    old, large_ones = {"llama-3-8b", "llama-3-70b"}, {"llama-3.1-70b", "llama-3-70b"}
    assert set(configs) == {"llama-3.2-1b", "llama-3.1-8b", "qwen3-8b"} | old | large_ones
    assert {(configs[name].rope.kind, configs[name].max_position) for name in old} == {("default", 8192)}
    small, large, qwen = (configs[name] for name in ("llama-3.2-1b", "llama-3.1-8b", "qwen3-8b"))
    assert {configs[name].num_layers for name in large_ones} == {80}
    assert (small.hidden_size, small.num_layers, small.head_dim, small.tie_word_embeddings) == (2048, 16, 64, True)
    assert (large.hidden_size, large.num_layers, large.head_dim, large.tie_word_embeddings) == (4096, 32, 128, False)
    assert (qwen.hidden_size, qwen.num_layers, qwen.qk_norm, qwen.vocab_size) == (4096, 36, True, 151936)
    assert (small.rope.kind, small.rope.factor, large.rope.factor, qwen.rope.theta) == ("llama3", 32.0, 8.0, 1e6)
