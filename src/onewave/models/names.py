"""Tensor names of checkpoints, and the shape that each tensor must have."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from onewave.base.errors import WeightsError
from onewave.models.config.model_config import ModelConfig
from onewave.weights.store import WeightStore, quote


@dataclass(frozen=True)
class Layout:
    """The names of one kind of checkpoint.

    layers: prefix of a layer's tensors, before its number. parts: our name of a layer's tensor -> theirs after it.
    ignored: full names of tensors that carry nothing we need.
    """

    embedding: str
    norm: str
    head: str
    layers: str
    parts: Mapping[str, str]
    ignored: re.Pattern[str]

    def part(self, layer: int, part: str) -> str:
        """Return the checkpoint's name of one part of one layer."""
        return f"{self.layers}{layer}.{self.parts[part]}"


# Our name of a layer's tensor, Hugging Face's and GGUF's.
_PARTS = (
    ("input_norm", "input_layernorm", "attn_norm"),
    ("q", "self_attn.q_proj", "attn_q"),
    ("k", "self_attn.k_proj", "attn_k"),
    ("v", "self_attn.v_proj", "attn_v"),
    ("q_norm", "self_attn.q_norm", "attn_q_norm"),
    ("k_norm", "self_attn.k_norm", "attn_k_norm"),
    ("o", "self_attn.o_proj", "attn_output"),
    ("post_norm", "post_attention_layernorm", "ffn_norm"),
    ("gate", "mlp.gate_proj", "ffn_gate"),
    ("up", "mlp.up_proj", "ffn_up"),
    ("down", "mlp.down_proj", "ffn_down"),
)


def _parts(column: int) -> dict[str, str]:
    """Names of weights from a column of _PARTS, and beside every projection `{part}_bias`."""
    weights = {row[0]: f"{row[column]}.weight" for row in _PARTS}
    return weights | {f"{row[0]}_bias": f"{row[column]}.bias" for row in _PARTS if not row[0].endswith("norm")}


HF = Layout(
    embedding="model.embed_tokens.weight",
    norm="model.norm.weight",
    head="lm_head.weight",
    layers="model.layers.",
    parts=_parts(1),
    # Old Llama checkpoints store the frequencies that the config already gives.
    ignored=re.compile(r"(.+\.)?rotary_emb\.inv_freq"),
)
_BODY = re.compile(r"(.+\.|)layers\.0\.input_layernorm\.weight")
_HEAD = re.compile(r"(.+\.|)lm_head\.weight")

GGUF = Layout(
    embedding="token_embd.weight",
    norm="output_norm.weight",
    head="output.weight",
    layers="blk.",
    parts=_parts(2),
    # rope_freqs is part of the config; attn_rot_embd is what rotary_emb.inv_freq is above.
    ignored=re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?"),
)


def hf_layout(names: Iterable[str]) -> Layout:
    """HF with the prefixes that these tensors have.

    A base model was saved without "model." (Qwen3-Embedding, e5-mistral), a vision model's text half has
    "language_model.", a wrapped one "_orig_mod.", "module." or "base_model.model." before all of it. Of several bodies
    or heads none is chosen: the usual names are then what is missing.
    """
    found = list(names)
    layout = HF
    bodies = [match[1] for name in found if (match := _BODY.fullmatch(name))]
    heads = [name for name in found if _HEAD.fullmatch(name)]
    if len(bodies) == 1:
        body = bodies[0]
        norm, embedding = f"{body}norm.weight", f"{body}embed_tokens.weight"
        layout = replace(layout, embedding=embedding, norm=norm, layers=f"{body}layers.")
    return replace(layout, head=heads[0]) if len(heads) == 1 else layout


def layer_part_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a layer of this model has, by our name of the part."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_norm": (hidden,),
        "q": (q_rows, hidden),
        "k": (kv_rows, hidden),
        "v": (kv_rows, hidden),
        "o": (hidden, q_rows),
        "post_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    if config.qkv_bias:
        shapes |= {"q_bias": (q_rows,), "k_bias": (kv_rows,), "v_bias": (kv_rows,)}
    if config.o_bias:
        shapes |= {"o_bias": (hidden,)}
    if config.mlp_bias:
        shapes |= {"gate_bias": (inner,), "up_bias": (inner,), "down_bias": (hidden,)}
    if config.qk_norm:
        shapes |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
    return shapes


def expected_shapes(config: ModelConfig, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a checkpoint of this model must hold, by the checkpoint's name."""
    shapes: dict[str, tuple[int, ...]] = {
        layout.embedding: (config.vocab_size, config.hidden_size),
        layout.norm: (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes[layout.head] = shapes[layout.embedding]
    parts = layer_part_shapes(config)
    for layer in range(config.num_layers):
        shapes |= {layout.part(layer, part): shape for part, shape in parts.items()}
    return shapes


def check_tensors(store: WeightStore, config: ModelConfig, layout: Layout) -> None:
    """Raise WeightsError, naming file and tensor, unless the store holds what the config calls for and nothing else.

    A tied model may store its one table under either name, or under both.
    """
    expected = expected_shapes(config, layout)
    if config.tie_word_embeddings and layout.head in store.tensors:
        expected[layout.head] = expected[layout.embedding]
        if layout.embedding not in store.tensors:
            del expected[layout.embedding]
    missing = [name for name in expected if name not in store.tensors]
    if missing:
        raise WeightsError(
            store.description,
            got=f"has no tensor {quote(missing[0])}{_and_more(missing, 'nor')}",
            next="The config calls for it: the file is incomplete, or the config is of another model.",
        )
    others = [name for name in store.tensors if name not in expected and not layout.ignored.fullmatch(name)]
    # AutoGPTQ stores a bias of zeros beside every matrix.
    unexpected = [name for name in others if not (name.endswith(".bias") and not bool(store.load(name).double().any()))]
    if unexpected:
        raise WeightsError(
            str(store.tensors[unexpected[0]].file),
            got=f"has tensor {quote(unexpected[0])}{_and_more(unexpected, 'and')}, which the config does not call for",
            next="The config is of another model, or of a variant that is not supported.",
        )
    for name, shape in expected.items():
        tensor = store.tensors[name]
        if tensor.shape != shape:
            raise WeightsError(
                f"{tensor.file}: tensor {quote(name)}", got=f"shape {list(tensor.shape)}", allowed=str(list(shape))
            )


def _and_more(names: list[str], conjunction: str) -> str:
    return f" {conjunction} {len(names) - 1} more" if len(names) > 1 else ""
