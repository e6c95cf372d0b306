"""The model families, one row each: what their checkpoints are called and which parts of the decoder they have."""

from dataclasses import dataclass
from enum import Enum


class QKVBias(Enum):
    """Which attention projections carry a bias."""

    NONE = "none"
    ALWAYS = "on q, k and v, always"
    CONFIGURED = "on q, k, v and o where the config says attention_bias"


class Windows(Enum):
    """Which layers attend through a sliding window."""

    NONE = "none"
    EVERY_LAYER = "every layer, when sliding_window is set"
    BY_LAYER = "those that layer_types names, or from max_window_layers on, when use_sliding_window is set"


@dataclass(frozen=True)
class Family:
    """The properties that set one family apart.

    model_type: as config.json calls it. in_gguf: GGUF metadata calls it so too; Mistral's files say "llama".
    head_dim: when config.json has none; None means hidden_size / num_attention_heads. full_kv_heads: a config without
    num_key_value_heads means one per query head (Llama 1 and 2).
    interleaved_gguf: GGUF files hold q and k rows with the two halves of a rotary pair side by side.
    """

    model_type: str
    qkv_bias: QKVBias
    windows: Windows
    in_gguf: bool = True
    mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    full_kv_heads: bool = False
    interleaved_gguf: bool = False

    @property
    def architecture(self) -> str:
        """The model with its head, as config.json calls it."""
        return f"{self.model_type.capitalize()}ForCausalLM"


# TinyLlama and SmolLM2 are Llama in all but their numbers.
FAMILIES: dict[str, Family] = {
    "llama": Family(
        model_type="llama",
        qkv_bias=QKVBias.CONFIGURED,
        windows=Windows.NONE,
        mlp_bias=True,
        full_kv_heads=True,
        interleaved_gguf=True,
    ),
    "mistral": Family(
        model_type="mistral",
        in_gguf=False,
        qkv_bias=QKVBias.NONE,
        windows=Windows.EVERY_LAYER,
    ),
    "qwen2": Family(
        model_type="qwen2",
        qkv_bias=QKVBias.ALWAYS,
        windows=Windows.BY_LAYER,
    ),
    "qwen3": Family(
        model_type="qwen3",
        qkv_bias=QKVBias.CONFIGURED,
        windows=Windows.BY_LAYER,
        qk_norm=True,
        head_dim=128,
    ),
}
