"""Decode attention's and masked attention's kernels run on tensors wherever they lie, without the public checks."""

from typing import Any

import torch
from torch import Tensor

from onewave.base.device import Device
from onewave.ops.decode_attention.call import DecodeCall, Projection
from onewave.ops.decode_attention.choose import choose
from onewave.ops.decode_attention.triton import launch
from onewave.ops.masked_multihead_attention import reference
from onewave.ops.masked_multihead_attention.call import MaskedCall

# One SM: programs that the interpreter runs one after another.
DEVICE = Device((8, 9), 1)


def attend(*operands: Tensor, out: Tensor | None = None, device: Device = DEVICE, **options: Any) -> tuple[Tensor, Any]:
    """Run the kernel that is chosen for q, k, v, seq_lens on a device; return out and the LSE, 7 where not written."""
    q = operands[0]
    out = torch.full_like(q, 7.0) if out is None else out
    lse = options.pop("lse", torch.full(q.shape[:3], 7.0, device=q.device))
    call = DecodeCall(*operands, **{"backend": "triton"} | options, out=out, lse=lse, described=device)
    launch.run(call, choose(call))
    return out, lse


def masked_call(out: Tensor, *operands: Tensor, device: Device | None = None, **options: Any) -> MaskedCall:
    """Return the call of qkv, cache_k, cache_v, seq_lens that writes out."""
    named = dict.fromkeys(Projection._fields[:7]) | {
        name: options.pop(name) for name in Projection._fields if name in options
    }
    return MaskedCall(*operands, Projection(**named), **options, out=out, described=device)


def attend_masked(out: Tensor, *operands: Tensor, device: Device = DEVICE, **options: Any) -> None:
    """Run the kernel that is chosen on a device."""
    call = masked_call(out, *operands, device=device, **options).decode
    launch.run(call, choose(call))


def masked_in_torch(out: Tensor, *operands: Tensor, **options: Any) -> None:
    """Run the reference."""
    reference.masked_multihead_attention(out, masked_call(out, *operands, **options))
