"""Tiny GGUF files and the HF checkpoint of the very same dequantised weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of an HF tensor."""
    stem, kind = name.rsplit(".", 1)
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}.{kind}"


def interleave(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Reorder q or k rows as llama.cpp's converter does for the llama architecture."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def metadata_of(architecture: str, config: Any) -> dict[str, Any]:
    """Return the metadata that llama.cpp's converter writes for a transformers config without RoPE scaling."""
    return {
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.key_length": config.head_dim,
        f"{architecture}.attention.value_length": config.head_dim,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{architecture}.rope.freq_base": config.rope_parameters["rope_theta"],
        f"{architecture}.vocab_size": config.vocab_size,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_gguf(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[NDArray[np.float32], str]]
) -> dict[str, NDArray[np.float32]]:
    """Write (values, type name) tensors; return the values that the file really holds. Of K-quants only the size of
    the values counts."""
    import gguf  # not on every machine that collects these tests

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_uint32(key, value)
    held: dict[str, NDArray[np.float32]] = {}
    for name, (values, type_name) in tensors.items():
        kind = gguf.GGMLQuantizationType[type_name]
        data = k_blocks(values, type_name) if type_name.endswith("_K") else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        held[name] = gguf.quants.dequantize(data, kind).reshape(values.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def k_blocks(values: NDArray[np.float32], type_name: str) -> NDArray[np.uint8]:
    """Random blocks of a K-quant, of numbers about as large as the values: uint8 [rows, bytes of a row]."""
    size, scale_at, range_ = {"Q4_K": (144, 0, 480), "Q5_K": (176, 0, 960), "Q6_K": (210, 208, 2000)}[type_name]
    dice = np.random.default_rng(values.size)
    blocks = dice.integers(0, 256, (values.size // 256, size), dtype=np.uint8)
    scales = (dice.uniform(0.5, 1, len(blocks)) * values.std() * 1.5 / range_).astype(np.float16)
    blocks[:, scale_at : scale_at + 2] = scales[:, None].view(np.uint8)
    if type_name != "Q6_K":
        minima = (scales.astype(np.float32) * dice.choice([0, 7, 15], len(blocks))).astype(np.float16)
        blocks[:, 2:4] = minima[:, None].view(np.uint8)
    return blocks.reshape(len(values), -1)


def convert(
    checkpoint: Path,
    path: Path,
    architecture: str,
    config: Any,
    types: Mapping[str, str],
    extra: Mapping[str, Any] | None = None,
    divisors: NDArray[np.float32] | None = None,
) -> None:
    """Write a saved checkpoint as a GGUF, then replace the checkpoint's weights by what the GGUF holds.

    types: GGUF type by the last part of a module's name ("q_proj"); "default" for other matrices. Vectors are F32.
    """
    state = {name: tensor.float().numpy() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors: dict[str, tuple[NDArray[np.float32], str]] = {}
    for name, values in state.items():
        module = name.split(".")[-2]
        if architecture == "llama" and module in heads:
            values = interleave(values, heads[module])
        kind = types.get(module, types["default"]) if values.ndim == 2 else "F32"
        tensors[gguf_name(name)] = (values, kind)
    if divisors is not None:
        tensors["rope_freqs.weight"] = (divisors, "F32")
    held = write_gguf(path, architecture, metadata_of(architecture, config) | dict(extra or {}), tensors)
    for name in state:
        values, module = held[gguf_name(name)], name.split(".")[-2]
        if architecture == "llama" and module in heads:
            pairs = values.reshape(heads[module], -1, 2, *values.shape[1:])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        state[name] = np.ascontiguousarray(values)
    save_file({name: torch.from_numpy(values) for name, values in state.items()}, checkpoint / "model.safetensors")
