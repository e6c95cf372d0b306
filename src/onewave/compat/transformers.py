"""`import onewave.compat.transformers` makes attn_implementation="onewave" known to transformers (5.0 or newer).

    import onewave.compat.transformers
    model = AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16", attn_implementation="onewave").cuda()

Two functions are registered: the attention itself, and the one that says what a layer's mask is. The second spares the
mask wherever the kernels can do without: None means causal (bottom-right) or, for a layer that is not causal,
everything; a bool tensor of shape [0, window] means causal with a sliding window. Whatever else transformers asks for
(padding, packed sequences, chunks, image blocks) is its own bool mask [batch, 1, queries, keys].
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

try:
    from transformers import MODEL_MAPPING, AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function  # pyright: ignore[reportUnknownVariableType]
except ImportError as error:
    raise ImportError(
        f"onewave.compat.transformers needs transformers 5.0 or newer: {error}. Run `pip install 'transformers>=5'`."
    ) from error

from onewave.base.errors import UnsupportedError
from onewave.ops.attention.op import attention
from onewave.ops.checks import SMALLEST_HEAD_DIM
from onewave.ops.decode_attention.call import MAX_QUERIES
from onewave.ops.decode_attention.op import decode_attention

NAME = "onewave"


def register() -> None:
    """Make attn_implementation="onewave" known; importing this module does it."""
    AttentionInterface.register(NAME, attention_forward)  # pyright: ignore[reportUnknownMemberType]
    AttentionMaskInterface.register(NAME, attention_mask)  # pyright: ignore[reportUnknownMemberType]


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """Return a layer's mask, as transformers' mask functions describe it; see the module's text for the result.

    attention_mask: bool [batch, keys], False where there is padding. Reads it on the host to find out whether there is
    any, as transformers' own function does. Raises UnsupportedError for a model that computes its attention by itself.
    """
    if (
        "config" in kwargs
        and not torch.compiler.is_compiling()
        and not _is_replaceable(cast("type[Any]", type(kwargs["config"])))
    ):
        raise UnsupportedError(
            'attn_implementation="onewave"',
            got=f"a model of {type(kwargs['config']).__name__}, which computes its attention by itself",
            allowed="models whose attention transformers can replace",
            next='Use attn_implementation="eager".',
        )
    causal = mask_function is causal_mask_function
    window = _sliding_window(mask_function)
    if attention_mask is not None and attention_mask.ndim == 2 and attention_mask.shape[0] == 0:
        # Made in advance, by this function; a compiler does not see what is asked for now.
        if attention_mask.shape[1] != window and not torch.compiler.is_compiling():
            got = f"one of a window of {attention_mask.shape[1]} keys"
            allowed = "the layer's own" if window is None else f"one of {window} keys"
            raise UnsupportedError('attn_implementation="onewave": a mask made in advance', got=got, allowed=allowed)
        return attention_mask
    # Only then is the last query's place the last key's.
    aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if (
        allow_is_causal_skip
        and aligned
        and (causal or window is not None)
        and not _is_padded(attention_mask, kv_length, kv_offset)
    ):
        if window is None or kv_length <= window:
            return None
        return torch.empty((0, window), dtype=torch.bool, device=kwargs.get("device", "cpu"))
    # transformers skips with another alignment in mind, unless nothing is causal.
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=cast("int", q_offset),
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        **kwargs,
    )


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer.

    query: [batch, heads, Sq, head_dim]; key, value: [batch, kv_heads, Sk, ..], value's head_dim may differ.
    attention_mask: what the function above returned, or a mask of the caller's: bool, or a float one that is added.
    s_aux: [heads], attention sinks. position_bias: added to the scores. Any head_dim: others than the kernels' are
    padded with zeros. Returns (out [batch, Sq, heads, value's head_dim], None). Raises UnsupportedError.
    """
    _refuse(dropout, kwargs)
    window: int | None = None
    if attention_mask is not None and attention_mask.ndim == 2 and attention_mask.shape[0] == 0:
        window, attention_mask = attention_mask.shape[1], None
    causal = attention_mask is None and (is_causal if is_causal is not None else getattr(module, "is_causal", True))
    bias = _bias(attention_mask, position_bias, query)
    num_queries, head_dim, value_dim = query.shape[2], query.shape[3], value.shape[3]
    if scaling is None:
        scaling = head_dim**-0.5
    width = max(SMALLEST_HEAD_DIM, -(-max(head_dim, value_dim) // 8) * 8)
    q, k, v = (_padded(tensor, width) for tensor in (query, key, value))
    decodes = bias is None and (num_queries == 1 or (causal and q.is_cuda and num_queries <= MAX_QUERIES))
    if decodes and q.shape[1] % k.shape[1] == 0:
        lengths = torch.full((q.shape[0],), k.shape[2], dtype=torch.int32, device=q.device)
        out = decode_attention(q, k, v, lengths, scale=scaling, window=window, softcap=softcap, sinks=s_aux)
    else:
        out = attention(
            q, k, v, causal=bool(causal), scale=scaling, window=window, softcap=softcap, sinks=s_aux, bias=bias
        )
    return cast("Tensor", out)[..., :value_dim].transpose(1, 2).contiguous(), None


@lru_cache
def _is_replaceable(config: type[Any]) -> bool:
    """Whether models of a configuration know any other attention than their own: those that do not would read what this
    module returns as a mask of theirs, or as none. True of configurations that transformers has no model for."""
    model = MODEL_MAPPING.get(config, None)
    models = model if isinstance(model, tuple | list) else (model,)
    kinds = ("_supports_attention_backend", "_supports_sdpa", "_supports_flash_attn")
    return model is None or any(getattr(each, kind, False) for each in models for kind in kinds)


def _sliding_window(mask_function: Callable[..., Any]) -> int | None:
    """The window of transformers' causal sliding-window mask function; None for any other function.

    It is a closure over the two functions it joins, the first of which closes over the window. A function that looks
    different, now or in a later version, is evaluated element by element instead.
    """
    if torch.compiler.is_compiling():
        return None  # which can't look into closures
    known = sliding_window_causal_mask_function(1)  # pyright: ignore[reportUnknownVariableType]
    if getattr(mask_function, "__code__", None) is not known.__code__:
        return None
    parts = _closed_over(mask_function)
    known_overlay = _closed_over(known)[0][0]
    match parts:
        case [(overlay, second)] if second is causal_mask_function and overlay.__code__ is known_overlay.__code__:
            window = _closed_over(overlay)
            return window[0] if len(window) == 1 and isinstance(window[0], int) else None
        case _:
            return None


def _closed_over(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]


def _is_padded(mask: Tensor | None, kv_length: int, kv_offset: int) -> bool:
    """Whether any of the keys is padding. A mask that ends before the keys do leaves the rest out, too."""
    if mask is None:
        return False
    if mask.ndim != 2 or mask.shape[1] < kv_offset + kv_length or torch.compiler.is_compiling():
        return True
    return not bool(mask[:, kv_offset : kv_offset + kv_length].all())


def _bias(mask: Tensor | None, position_bias: Tensor | None, query: Tensor) -> Tensor | None:
    """One tensor that says both: bool where there is only a mask, otherwise additive in the query's dtype."""
    if position_bias is None:
        return mask
    if mask is None:
        return position_bias
    if mask.dtype is torch.bool:
        return position_bias.masked_fill(~mask, float("-inf"))
    return (position_bias + mask).to(query.dtype)


def _padded(tensor: Tensor, width: int) -> Tensor:
    return tensor if tensor.shape[-1] == width else torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1]))


def _refuse(dropout: float, options: dict[str, Any]) -> None:
    if dropout:
        raise UnsupportedError(
            'attn_implementation="onewave": dropout', got=str(dropout), allowed="0.0", next="Call model.eval()."
        )
    if options.get("output_attentions"):
        raise UnsupportedError(
            'attn_implementation="onewave": output_attentions', got="True", next='Use attn_implementation="eager".'
        )
    if options.get("cache") is not None:
        raise UnsupportedError(
            'attn_implementation="onewave": transformers\' paged cache', next='Use "sdpa" for its continuous batching.'
        )


register()
