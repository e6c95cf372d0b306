"""SmolLM2-135M-Instruct beside transformers: prompts, and its model on the weights that the file stands for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onewave import SamplingParams

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "Q: What is the boiling point of water?\nA:",
    "Die Hauptstadt von Deutschland",
    "1, 1, 2, 3, 5, 8,",
    "The three laws of motion are",
    "Dear Sir or Madam,",
    "In 1969, Neil Armstrong",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
]
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


def transformers_model(path: Path) -> Any:
    """transformers' Llama, in float32, with the file's weights as the gguf library dequantises them.

    Put together here because transformers' own GGUF loader wants accelerate; shares nothing with our loader.
    """
    gguf: Any = pytest.importorskip("gguf")
    transformers: Any = pytest.importorskip("transformers")
    reader = gguf.GGUFReader(path)

    def value(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    heads, kv_heads = value("attention.head_count"), value("attention.head_count_kv")
    config = transformers.LlamaConfig(
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].data),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        tie_word_embeddings="output.weight" not in tensors,
    )

    def weight(name: str, num_heads: int | None = None) -> torch.Tensor:
        tensor = tensors[name]
        loaded = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        if num_heads is None:
            return loaded
        # GGUF interleaves the two halves that rotate together.
        return loaded.view(num_heads, -1, 2, loaded.shape[-1]).transpose(1, 2).reshape(loaded.shape)

    state = {
        "model.embed_tokens.weight": weight("token_embd.weight"),
        "model.norm.weight": weight("output_norm.weight"),
    }
    state["lm_head.weight"] = (
        weight("output.weight") if "output.weight" in tensors else state["model.embed_tokens.weight"]
    )
    names = {
        "input_layernorm": ("attn_norm", None),
        "self_attn.q_proj": ("attn_q", heads),
        "self_attn.k_proj": ("attn_k", kv_heads),
        "self_attn.v_proj": ("attn_v", None),
        "self_attn.o_proj": ("attn_output", None),
        "post_attention_layernorm": ("ffn_norm", None),
        "mlp.gate_proj": ("ffn_gate", None),
        "mlp.up_proj": ("ffn_up", None),
        "mlp.down_proj": ("ffn_down", None),
    }
    for layer in range(config.num_hidden_layers):
        for theirs, (ours, num_heads) in names.items():
            state[f"model.layers.{layer}.{theirs}.weight"] = weight(f"blk.{layer}.{ours}.weight", num_heads)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its angles are no weights and are still "meta"
    return model.eval()
