"""Tiny random decoders of 16-bit weights, built without a checkpoint, and the same in float32."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kit.operands.random import randn
from onewave.engine.load.options import LoadOptions
from onewave.models.batch import Batch
from onewave.models.config.model_config import ModelConfig, RopeConfig
from onewave.models.llama import LayerWeights, Llama, LlamaWeights
from onewave.weights.fetch.sources import ModelLocation

BASE = ModelConfig(
    family="llama",
    vocab_size=131,
    hidden_size=128,
    intermediate_size=192,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rms_norm_eps=1e-5,
    max_position=8240,
    rope=RopeConfig("default", 500.0, 32),
    tie_word_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    layer_windows=(None, None),
    dtype="float16",
    bos_token_id=1,
    eos_token_ids=(2,),
)

LOCATION = ModelLocation("builtin", None, "tiny")
DUMMY = LoadOptions(dtype=torch.float16, device=torch.device("cpu"), load_format="dummy", max_model_len=64)
"""How BASE and its like are loaded without files."""

STORED = {
    "own head": BASE,
    "tied tables": replace(BASE, tie_word_embeddings=True),
    "biases": replace(BASE, qkv_bias=True),
}
"""Models whose weights are stored differently."""

FAMILIES = {
    "llama": BASE,
    "seven heads a KV head, biases": replace(
        BASE, num_heads=7, num_kv_heads=1, head_dim=64, rope=RopeConfig("default", 500.0, 64), qkv_bias=True
    ),
    "norms of q and k": replace(BASE, qk_norm=True, num_heads=2),
    "a sliding window": replace(BASE, layer_windows=(7, None)),
    "head_dim 128": replace(BASE, num_heads=2, num_kv_heads=1, head_dim=128, rope=RopeConfig("default", 500.0, 128)),
}


def random_model(config: ModelConfig, dtype: torch.dtype = torch.float16) -> Llama:
    """Random weights, norm gains near one."""
    seeds = iter(range(1000))

    def matrix(rows: int, cols: int) -> Tensor:
        return (randn(rows, cols, seed=next(seeds)) * cols**-0.5).to(dtype)

    def gain(size: int) -> Tensor:
        return (1 + 0.3 * randn(size, seed=next(seeds))).to(dtype)

    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    qkv = (config.num_heads + 2 * config.num_kv_heads) * dim
    layers = tuple(
        LayerWeights(
            input_norm=gain(hidden),
            qkv=matrix(qkv, hidden),
            qkv_bias=randn(qkv, seed=next(seeds)).to(dtype) if config.qkv_bias else None,
            q_norm=gain(dim) if config.qk_norm else None,
            k_norm=gain(dim) if config.qk_norm else None,
            o=matrix(hidden, config.num_heads * dim),
            o_bias=None,
            post_norm=gain(hidden),
            gate_up=matrix(2 * inner, hidden),
            gate_up_bias=None,
            down=matrix(hidden, inner),
            down_bias=None,
        )
        for _ in range(config.num_layers)
    )
    weights = LlamaWeights(
        randn(config.vocab_size, hidden, seed=7).to(dtype), layers, gain(hidden), matrix(config.vocab_size, hidden)
    )
    return Llama(config, weights, max_model_len=config.max_position)


def in_float32(model: Llama) -> Llama:
    """The same weights, exact arithmetic next to theirs."""

    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) else value

    layers = tuple(LayerWeights(**{k: wide(v) for k, v in vars(layer).items()}) for layer in model.weights.layers)
    rest = [wide(t) for t in (model.weights.embedding, model.weights.norm, model.weights.head)]
    return Llama(model.config, LlamaWeights(rest[0], layers, rest[1], rest[2]), max_model_len=model.config.max_position)


def logits_of(model: Llama) -> list[Tensor]:
    """Logits of two prompts, with those of every token, and of a step after them; on the CPU."""
    kv = model.new_cache(num_slots=2, capacity=64)
    found: list[Tensor] = []
    for slot, prompt in enumerate(([5, 90, 3, 17, 44], [8])):
        batch = Batch.prefill([(slot, prompt, 0)], DUMMY.device)
        found.append(model.forward(batch, kv, each=lambda _, some: found.append(some)))
    return [*found, model.forward(Batch.decode(*torch.tensor([[7, 9], [5, 1], [0, 1]])), kv)]
