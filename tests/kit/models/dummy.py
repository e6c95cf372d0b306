"""Tiny Llamas whose weights are made up: their config.json, and LLMs of them."""

import json
from pathlib import Path
from typing import Any

from onewave.engine.llm import LLM

CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 96, "rms_norm_eps": 1e-5, "eos_token_id": 2,
}  # fmt: skip
ON_GPU: dict[str, Any] = {
    "vocab_size": 3001, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "torch_dtype": "bfloat16",
}  # fmt: skip
"""Changes that make CONFIG large enough for every path of a GPU."""


def write_config(directory: Path, **changes: Any) -> Path:
    """Write CONFIG with changes, and without what is changed to None, into a directory; return the directory."""
    config = {name: value for name, value in (CONFIG | changes).items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def dummy_llm(directory: Path, **options: Any) -> LLM:
    """Load CONFIG, written into a directory, on the CPU."""
    return LLM(write_config(directory), device="cpu", load_format="dummy", **options)
