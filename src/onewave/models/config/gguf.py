"""ModelConfig from the metadata of a GGUF file. Key names: gguf-py's `gguf.constants.Keys`."""

import math
from collections.abc import Mapping, Sequence
from typing import cast

from onewave.base.errors import UnsupportedError
from onewave.models.config.fields import Fields
from onewave.models.config.model_config import MAX_HEAD_DIM, ModelConfig, RopeConfig
from onewave.models.registry import FAMILIES
from onewave.weights.formats.adapter import adapter_error

ROPE_DIVISORS = "rope_freqs.weight"
_ROPE_KINDS = ("none", "linear", "yarn")
_DEFAULT_THETA = 10_000.0
_MAX_LAYERS = 10_000
# Keys of llama.cpp that would change a result and that these families do not have, and the values that change none.
_FOREIGN: dict[str, tuple[object, ...]] = {
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.shared_kv_layers": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "attention.temperature_scale": (0,),
    "attention.temperature_length": (0,),
    "rope.scaling.yarn_attn_factor": (1,),
}
_FOREIGN_TENSORS = ("rope_factors_long.weight", "rope_factors_short.weight")


def from_gguf(
    metadata: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    rope_divisors: Sequence[float] | None = None,
    source: str = "GGUF metadata",
) -> ModelConfig:
    """Describe the model of a GGUF file.

    shapes: shape of each tensor by its GGUF name, in torch's order; says which biases there are and whether the head is
    tied. rope_divisors: the values of `rope_freqs.weight`, float [rotary_dim / 2], if the file has it.
    source: the file's name for messages. Raises ConfigError naming file and key; UnsupportedError for an architecture,
    RoPE scaling or feature that this build does not know.
    """
    general = Fields(metadata, source)
    if general.text("general.type") == "adapter":
        raise adapter_error(source)
    name, prefix = _family(general)
    fields = Fields(
        {key.removeprefix(prefix): _uniform(value) for key, value in metadata.items() if key.startswith(prefix)},
        source,
        prefix,
    )
    _refuse_unsupported(fields, shapes)
    hidden_size = fields.integer("embedding_length")
    num_layers = fields.integer("block_count", maximum=_MAX_LAYERS)
    num_heads = fields.integer("attention.head_count")
    num_kv_heads = fields.optional_integer("attention.head_count_kv") or num_heads
    if num_heads % num_kv_heads:
        raise fields.refuse("attention.head_count_kv", f"a divisor of attention.head_count={num_heads}")
    head_dim = _head_dim(fields, hidden_size, num_heads)
    max_position = fields.integer("context_length")
    vocab_size = _vocab_size(general, fields, shapes)
    return ModelConfig(
        family=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        max_position=max_position,
        rope=_rope(fields, head_dim, max_position, rope_divisors),
        tie_word_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        qk_norm=FAMILIES[name].qk_norm,
        layer_windows=_layer_windows(fields, num_layers),
        dtype=_dtype(general),
        bos_token_id=next(iter(general.token_ids("tokenizer.ggml.bos_token_id", below=vocab_size)), None),
        eos_token_ids=_eos_token_ids(general, vocab_size),
    )


def _family(general: Fields) -> tuple[str, str]:
    """Return (family, prefix of its keys)."""
    allowed = {family.model_type: name for name, family in FAMILIES.items() if family.in_gguf}
    architecture = general.text("general.architecture")
    if architecture is None:
        raise general.refuse("general.architecture", ", ".join(allowed))
    if architecture not in allowed:
        raise general.unsupported("general.architecture", architecture, ", ".join(allowed))
    return allowed[architecture], f"{architecture}."


def _uniform(value: object) -> object:
    """A per-layer list that repeats one value stands for that value."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    if items and all(item == items[0] and type(item) is type(items[0]) for item in items):
        return items[0]
    return cast("object", value)


def _refuse_unsupported(fields: Fields, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if fields.optional_integer("expert_count", minimum=0):
        raise UnsupportedError(
            f"{fields.source}: {fields.prefix}expert_count", got="a mixture of experts", allowed="none"
        )
    for key, neutral in _FOREIGN.items():
        if fields.values.get(key) not in (None, *neutral):
            raise fields.unsupported(key, fields.values[key], "no such key")
    for tensor in _FOREIGN_TENSORS:
        if tensor in shapes:
            raise UnsupportedError(f"{fields.source}: tensor {tensor}", got="longrope", allowed=", ".join(_ROPE_KINDS))


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    head_dim = fields.optional_integer("attention.key_length")
    if head_dim is None:
        if hidden_size % num_heads:
            allowed = f"a multiple of attention.head_count={num_heads} where attention.key_length is absent"
            raise fields.refuse("embedding_length", allowed)
        head_dim = hidden_size // num_heads
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        allowed = f"an even number up to {MAX_HEAD_DIM}"
        raise fields.error("attention.key_length", got=str(head_dim), allowed=allowed)
    if (fields.optional_integer("attention.value_length") or head_dim) != head_dim:
        raise fields.unsupported(
            "attention.value_length", fields.values["attention.value_length"], f"the length of a key, {head_dim}"
        )
    return head_dim


def _vocab_size(general: Fields, fields: Fields, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """As llama.cpp: one row per token of the tokenizer; files without one say it, or their embedding does."""
    tokens = general.items("tokenizer.ggml.tokens")
    if tokens:
        return len(tokens)
    if fields.has("vocab_size"):
        return fields.integer("vocab_size")
    embedding = shapes.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise fields.refuse("vocab_size", "a whole number, or a tokenizer, or a 2-D token_embd.weight")
    return embedding[0]


def _dtype(general: Fields) -> str:
    """Map the file type (llama.cpp's enum llama_ftype) to the dtype that loses nothing.

    Quantised files come from bfloat16 checkpoints of these families and hold float16 scales; bfloat16 can't overflow.
    """
    file_type = general.optional_integer("general.file_type", minimum=0)
    return {0: "float32", 1: "float16"}.get(-1 if file_type is None else file_type, "bfloat16")


def _eos_token_ids(general: Fields, vocab_size: int) -> tuple[int, ...]:
    """Return the end-of-sequence ids that exist: converters write -1 or 2^32 - 1 for "none"."""
    keys = (f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(token for key in keys for token in general.token_ids(key, below=vocab_size)))


def _layer_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    window = fields.optional_integer("attention.sliding_window", minimum=0) or None
    key = "attention.sliding_window_pattern"
    pattern = fields.values.get(key)
    if window is None or pattern is None:
        return (window,) * num_layers
    slides = cast("list[object]", pattern) if isinstance(pattern, list) else [pattern] * num_layers
    if not all(isinstance(each, bool) for each in slides):
        raise fields.unsupported(key, cast("object", pattern), "true or false for each layer")
    if len(slides) != num_layers:
        raise fields.error(key, got=f"{len(slides)} entries", allowed=f"block_count={num_layers} of them")
    return tuple(window if each else None for each in slides)


def _rope(fields: Fields, head_dim: int, max_position: int, divisors: Sequence[float] | None) -> RopeConfig:
    rotary_dim = fields.optional_integer("rope.dimension_count") or head_dim
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise fields.refuse("rope.dimension_count", f"an even number up to head_dim={head_dim}")
    theta = fields.optional_number("rope.freq_base", above=1.0) or _DEFAULT_THETA
    checked = None if divisors is None else _checked_divisors(fields, divisors, rotary_dim)
    # Files written before there was a type say `scale_linear`; one without any type is linear.
    key = "rope.scaling.factor" if fields.has("rope.scaling.factor") else "rope.scale_linear"
    factor = fields.optional_number(key, above=-1e-30) or 1.0
    kind = fields.text("rope.scaling.type") or "linear"
    if kind not in _ROPE_KINDS:
        raise fields.unsupported("rope.scaling.type", kind, ", ".join(_ROPE_KINDS))
    _refuse_foreign_scaling(fields, kind)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeConfig(kind="default", theta=theta, rotary_dim=rotary_dim, factor_divisors=checked)
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, rotary_dim=rotary_dim, factor=factor, factor_divisors=checked)
    if fields.optional_number("rope.scaling.yarn_log_multiplier", above=-1e30):
        raise UnsupportedError(
            f"{fields.source}: {fields.prefix}rope.scaling.yarn_log_multiplier", got="set", allowed="no such key"
        )
    # llama.cpp scales cos and sin by attn_factor * (1 + 0.1 ln factor).
    scale = fields.optional_number("rope.scaling.attn_factor")
    return RopeConfig(
        kind="yarn",
        theta=theta,
        rotary_dim=rotary_dim,
        factor=factor,
        original_max_position=fields.optional_integer("rope.scaling.original_context_length") or max_position,
        beta_fast=fields.optional_number("rope.scaling.yarn_beta_fast") or 32.0,
        beta_slow=fields.optional_number("rope.scaling.yarn_beta_slow") or 1.0,
        attention_factor=None if scale is None else scale * (1.0 + 0.1 * math.log(max(factor, 1.0))),
        factor_divisors=checked,
    )


def _refuse_foreign_scaling(fields: Fields, kind: str) -> None:
    """llama.cpp scales cos and sin by attn_factor and mixes YaRN's frequencies in by yarn_ext_factor (-1: 1 for YaRN,
    0 otherwise), whatever the type; for us both belong to YaRN, and the latter is its default."""
    neutral: dict[str, tuple[int, ...]] = {"rope.scaling.yarn_ext_factor": (-1, 1 if kind == "yarn" else 0)}
    if kind != "yarn":
        neutral["rope.scaling.attn_factor"] = (1,)
    for key, values in neutral.items():
        given = fields.optional_number(key, above=-1e30)
        if given is not None and given not in values:
            allowed = f"{values[-1]} where rope.scaling.type is {kind}"
            raise fields.unsupported(key, given, allowed)


def _checked_divisors(fields: Fields, divisors: Sequence[float], rotary_dim: int) -> tuple[float, ...]:
    values = tuple(float(value) for value in divisors)
    if len(values) != rotary_dim // 2 or not all(0 < value < math.inf for value in values):
        whole = Fields({}, fields.source)
        raise whole.error(ROPE_DIVISORS, got=f"{len(values)} values", allowed=f"{rotary_dim // 2} positive numbers")
    return values
