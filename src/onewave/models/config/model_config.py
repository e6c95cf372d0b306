"""One frozen description of a LLaMA-family model, read from an HF `config.json` or from GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_HEAD_DIM = 256
"""The largest head dimension that attention takes. All are even numbers; a GPU takes multiples of 8."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    kind: default | linear | dynamic | llama3 | yarn. theta: base. rotary_dim: leading head dimensions that rotate.
    original_max_position: context the model was trained on (llama3, yarn).
    factor_divisors: per-frequency divisors stored in a GGUF's `rope_freqs.weight`, or None.
    """

    kind: str
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factor_divisors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Shape and arithmetic of one model. Sizes are in elements.

    family: a key of `models.registry.FAMILIES`. layer_windows: sliding-window length of each layer, None where a layer
    attends to everything. dtype: the checkpoint's own compute dtype (bfloat16 | float16 | float32).
    bos_token_id and eos_token_ids come from generation_config.json when there is one.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def of_layers(self, num_layers: int) -> ModelConfig:
        """The model cut to its first layers."""
        return replace(self, num_layers=num_layers, layer_windows=self.layer_windows[:num_layers])
