"""Tiny models and filled caches on a GPU."""

from dataclasses import replace

import torch
from torch import Tensor

from kit.operands.on_gpu import GPU
from onewave.memory.kv_cache import KVCache
from onewave.models.llama import LayerWeights, Llama, LlamaWeights

CAPACITY = 8448  # whole pages of any size, and longer than any context here


def on_gpu(model: Llama, dtype: torch.dtype = torch.bfloat16) -> Llama:
    return on(model, GPU, dtype)


def on(model: Llama, device: torch.device, dtype: torch.dtype) -> Llama:
    def move(value: object) -> object:
        return value.to(device, dtype) if isinstance(value, Tensor) else value

    layers = tuple(LayerWeights(**{k: move(v) for k, v in vars(layer).items()}) for layer in model.weights.layers)
    w = model.weights
    return Llama(
        replace(model.config, max_position=CAPACITY),
        LlamaWeights(move(w.embedding), layers, move(w.norm), move(w.head)),
        max_model_len=CAPACITY,
    )


def filled(model: Llama, slots: int) -> KVCache:
    kv = model.new_cache(num_slots=slots, capacity=CAPACITY)
    dice = torch.Generator("cuda").manual_seed(5)
    kv.k.normal_(generator=dice)
    kv.v.normal_(generator=dice)
    return kv


def copied(model: Llama, kv: KVCache) -> KVCache:
    found = model.new_cache(num_slots=kv.num_slots, capacity=kv.capacity)
    found.k.copy_(kv.k)
    found.v.copy_(kv.v)
    return found
