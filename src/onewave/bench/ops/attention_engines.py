"""The engines of the attention benchmark: our kernels, the reference, PyTorch's, and FlashAttention's."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from onewave.bench.ops.attention import OURS, REFERENCE, Engine, Operands
from onewave.ops.attention.op import attention
from onewave.ops.decode_attention.op import decode_attention
from onewave.ops.masked_multihead_attention.op import masked_multihead_attention

# Module names of FlashAttention; of 3's wheels: PyPI's fa3-fwd, and its own repository's.
_FLASH = {"flash-attn 2": ("flash_attn",), "flash-attn 3": ("fa3_fwd_interface", "flash_attn_interface")}
_FLOAT32 = 4
_BYTES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}

_Call = Callable[[], Tensor]


def prefill_engines(device: torch.device) -> tuple[list[Engine], list[str]]:
    """Engines of a prefill that can be tried here, ours first, and a note for each peer that is not installed."""
    engines = [_prefill_backend(OURS, "auto")]
    if device.type == "cuda":
        engines += [_prefill_backend(f"{OURS} {backend}", backend) for backend in ("triton", "gluon")]
    # It writes all scores in float32, and holds about four such tensors at once.
    engines.append(_prefill_backend(REFERENCE, "reference", graph=False, scores_bytes=4 * _FLOAT32))
    engines += _torch_engines()
    return with_flash(engines, _flash_prefill)


def decode_engines(device: torch.device) -> tuple[list[Engine], list[str]]:
    """The same for a decode step."""
    engines = [
        _decode_backend(OURS, "auto"),
        *(
            Engine(f"{OURS}, {name} cache", partial(_decode_bytes, dtype), cache_bytes=1)
            for name, dtype in _BYTES.items()
        ),
        # It reads the lengths on the host, which no graph can hold.
        _decode_backend(REFERENCE, "reference", graph=False),
        *_torch_engines(),
    ]
    return with_flash(engines, _flash_decode)


def mmha_engines(device: torch.device) -> tuple[list[Engine], list[str]]:
    """Masked multi-head attention, and decode attention beside it, which finds its keys in the cache already."""
    engines = [
        Engine(OURS, lambda o: _mmha(o, "auto")),
        _decode_backend(f"{OURS} decode_attention", "auto"),
        Engine(REFERENCE, lambda o: _mmha(o, "reference"), graph=False),
    ]
    return engines, []


def _prefill_backend(name: str, backend: str, *, graph: bool = True, scores_bytes: int = 0) -> Engine:
    def prepare(o: Operands) -> _Call:
        return lambda: cast("Tensor", attention(o.q, o.k, o.v, causal=o.causal, backend=backend))

    return Engine(name, prepare, graph, scores_bytes)


def _decode_backend(name: str, backend: str, *, graph: bool = True) -> Engine:
    def prepare(o: Operands) -> _Call:
        return lambda: cast("Tensor", decode_attention(o.q, o.k, o.v, o.seq_lens, backend=backend))

    return Engine(name, prepare, graph)


def _decode_bytes(dtype: torch.dtype, o: Operands) -> _Call:
    """Decode attention over a copy of the cache in bytes, with a scale a KV head."""
    most = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scales = [t.float().abs().amax((0, 2, 3)) / most for t in (o.k, o.v)]
    wide = [t / scale[:, None, None] for t, scale in zip((o.k, o.v), scales, strict=True)]
    k, v = ((t.round() if dtype == torch.int8 else t).to(dtype) for t in wide)
    return lambda: cast("Tensor", decode_attention(o.q, k, v, o.seq_lens, k_scale=scales[0], v_scale=scales[1]))


def _mmha(o: Operands, backend: str) -> _Call:
    # The new token is the cache's last, turned by an angle of zero: the result is decode attention's.
    qkv = torch.cat((o.q[:, :, 0], o.k[:, :, -1], o.v[:, :, -1]), dim=1)
    half = o.shape.head_dim // 2
    rotary = torch.cat((torch.ones(half), torch.zeros(half))).to(qkv.device).expand(o.shape.batch, -1).contiguous()
    history = o.seq_lens - 1

    def call() -> Tensor:
        return masked_multihead_attention(qkv, o.k, o.v, history, rotary=rotary, backend=backend)[:, :, None]

    return call


def _torch_engines() -> list[Engine]:
    named = (("torch flash", SDPBackend.FLASH_ATTENTION), ("torch cuDNN", SDPBackend.CUDNN_ATTENTION))
    return [Engine(name, lambda o, backend=backend: _torch_call(backend, o)) for name, backend in named]


def _torch_call(backend: SDPBackend, o: Operands) -> _Call:
    causal = o.causal and o.q.shape[2] > 1
    grouped = o.shape.heads != o.shape.kv_heads

    def call() -> Tensor:
        # Forced: a backend that can't take the call fails instead of making way for another.
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(o.q, o.k, o.v, is_causal=causal, enable_gqa=grouped)

    return call


def with_flash(
    engines: list[Engine], prepare: Callable[[Any, Operands], _Call], names: tuple[str, ...] = tuple(_FLASH)
) -> tuple[list[Engine], list[str]]:
    """The engines and, behind them, those of FlashAttention that are installed; a note for each that is not.

    prepare: builds a call of FlashAttention's module.
    """
    peers, missing = flash_modules()
    flash = [Engine(n, lambda o, module=m: prepare(module, o)) for n, m in peers.items() if n in names]
    return [*engines, *flash], missing


def flash_modules() -> tuple[dict[str, Any], list[str]]:
    """FlashAttention 2 and 3 by name where they can be imported, and what hinders the others."""
    found: dict[str, Any] = {}
    missing: list[str] = []
    for name, modules in _FLASH.items():
        reason = "not installed"
        for module in modules:
            try:
                found[name] = import_module(module)
                break
            except ModuleNotFoundError:
                continue
            except Exception as error:  # a wheel built for another torch fails as it likes
                reason = f"{module} can't be imported: {' '.join(str(error).split())[:160]}"
        if name not in found:
            missing.append(f"{name}: {reason}")
    return found, missing


def _flash_prefill(module: Any, o: Operands) -> _Call:
    q, k, v = (tensor.transpose(1, 2) for tensor in (o.q, o.k, o.v))
    return lambda: output_of(module.flash_attn_func(q, k, v, causal=o.causal)).transpose(1, 2)


def _flash_decode(module: Any, o: Operands) -> _Call:
    q = o.q.transpose(1, 2)
    # Stored as it likes its caches: heads inside tokens.
    k, v = (tensor.transpose(1, 2).contiguous() for tensor in (o.k, o.v))

    def call() -> Tensor:
        found = module.flash_attn_with_kvcache(q, k, v, cache_seqlens=o.seq_lens, causal=True, num_splits=0)
        return output_of(found).transpose(1, 2)

    return call


def output_of(result: Any) -> Tensor:
    """FlashAttention's output, alone or with an LSE beside it."""
    return result if isinstance(result, Tensor) else result[0]
