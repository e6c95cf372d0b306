"""A decode step in PyTorch's own operators under torch.compile: what one gets without this library.

Everything has its place: a static cache whose keys are all seen, and sequences of one length, so that nothing is
masked and torch.compile meets one graph of fixed shapes. Weights and angles are the model's; each layer's keys and
values are tensors of their own, which the compiler writes in place (of a layer of one large tensor it makes a copy a
step). Kernels are tuned by coordinate descent. The residual stream has the model's dtype, as in most PyTorch code.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from onewave.memory.kv_cache import KVCache
from onewave.models.llama import LayerWeights, Llama, plain
from onewave.ops.append_kv.reference import rotate


def compiled_step(
    model: Llama, kv: KVCache, context: int, *, backend: str = "inductor"
) -> Callable[[Tensor, Tensor], Tensor]:
    """One step of as many sequences as the cache has slots, compiled at its first call.

    kv: holds the `context` tokens of each sequence, which are copied. backend: torch.compile's. Returns a function of
    tokens and positions, int64 [slots], the positions all `context`; it gives float32 logits [slots, vocab]. Raises
    UnsupportedError for weights that are no plain tensors.
    """
    config, weights = model.config, model.weights
    embedding, head = _plain(weights.embedding), _plain(weights.head)
    layers = [(each, *map(_plain, (each.qkv, each.o, each.gate_up, each.down))) for each in weights.layers]
    rotary = model.rotary.rows(kv.capacity)
    norm_size, eps = (config.hidden_size,), config.rms_norm_eps
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    caches = [[layer[:, :, : context + 1].clone() for layer in both] for both in zip(kv.k, kv.v, strict=True)]

    def attend(projected: Tensor, layer: LayerWeights, index: int, angles: Tensor, positions: Tensor) -> Tensor:
        q, k, v = torch.split(projected.view(len(projected), -1, dim), [heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None:
            q, k = F.rms_norm(q, (dim,), layer.q_norm, eps), F.rms_norm(k, (dim,), layer.k_norm, eps)
        keys, values = caches[index]
        keys.index_copy_(2, positions[:1], rotate(k, angles)[:, :, None])
        values.index_copy_(2, positions[:1], v[:, :, None])
        window = config.layer_windows[index]
        first = 0 if window is None else max(0, context + 1 - window)
        attended = F.scaled_dot_product_attention(
            rotate(q, angles)[:, :, None], keys[:, :, first:], values[:, :, first:], enable_gqa=heads != kv_heads
        )
        return attended.flatten(1)

    def step(tokens: Tensor, positions: Tensor) -> Tensor:
        x = F.embedding(tokens, embedding)
        angles = rotary[positions]
        for index, (layer, qkv, o, gate_up, down) in enumerate(layers):
            projected = F.linear(F.rms_norm(x, norm_size, layer.input_norm, eps), qkv, layer.qkv_bias)
            x = x + F.linear(attend(projected, layer, index, angles, positions), o, layer.o_bias)
            normed = F.rms_norm(x, norm_size, layer.post_norm, eps)
            gate, up = F.linear(normed, gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, down, layer.down_bias)
        return F.linear(F.rms_norm(x, norm_size, weights.norm, eps), head).float()

    # Each call here is about another graph; PyTorch would take them for one that keeps changing, and give up on it.
    torch.compiler.reset()
    options: dict[str, str | int | bool | Callable[..., object]] = {}
    if backend == "inductor":
        options["coordinate_descent_tuning"] = True
    return torch.compile(step, fullgraph=True, dynamic=False, backend=backend, options=options or None)  # pyright: ignore[reportUnknownMemberType]


def _plain(matrix: object) -> Tensor:
    return plain(matrix, "torch.compile's step")
