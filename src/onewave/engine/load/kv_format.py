"""Keys and values in 8 bits: what each KV head's stored numbers are multiplied by.

The scales come from the checkpoint where it has them, else from one pass over a small text. Either way they are
constant after load, so a row's bits depend on its own tokens alone.

int8  largest |x| of the text with a quarter to spare, over 127; whatever is larger saturates
fp8   a power of two, so that a stored number loses only what e4m3 does: the text's largest |x| lies at 56 to 112 of 448
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from onewave.base.errors import WeightsError
from onewave.engine.load.options import LoadOptions
from onewave.memory.kv_cache import KVFormat
from onewave.models.batch import Batch
from onewave.models.config.model_config import ModelConfig
from onewave.models.config.read import load_largest_of_kv
from onewave.models.llama import Llama
from onewave.models.names import hf_layout
from onewave.weights.fetch.sources import ModelLocation
from onewave.weights.store import WeightStore, quote

_log = logging.getLogger("onewave")
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Headroom above the largest value seen. int8: more costs precision, less saturates more of what the text did not show.
# fp8: its range is 2^15 wide.
_SPARE = {torch.int8: 1.25, torch.float8_e4m3fn: 4.0}
# Token ids of the pass where there is no tokenizer to read the text with.
_NUM_IDS, _ID_STEP = 128, 7919


def set_kv_format(model: Llama, location: ModelLocation, options: LoadOptions) -> None:
    """Have a loaded model keep keys and values as the options say. Raises WeightsError, UnsupportedError."""
    dtype = options.kv_dtype
    if dtype is None:
        return
    stored = None if options.load_format == "dummy" else stored_scales(location, model.config)
    if stored is None:
        ids = [] if options.sample is None else list(options.sample())
        ids = ids or [number * _ID_STEP % model.config.vocab_size for number in range(_NUM_IDS)]
        scales = measured_scales(model, ids[: model.max_model_len], dtype)
    else:
        ratio = load_largest_of_kv(location) / _LARGEST[dtype]
        scales = stored[0] * ratio, stored[1] * ratio
    _log.info("KV cache in %s, scales %s", options.kv_name, "measured on a text" if stored is None else "as stored")
    model.kv_format = KVFormat(dtype, *(scale.to(model.device) for scale in scales))


@torch.inference_mode()
def measured_scales(model: Llama, ids: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales of keys and of values by a pass over some tokens: float32 [layers, kv_heads] each."""
    kv = model.new_cache(num_slots=1, capacity=len(ids))
    model.forward(Batch.prefill([(0, list(ids), 0)], model.device), kv)
    largest = [cache[:, 0].float().abs().amax((-1, -2)).cpu() for cache in (kv.k, kv.v)]
    k_scale, v_scale = (scale_of(numbers, dtype) for numbers in largest)
    return k_scale, v_scale


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale for numbers up to these: float32; 1 where there is none above 0."""
    scale = largest * (_SPARE[dtype] / _LARGEST[dtype])
    if dtype is torch.float8_e4m3fn:
        scale = torch.ldexp(torch.ones_like(scale), torch.frexp(scale)[1])
    return torch.where((largest > 0) & largest.isfinite(), scale, 1.0)


def stored_scales(location: ModelLocation, config: ModelConfig) -> tuple[Tensor, Tensor] | None:
    """A checkpoint's own scales of keys and of values, float32 [layers, kv_heads] each; None where it has none.

    One for a layer or one for each KV head, beside attention or its projections. Raises WeightsError.
    """
    if location.kind != "hf" or location.path is None:
        return None
    from onewave.weights.formats.safetensors_store import SafetensorsStore

    store = SafetensorsStore.open(location.path)
    try:
        k_scale, v_scale = (_stored(store, config, kind) for kind in "kv")
    finally:
        store.close()
    if (k_scale is None) != (v_scale is None):
        raise WeightsError(store.description, got="scales of keys or of values", allowed="both or none")
    return None if k_scale is None or v_scale is None else (k_scale, v_scale)


def _stored(store: WeightStore, config: ModelConfig, kind: str) -> Tensor | None:
    own = f"{kind}_scale"
    beside = (f"{module}.{own}" for module in (f"{kind}_proj", "qkv_proj", "attn"))
    endings = (own, *beside, f"{kind}_proj.output_scale", "kv_scale")
    first = hf_layout(store.tensors).layers
    rows: list[Tensor] = []
    for layer in range(config.num_layers):
        names = [f"{first}{layer}.self_attn.{ending}" for ending in endings]
        name = next((name for name in names if name in store.tensors), None)
        if name is None and not rows:
            return None
        if name is None:
            raise WeightsError(store.description, got=f"no scale {quote(names[0])}", allowed="one in every layer")
        scale = store.load(name).float().flatten()
        if len(scale) not in (1, config.num_kv_heads) or not bool((scale.isfinite() & (scale > 0)).all()):
            allowed = f"1 or {config.num_kv_heads} finite numbers above 0"
            what = f"{store.tensors[name].file}: tensor {quote(name)}"
            raise WeightsError(what, got=str([float(number) for number in scale[:4]]), allowed=allowed)
        rows.append(scale.expand(config.num_kv_heads))
    return torch.stack(rows)
