"""ModelConfig from a Hugging Face `config.json`, as transformers 4 and 5 write it."""

from collections.abc import Mapping
from functools import partial

from onewave.base.errors import UnsupportedError
from onewave.models.config.fields import Fields, show
from onewave.models.config.model_config import MAX_HEAD_DIM, ModelConfig, RopeConfig
from onewave.models.config.quantization import read_scheme
from onewave.models.registry import FAMILIES, Family, QKVBias, Windows

DTYPES = ("bfloat16", "float16", "float32")
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_ACTIVATIONS = ("silu", "swish")
_MAX_LAYERS = 10_000
_DEFAULT_THETA = 10_000.0
_DEFAULT_WINDOW = 4096
_DEFAULT_FULL_LAYERS = 28  # transformers' max_window_layers of Qwen2 and Qwen3


def from_hf(
    config: Mapping[str, object],
    generation_config: Mapping[str, object] | None = None,
    *,
    source: str = "config.json",
    generation_source: str = "generation_config.json",
) -> ModelConfig:
    """Describe the model of a parsed config.json.

    generation_config: the parsed generation_config.json; its bos and eos ids count before config.json's.
    source, generation_source: the files' names for messages. What a family's transformers code ignores is ignored here,
    and what transformers assumes for an absent key is assumed here, except for sizes, which must be there.
    Raises ConfigError naming file and key; UnsupportedError for an architecture, RoPE type, activation, dtype or
    quantisation that this build does not know.
    """
    fields = Fields(config, source)
    name, family = _family(fields)
    _refuse_unsupported(fields)
    hidden_size = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers", maximum=_MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = _num_kv_heads(fields, family, num_heads)
    head_dim = _head_dim(fields, family, hidden_size, num_heads)
    max_position = fields.integer("max_position_embeddings")
    attention_bias = family.qkv_bias is QKVBias.CONFIGURED and fields.flag("attention_bias", default=False)
    bos, eos = _special_tokens(fields, Fields(generation_config or {}, generation_source))
    return ModelConfig(
        family=name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps"),
        max_position=max_position,
        rope=_rope(fields, head_dim, max_position),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        qkv_bias=attention_bias or family.qkv_bias is QKVBias.ALWAYS,
        o_bias=attention_bias,
        mlp_bias=family.mlp_bias and fields.flag("mlp_bias", default=False),
        qk_norm=family.qk_norm,
        layer_windows=_layer_windows(fields, family, num_layers),
        dtype=_dtype(fields),
        bos_token_id=bos,
        eos_token_ids=eos,
    )


def _family(fields: Fields) -> tuple[str, Family]:
    """Find the family by `architectures` (the model with its head, or the base model, whose head may be tied),
    or by `model_type` in a config that was saved without a model."""
    allowed = ", ".join(family.architecture for family in FAMILIES.values())
    architectures = fields.items("architectures") or []
    for architecture in architectures:
        for name, family in FAMILIES.items():
            if architecture in (family.architecture, family.architecture.replace("ForCausalLM", "Model")):
                return name, family
    if architectures:
        raise fields.unsupported("architecture", architectures[0], allowed)
    model_type = fields.text("model_type")
    if model_type is None:
        raise fields.refuse("architectures", allowed)
    for name, family in FAMILIES.items():
        if model_type == family.model_type:
            return name, family
    types = ", ".join(family.model_type for family in FAMILIES.values())
    raise fields.unsupported("model_type", model_type, types)


def _refuse_unsupported(fields: Fields) -> None:
    activation = fields.text("hidden_act")
    if activation is not None and activation not in _ACTIVATIONS:
        raise fields.unsupported("hidden_act", activation, ", ".join(_ACTIVATIONS))
    # From transformers 5.2 on it makes an encoder of any decoder: every token sees all others.
    if not fields.flag("is_causal", default=True):
        raise fields.unsupported("is_causal", False, show(True))
    if fields.section("per_layer_config") is not None:
        raise UnsupportedError(
            f"{fields.source}: per_layer_config", got="layers that differ", allowed="one kind for all layers"
        )
    read_scheme(fields)


def _num_kv_heads(fields: Fields, family: Family, num_heads: int) -> int:
    # An explicit null means one per query head everywhere; a missing key only where old checkpoints lack it.
    if not fields.has("num_key_value_heads") and (family.full_kv_heads or "num_key_value_heads" in fields.values):
        return num_heads
    num_kv_heads = fields.integer("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    return num_kv_heads


def _head_dim(fields: Fields, family: Family, hidden_size: int, num_heads: int) -> int:
    given = fields.optional_integer("head_dim")
    if given is None and family.head_dim is not None and "head_dim" not in fields.values:
        given = family.head_dim
    if given is None and hidden_size % num_heads:
        raise fields.refuse("hidden_size", f"a multiple of num_attention_heads={num_heads} where head_dim is absent")
    head_dim = given if given is not None else hidden_size // num_heads
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        key = "head_dim" if fields.has("head_dim") else "hidden_size"
        allowed = f"an even head_dim up to {MAX_HEAD_DIM}"
        raise fields.error(key, got=f"head_dim={head_dim}", allowed=allowed)
    return head_dim


def _window(fields: Fields) -> int | None:
    """The window of layers that slide, or None when the file says null."""
    return fields.optional_integer("sliding_window") if "sliding_window" in fields.values else _DEFAULT_WINDOW


def _layer_windows(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    if family.windows is Windows.NONE:
        return (None,) * num_layers
    if family.windows is Windows.EVERY_LAYER:
        window = _window(fields)
        sliding = _listed_layers(fields, num_layers)
        if sliding is not None and set(sliding) != {window is not None}:
            raise UnsupportedError(
                f"{fields.source}: layer_types", got="differs from sliding_window", allowed="one kind for all layers"
            )
        return (window,) * num_layers
    window = _window(fields) if fields.flag("use_sliding_window", default=False) else None
    sliding = _listed_layers(fields, num_layers)
    if sliding is None:
        first = fields.optional_integer("max_window_layers", minimum=0)
        first = _DEFAULT_FULL_LAYERS if first is None else first
        sliding = [index >= first for index in range(num_layers)]
    elif window is None and any(sliding):
        raise fields.refuse(
            "sliding_window", "a window and use_sliding_window=true, for layer_types names sliding layers"
        )
    return tuple(window if slides else None for slides in sliding)


def _listed_layers(fields: Fields, num_layers: int) -> list[bool] | None:
    """Return for each layer whether `layer_types` calls it sliding, or None without that list."""
    types = fields.items("layer_types")
    if types is None:
        return None
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            allowed = "full_attention, sliding_attention"
            raise fields.unsupported("layer_types", kind, allowed)
    if len(types) != num_layers:
        raise fields.error(
            "layer_types", got=f"{len(types)} entries", allowed=f"num_hidden_layers={num_layers} of them"
        )
    return [kind == "sliding_attention" for kind in types]


def _dtype(fields: Fields) -> str:
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    # A config that does not say means float32, as it always has for transformers.
    name = (fields.text(key) or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise fields.unsupported(key, name, ", ".join(DTYPES))
    return name


def _special_tokens(fields: Fields, generation: Fields) -> tuple[int | None, tuple[int, ...]]:
    def first(key: str) -> tuple[int, ...]:
        return (generation if generation.has_token_ids(key) else fields).token_ids(key)

    return next(iter(first("bos_token_id")), None), first("eos_token_id")


def _rope(fields: Fields, head_dim: int, max_position: int) -> RopeConfig:
    """Read transformers 5's `rope_parameters`, or transformers 4's `rope_theta` and `rope_scaling`."""
    section = fields.section("rope_scaling") or fields.section("rope_parameters") or Fields({}, fields.source)
    if any(isinstance(value, Mapping) for value in section.values.values()):
        raise UnsupportedError(
            f"{fields.source}: {section.prefix}*", got="one RoPE per layer type", allowed="one for all"
        )
    key = "rope_type" if section.has("rope_type") else "type"
    kind = section.text(key)
    if kind is None and section.has("factor"):
        raise section.refuse("rope_type", ", ".join(ROPE_KINDS))
    kind = kind or "default"
    if kind not in ROPE_KINDS:
        raise fields.unsupported(f"{section.prefix}{key}", kind, ", ".join(ROPE_KINDS))
    theta = (section if section.has("rope_theta") else fields).optional_number(
        "rope_theta", above=1.0
    ) or _DEFAULT_THETA
    if kind == "default":
        # These families rotate the whole head then, whatever partial_rotary_factor says, and so does transformers.
        return RopeConfig(kind="default", theta=theta, rotary_dim=head_dim)
    rotary_dim = _rotary_dim(section if section.has("partial_rotary_factor") else fields, head_dim)
    if kind == "dynamic" and rotary_dim == 2:
        raise fields.error("head_dim", got=f"{head_dim} with dynamic RoPE", allowed="at least 4")
    scaled = partial(RopeConfig, kind, theta, rotary_dim)
    if kind in ("linear", "dynamic"):
        return scaled(factor=section.number("factor"))
    # Phi-3 style: a top-level key counts before the section's.
    owner = fields if fields.has("original_max_position_embeddings") else section
    original = owner.optional_integer("original_max_position_embeddings") or max_position
    if kind == "llama3":
        low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
        if high <= low:
            raise section.refuse("high_freq_factor", f"more than low_freq_factor={low:g}")
        return scaled(
            factor=section.number("factor"),
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return scaled(
        factor=section.optional_number("factor") or max_position / original,
        original_max_position=original,
        beta_fast=section.optional_number("beta_fast") or 32.0,
        beta_slow=section.optional_number("beta_slow") or 1.0,
        attention_factor=section.optional_number("attention_factor"),
        # A zero means "not given", as transformers reads it.
        mscale=section.optional_number("mscale", above=-1e-30) or None,
        mscale_all_dim=section.optional_number("mscale_all_dim", above=-1e-30) or None,
        truncate=section.flag("truncate", default=True),
    )


def _rotary_dim(fields: Fields, head_dim: int) -> int:
    factor = fields.optional_number("partial_rotary_factor")
    rotary_dim = head_dim if factor is None else int(head_dim * factor)
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        allowed = f"one that makes an even share of head_dim={head_dim}, at most 1"
        raise fields.refuse("partial_rotary_factor", allowed)
    return rotary_dim
