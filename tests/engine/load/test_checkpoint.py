"""Loading: what is refused, what is shared, what is made up."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kit.models.tiny_models import (
    CPU,
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
from onewave.base.errors import (
    CapacityError,
    InvalidArgumentError,
    OutOfReachError,
    UnsupportedError,
    WeightsError,
)
from onewave.base.quantized import QuantizedRows
from onewave.engine.load import checkpoint
from onewave.engine.load.checkpoint import load_model, open_parts
from onewave.engine.load.options import LoadOptions
from onewave.models.batch import Batch
from onewave.models.config.read import load_config
from onewave.models.llama import Llama
from onewave.models.names import GGUF, HF, expected_shapes
from onewave.ops.linear import has_finite_scales
from onewave.ops.linear.packed import FORMATS
from onewave.weights.dummy import DummyStore
from onewave.weights.fetch.sources import ModelLocation

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def change_weights(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite a checkpoint's tensors."""
    file = directory / "model.safetensors"
    state = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(state)
    save_file(state, file)


def dummy(name: str = "llama-3.2-1b", *, seed: int = 0, layers: int = 2) -> Llama:
    location = ModelLocation("builtin", None, name)
    config = replace(
        load_config(location),
        num_layers=layers,
        layer_windows=(None,) * layers,
        vocab_size=512,
        hidden_size=256,
        intermediate_size=384,
    )
    return load_model(
        location,
        config,
        LoadOptions(dtype=torch.bfloat16, device=CPU, load_format="dummy", seed=seed, max_model_len=32),
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop(Q_PROJ), f"has no tensor '{Q_PROJ}'"),
        (lambda state: state.pop("model.embed_tokens.weight"), "has no tensor 'model.embed_tokens.weight'"),
        (lambda state: state.pop("lm_head.weight"), "has no tensor 'lm_head.weight'"),
        (lambda state: state.update(extra=torch.zeros(3)), "has tensor 'extra', which the config does not call for"),
        (
            lambda state: state.update({Q_PROJ.replace("weight", "bias"): torch.ones(720)}),
            "has tensor 'model.layers.1.self_attn.q_proj.bias'",
        ),
        (lambda state: state.update({Q_PROJ: torch.zeros(720, 143)}), "shape [720, 143]; allowed: [720, 144]"),
        (lambda state: state.update({Q_PROJ: torch.zeros(720)}), "shape [720]; allowed: [720, 144]"),
        (lambda state: state.update({Q_PROJ: torch.zeros(720, 144, dtype=torch.int8)}), "dtype I8"),
    ],
)
def test_a_wrong_tensor_is_one_line_naming_file_and_tensor(
    change: Callable[[dict[str, Tensor]], object], said: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, config_of("llama"))
    change_weights(tmp_path, change)
    with refused(WeightsError, said, str(tmp_path)):
        ours(tmp_path)


def test_frequencies_that_old_checkpoints_store_are_ignored(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of("llama"))
    inv_freq = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_weights(tmp_path, lambda state: state.update({inv_freq: torch.zeros(40)}))
    ours(tmp_path)


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of("llama", tie_word_embeddings=True))
    for packed in (False, True):
        weights = ours(tmp_path, packed=packed).weights
        assert weights.head is weights.embedding


@pytest.mark.parametrize("stored", ["both, equal", "both, different", "head only"])
def test_a_tied_table_may_be_stored_under_either_name(stored: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of("llama", tie_word_embeddings=True))

    def store(state: dict[str, Tensor]) -> None:
        table = state["model.embed_tokens.weight"]
        state["lm_head.weight"] = table.flip(0) if stored == "both, different" else table.clone()
        if stored == "head only":
            del state["model.embed_tokens.weight"]

    change_weights(tmp_path, store)
    model = ours(tmp_path)
    assert (model.weights.head is model.weights.embedding) is (stored != "both, different")
    expected = oracle_logits(oracle(tmp_path), tokens(5), [5])
    assert relative_error(our_logits(model, tokens(5), [5]), expected) <= 1e-4


def test_a_sharded_checkpoint_is_the_single_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "one", config_of("qwen3"))
    oracle(tmp_path / "one").save_pretrained(tmp_path / "many", max_shard_size="400KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = (our_logits(ours(tmp_path / name), tokens(7), [7]) for name in ("one", "many"))
    assert torch.equal(one, many)


def test_a_loaded_model_does_not_look_at_its_files_again(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of("llama"))
    model = ours(tmp_path)
    before = our_logits(model, tokens(5), [5])
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as handle:
        handle.seek(file.stat().st_size // 2)
        handle.write(b"\xff" * 100_000)
    assert torch.equal(our_logits(model, tokens(5), [5]), before)


def test_weights_are_cast_to_the_asked_dtype(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of("qwen2"))
    model = ours(tmp_path, torch.float16)
    layer = model.weights.layers[0]
    assert model.dtype is torch.float16
    for tensor in (layer.qkv, layer.qkv_bias, layer.input_norm, model.weights.head):
        assert tensor.dtype is torch.float16


@pytest.mark.parametrize(("largest", "kept"), [(65504.0, True), (-65519.0, True), (65520.0, False), (-1e6, False)])
def test_a_weight_that_float16_cannot_hold_is_refused(largest: float, kept: bool, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of("llama"))
    change_weights(tmp_path, lambda state: state["model.layers.1.mlp.down_proj.weight"].view(-1)[5:6].fill_(largest))
    if kept:
        down = ours(tmp_path, torch.float16).weights.layers[1].down
        assert float(down.view(-1)[5].abs()) == 65504
    else:
        problem = f"'model.layers.1.mlp.down_proj.weight' in float16: a weight of size {abs(largest):g};"
        with pytest.raises(WeightsError, match=re.escape(problem)):
            ours(tmp_path, torch.float16)
        assert ours(tmp_path, torch.bfloat16).weights.norm.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("name", "dtype", "packed"),
    [
        (Q_PROJ, torch.float32, True),
        (Q_PROJ.replace("q_proj", "v_proj"), torch.bfloat16, False),
        ("model.embed_tokens.weight", torch.float16, False),
        ("model.norm.weight", torch.float32, True),
        ("model.layers.0.self_attn.k_proj.bias", torch.bfloat16, False),
    ],
)
def test_a_weight_that_is_not_finite_is_refused_by_its_tensors_name(
    bad: float, name: str, dtype: torch.dtype, packed: bool, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, config_of("qwen2"))
    change_weights(tmp_path, lambda state: state[name].view(-1)[7:8].fill_(bad))
    with pytest.raises(WeightsError, match=rf"model\.safetensors: tensor '{name}'.*: weights from .*; allowed: finite"):
        ours(tmp_path, dtype, packed=packed)


@pytest.mark.parametrize(("kind", "byte"), [("Q4_0", 1), ("Q4_1", 3), ("Q5_1", 1), ("Q4_K", 3), ("Q6_K", 209)])
def test_blocks_with_a_scale_that_is_not_finite_are_known(kind: str, byte: int) -> None:
    form = FORMATS[kind]
    data = np.full((12, form.row_bytes), 0xFF, np.uint8)  # numbers, of which any bits are finite
    for half in form.halves:
        data[:, half : half + 2] = 0
    data[7, byte] = 0x7B  # float16's largest numbers
    stored = QuantizedRows(kind, data.reshape(4, -1), (4, 3 * form.columns))
    assert has_finite_scales(stored)
    data[7, byte] = 0xFC
    assert not has_finite_scales(stored)


@pytest.mark.parametrize("error", [None, OutOfReachError("weights", got="not finite")])
def test_weights_on_a_gpu_are_looked_at_when_the_load_is_over(
    error: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking each as it comes would wait for the GPU."""
    save_checkpoint(tmp_path, config_of("llama"))
    change_weights(tmp_path, lambda state: state[Q_PROJ].view(-1)[7:8].fill_(math.nan))
    location, config = ModelLocation("hf", tmp_path, "m"), load_config(ModelLocation("hf", tmp_path, "m"))
    monkeypatch.setattr(checkpoint.ModelParts, "_is_read_later", lambda self, kind: True)

    def load() -> None:
        with open_parts(location, config, LoadOptions(dtype=torch.bfloat16, device=CPU)) as parts:
            parts.matrix(0, "qkv")
            parts.check_read()
            parts.matrix(1, "qkv")
            if error is not None:
                raise error

    with pytest.raises(WeightsError, match=f"tensor '{Q_PROJ}'"):
        load()


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-8b"])
def test_dummy_weights_depend_on_the_seed_alone(name: str) -> None:
    first, again, other = dummy(name), dummy(name), dummy(name, seed=1)
    assert isinstance(first.weights.layers[1].qkv, Tensor)
    for part in ("qkv", "o", "gate_up", "down", "input_norm"):
        assert torch.equal(getattr(first.weights.layers[1], part), getattr(again.weights.layers[1], part))
    assert not torch.equal(first.weights.norm, other.weights.norm)
    logits = first.forward(Batch.prefill([(0, [1, 2, 3], 0)], CPU), first.new_cache(num_slots=1, capacity=8))
    assert logits.isfinite().all()


def test_a_checkpoint_can_lend_its_shape_to_dummy_weights(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of("llama"))
    location = ModelLocation("hf", tmp_path, "tiny")
    model = load_model(
        location,
        load_config(location),
        LoadOptions(dtype=torch.float32, device=CPU, load_format="dummy", max_model_len=32),
    )
    assert not torch.equal(our_logits(model, tokens(5), [5]), our_logits(ours(tmp_path), tokens(5), [5]))


def test_what_can_not_be_loaded_is_refused(tmp_path: Path) -> None:
    location = ModelLocation("builtin", None, "llama-3.2-1b")
    config = load_config(location)
    with pytest.raises(InvalidArgumentError, match='Add load_format="dummy"'):
        load_model(location, config, LoadOptions(dtype=torch.float32, device=CPU))
    with pytest.raises(InvalidArgumentError, match="load_format: 'pickle'; allowed: auto, dummy"):
        load_model(location, config, LoadOptions(dtype=torch.float32, device=CPU, load_format="pickle"))
    with pytest.raises(UnsupportedError, match=r"packed weights: torch\.bfloat16 on cpu"):
        load_model(location, config, LoadOptions(dtype=torch.bfloat16, device=CPU), packed=True)
    with pytest.raises(UnsupportedError, match=r"dtype of the weights: torch\.float64"):
        load_model(location, config, LoadOptions(dtype=torch.float64, device=CPU))
    options = LoadOptions(dtype=torch.bfloat16, device=torch.device("cuda"), load_format="dummy")
    with pytest.raises(UnsupportedError, match=r"head_dim: 20; allowed: multiples of 8 from 8 to 256 on a GPU"):
        load_model(location, replace(config, head_dim=20), options)


def test_progress_goes_to_stderr_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(tmp_path, config_of("llama"))
    location = ModelLocation("hf", tmp_path, "tiny")
    config = load_config(location)
    capfd.readouterr()
    load_model(location, config, LoadOptions(dtype=torch.float32, device=CPU, progress=True, max_model_len=32))
    assert capfd.readouterr().out == ""
    load_model(location, config, LoadOptions(dtype=torch.float32, device=CPU, max_model_len=32))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_expected_names_and_shapes_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    options = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    save_checkpoint(tmp_path, config_of(family, **options))
    config = load_config(ModelLocation("hf", tmp_path, "tiny"))
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert expected_shapes(config, HF) == stored
    assert sorted(expected_shapes(config, GGUF).values()) == sorted(stored.values())


@pytest.mark.parametrize(("dtype", "packed"), [(torch.float32, True), (torch.float32, False), (torch.bfloat16, False)])
def test_weights_that_take_more_memory_than_there_is_are_refused_before_they_are_made(
    dtype: torch.dtype, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = ModelLocation("builtin", None, "llama-3.2-1b")
    config = replace(load_config(location), num_layers=1, layer_windows=(None,))
    wanted = sum(math.prod(shape) for shape in expected_shapes(config, HF).values()) * dtype.itemsize
    made: list[str] = []
    monkeypatch.setattr(DummyStore, "load", lambda store, name: made.append(name))
    monkeypatch.setattr(checkpoint, "available_bytes", lambda: wanted - 1)
    says = rf"weights of llama-3.2-1b: at least {wanted / 2**30:.1f} GiB on a CPU with .* left. Use a smaller model"
    with pytest.raises(CapacityError, match=says):
        load_model(location, config, LoadOptions(dtype=dtype, device=CPU, load_format="dummy"), packed=packed)
    assert not made
