"""Attention in float8 beside bfloat16 and its peers: the same numbers, stored in a byte with a scale a head."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from onewave.bench.ops.attention import OURS, REFERENCE, AttentionShape, Engine, Operands
from onewave.bench.ops.attention_engines import output_of, with_flash
from onewave.ops.attention.fp8.op import attention_fp8
from onewave.ops.attention.op import attention

FP8_SHAPES = ("1,16,16384,128", "4,16,4096,128", "1,32/8,8192,128")
# Shapes small enough for a quick run on a CPU.
SMALL_FP8_SHAPES = ("1,4/2,128,64",)

_LARGEST = 448.0
_FLOAT32 = 4


@dataclass(frozen=True)
class ByteOperands(Operands):
    """q, k, v: float8_e4m3fn, as Operands lays them out; scales: float32 [heads], [kv_heads] twice.

    wide: what they stand for, in the dtype that was asked for.
    """

    scales: tuple[Tensor, Tensor, Tensor]
    wide: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def make(cls, shape: AttentionShape, causal: bool, device: torch.device, dtype: torch.dtype) -> "ByteOperands":
        """Random operands, each head scaled to fill e4m3's range."""
        plain = Operands.prefill(shape, causal, device, dtype)
        stored: list[Tensor] = []
        scales: list[Tensor] = []
        wide: list[Tensor] = []
        for tensor in (plain.q, plain.k, plain.v):
            scale = tensor.abs().amax((0, 2, 3)).float() / _LARGEST
            narrow = (tensor / scale.view(-1, 1, 1).to(dtype)).to(torch.float8_e4m3fn)
            stored.append(narrow)
            scales.append(scale)
            wide.append((narrow.float() * scale.view(-1, 1, 1)).to(dtype))
        q, k, v = stored
        of_q, of_k, of_v = scales
        return cls(shape, causal, q, k, v, plain.seq_lens, (of_q, of_k, of_v), (wide[0], wide[1], wide[2]))

    @property
    def nbytes(self) -> int:
        """Moved at least: each operand read once, and the output written in two bytes an element."""
        return 3 * self.q.nbytes + self.k.nbytes + self.v.nbytes


def fp8_engines(device: torch.device) -> tuple[list[Engine], list[str]]:
    """Engines that can be tried here, ours first, and a note for each peer that is not installed.

    The reference computes in float32 what the bytes stand for: its difference is ours to float32.
    """
    engines = [Engine(OURS, lambda o: _ours(o, "auto")), Engine(f"{OURS} with LSE", _with_lse)]
    if device.type == "cuda":
        engines.append(Engine(f"{OURS} gluon", lambda o: _ours(o, "gluon")))
    engines.append(Engine(f"{OURS} 16 bits", _wide))
    # It writes all scores in float32, and holds about four such tensors at once.
    engines.append(Engine(REFERENCE, lambda o: _ours(o, "reference"), graph=False, scores_bytes=4 * _FLOAT32))
    return with_flash(engines, _flash, ("flash-attn 3",))


def _ours(o: Operands, backend: str, *, return_lse: bool = False) -> Callable[[], Any]:
    own = cast("ByteOperands", o)
    q_scale, k_scale, v_scale = own.scales
    return lambda: attention_fp8(
        o.q, o.k, o.v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, causal=o.causal, return_lse=return_lse,
        backend=backend,
    )  # fmt: skip


def _with_lse(o: Operands) -> Callable[[], Tensor]:
    call = _ours(o, "auto", return_lse=True)
    return lambda: call()[0]


def _wide(o: Operands) -> Callable[[], Tensor]:
    q, k, v = cast("ByteOperands", o).wide
    return lambda: cast("Tensor", attention(q, k, v, causal=o.causal))


def _flash(module: Any, o: Operands) -> Callable[[], Tensor]:
    q, k, v = (tensor.transpose(1, 2) for tensor in (o.q, o.k, o.v))
    # One scale a KV head, each for its group's queries as well: the time is the same whatever they are.
    scales = [scale[: o.shape.kv_heads].expand(o.shape.batch, -1) for scale in cast("ByteOperands", o).scales]
    own = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    return lambda: output_of(module.flash_attn_func(q, k, v, causal=o.causal, **own)).transpose(1, 2)
