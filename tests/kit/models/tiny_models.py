"""Tiny random checkpoints made with transformers, and its logits as the oracle."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from onewave.engine.load.checkpoint import load_model
from onewave.engine.load.options import LoadOptions
from onewave.models.batch import Batch
from onewave.models.config.read import load_config
from onewave.models.llama import Llama
from onewave.weights.fetch.sources import ModelLocation

CPU = torch.device("cpu")
CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
VOCAB = 131
# Contexts shorter than the prompts of the tests, so that every RoPE kind has something to do.
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 12,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0},
}
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 144,
    "intermediate_size": 172,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 80,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def config_of(family: str, rope: str = "default", **options: Any) -> Any:
    """Build a tiny transformers config with one RoPE of ROPES; `options` override the sizes."""
    return CONFIGS[family](**_SIZES | {"rope_parameters": {"rope_theta": 500.0} | ROPES[rope]} | options)


def save_checkpoint(directory: Path, config: Any, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
    """Save a random model. Norm weights and biases are random too: transformers starts them at one and zero."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.3 * spread if "norm" in name else (0.3 if "bias" in name else 0.08) * spread)
    model.to(dtype).save_pretrained(directory)


def oracle(directory: Path, dtype: torch.dtype = torch.float32, attention: str = "eager") -> PreTrainedModel:
    """Load a checkpoint with transformers."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=attention).eval()


def ours(
    path: Path,
    dtype: torch.dtype = torch.float32,
    *,
    packed: bool = False,
    scaled: bool = False,
    device: torch.device = CPU,
) -> Llama:
    """Load a checkpoint with onewave: a GGUF file or a directory."""
    location = ModelLocation("hf" if path.is_dir() else "gguf", path, path.name)
    options = LoadOptions(dtype=dtype, device=device, max_model_len=64)
    return load_model(location, load_config(location), options, packed=packed, scaled=scaled)


@torch.inference_mode()
def oracle_logits(model: PreTrainedModel, token_ids: Sequence[int], chunks: Sequence[int]) -> Tensor:
    """Feed a sequence in chunks of these lengths through one cache; float32 [tokens, vocab]."""
    # Dynamic NTK remembers the longest sequence so far; each sequence here starts afresh.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    cache, rows, first = DynamicCache(config=model.config), [], 0
    for length in chunks:
        ids = torch.tensor([token_ids[first : first + length]])
        rows.append(model(ids, past_key_values=cache, use_cache=True).logits[0].float())
        first += length
    return torch.cat(rows)


def our_logits(model: Llama, token_ids: Sequence[int], chunks: Sequence[int], *, slot: int = 1) -> Tensor:
    """As oracle_logits, float32 on the CPU; a chunk of one token after the first is a decode step."""
    # Blocks in any order.
    kv = model.new_row_cache(num_slots=3, capacity=48)
    kv.block_table.copy_(kv.block_table.flip(0, 1))
    # Entries that were never written must never be read.
    for cache in (kv.k, kv.v):
        cache.fill_(torch.nan if cache.is_floating_point() else 127)
    rows, first = [], 0
    for length in chunks:
        ids = token_ids[first : first + length]
        if first and length == 1:
            batch = Batch.decode(*torch.tensor([ids, [first], [slot]], device=model.device))
        else:
            batch = Batch.prefill([(slot, ids, first)], model.device)
        each: list[Tensor] = []
        last = model.forward(batch, kv, each=lambda _, logits, each=each: each.append(logits))
        rows += [logits.cpu() for logits in each or [last]]
        first += length
    return torch.cat(rows)


def tokens(length: int, seed: int = 0) -> list[int]:
    """Return random token ids."""
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Return max |out - reference| / max |reference|; infinite where something is not a number."""
    error = ((out - reference).abs().max() / reference.abs().max()).item()
    return error if error == error else float("inf")
