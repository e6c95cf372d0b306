"""A tiny checkpoint with a tokenizer and a chat template, and the command line run in this process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from onewave.cli import main

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 257,
    "torch_dtype": "float32",
}
TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"


def weights() -> dict[str, np.ndarray]:
    """Random tensors of CONFIG's shapes."""
    rng = np.random.default_rng(0)
    hidden, inner, kv = 32, 48, 16
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (260, hidden), "model.norm.weight": (hidden,)}
    for layer in range(2):
        name = f"model.layers.{layer}."
        shapes |= {
            f"{name}input_layernorm.weight": (hidden,),
            f"{name}post_attention_layernorm.weight": (hidden,),
            f"{name}self_attn.q_proj.weight": (hidden, hidden),
            f"{name}self_attn.k_proj.weight": (kv, hidden),
            f"{name}self_attn.v_proj.weight": (kv, hidden),
            f"{name}self_attn.o_proj.weight": (hidden, hidden),
            f"{name}mlp.gate_proj.weight": (inner, hidden),
            f"{name}mlp.up_proj.weight": (inner, hidden),
            f"{name}mlp.down_proj.weight": (hidden, inner),
        }
    made = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    return {name: np.ones_like(value) if "norm" in name else value for name, value in made.items()}


def write_tokenizer(directory: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|pad|>", "<|eos|>", "<|user|>", "<|bot|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|eos|>", "chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two layers with a byte-level tokenizer."""
    directory = tmp_path_factory.mktemp("tiny-llama")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights(), directory / "model.safetensors")
    write_tokenizer(directory)
    return directory


@pytest.fixture
def own_model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@dataclass(frozen=True)
class Done:
    """What a command line left: exit status and both streams."""

    status: int
    out: str
    err: str

    def error(self) -> str:
        """The one line of a bad input; checks that it is one, with nothing else said."""
        assert self.status == 2, self
        assert self.out == "", self
        assert self.err.endswith("\n"), self
        assert len(self.err.splitlines()) == 1, self
        assert self.err.startswith("error: "), self
        return self.err.strip()


Onewave = Callable[..., Done]


@pytest.fixture
def onewave(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Onewave:
    """Run a command line in this process, with a cache of its own unless the test sets one."""
    monkeypatch.setenv("ONEWAVE_CACHE", str(tmp_path / "cache"))

    def call(*arguments: Any) -> Done:
        capsys.readouterr()
        status = main.run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Done(status, captured.out, captured.err)

    return call
