"""Random operands of masked_multihead_attention, and its reference and its kernel called with them."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kit.numpy_gpu.mmha_model import mmha_in_numpy
from kit.operands import decode_calls
from kit.operands.random import DEVICE
from kit.operands.random import randn_here as randn
from onewave.ops.choice import Choice
from onewave.ops.kv_layout import pack_k, unpack_k
from onewave.ops.masked_multihead_attention import masked_multihead_attention
from onewave.ops.masked_multihead_attention.call import MaskedCall

ENGINES = ["reference", "kernel"]
# The interpreter miscomputes bf16; a GPU takes no float32.
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16, torch.float32]
EXACTEST = DTYPES[0] if DEVICE == "cuda" else torch.float32
NAN = float("nan")


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def kernel(qkv: Tensor, cache_k: Tensor, cache_v: Tensor, seq_lens: Tensor, **options: Any) -> Tensor:
    """The public operator with the Triton kernel, which is interpreted where there is no GPU."""
    if DEVICE == "cuda":
        return masked_multihead_attention(qkv, cache_k, cache_v, seq_lens, backend="triton", **options)
    from onewave.ops.masked_multihead_attention import op

    def launched(call: MaskedCall, _: Choice) -> None:
        decode = replace(call.decode, described=decode_calls.DEVICE, backend="triton")
        decode_calls.launch.run(decode, decode_calls.choose(decode))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "load", lambda *_: SimpleNamespace(run=launched))
        return masked_multihead_attention(qkv, cache_k, cache_v, seq_lens, **options)


def reference(qkv: Tensor, cache_k: Tensor, cache_v: Tensor, seq_lens: Tensor, **options: Any) -> Tensor:
    return masked_multihead_attention(qkv, cache_k, cache_v, seq_lens, backend="reference", **options)


@dataclass
class Case:
    """Random operands: row i has histories[i] keys in the cache, everything beyond is NaN."""

    histories: list[int]
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    capacity: int = 24
    dtype: torch.dtype = torch.float16
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows, width = len(self.histories), self.heads + 2 * self.kv_heads
        self.qkv = randn(rows, width, self.head_dim, seed=0, dtype=self.dtype)
        self.k, self.v = (
            randn(rows, self.kv_heads, self.capacity, self.head_dim, seed=seed, dtype=self.dtype) for seed in (1, 2)
        )
        for row, history in enumerate(self.histories):
            self.k[row, :, max(history, 0) :] = NAN
            self.v[row, :, max(history, 0) :] = NAN
        self.seq_lens = torch.tensor(self.histories, device=DEVICE)

    def with_everything(self, *, style: str = "neox", integers: bool = False) -> "Case":
        """Every operand that changes the result, each of its own value in each channel."""
        rows, width = len(self.histories), self.heads + 2 * self.kv_heads
        angles = randn(rows, self.head_dim // 4, seed=3) * 9
        self.options |= {
            "bias": randn(width, self.head_dim, seed=4, dtype=self.dtype),
            "rotary": torch.cat((angles.cos(), angles.sin()), 1),
            "rotary_style": style,
            "src_mask": randn(rows, self.heads, 1, self.capacity, seed=5),
            "out_shift": randn(self.heads, self.head_dim, seed=6),
            "out_smooth": randn(self.heads, self.head_dim, seed=7),
        }
        if integers:
            self.qkv = (randn(rows, width, self.head_dim, seed=8) * 1e6).to(torch.int32)
            self.options["qkv_out_scale"] = randn(width, self.head_dim, seed=9) * 1e-6
        return self

    def run(self, engine: str, *, packed: bool = False, **changes: Any) -> tuple[Tensor, Tensor, Tensor]:
        """(out, k cache, v cache) of a call on copies of the caches, k plain again."""
        k, v = pack_k(self.k) if packed else self.k.clone(), self.v.clone()
        function = kernel if engine == "kernel" else reference
        out = function(changes.pop("qkv", self.qkv), k, v, self.seq_lens, **self.options, **changes)
        return out, unpack_k(k) if packed else k, v

    def model(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return mmha_in_numpy(self.qkv, self.k, self.v, self.seq_lens, **self.options)

    def check(self, engine: str, *, packed: bool = False, **changes: Any) -> None:
        """The operators' rule on the result; the cache holds what it held and the new token."""
        out, k, v = self.run(engine, packed=packed, **changes)
        right, right_k, right_v = self.model()
        taken = ~np.isnan(right[:, 0, 0])
        error = np.abs(out.double().cpu().numpy() - right)[taken].max()
        assert error <= 2 * np.abs(self.in_torch(right_k, right_v) - right)[taken].max() + 1e-5
        for cache, right_cache, before in ((k, right_k, self.k), (v, right_v, self.v)):
            numbers = cache.double().cpu().numpy()
            # One rounding of the last bit, where float32 was turned in another order.
            np.testing.assert_allclose(numbers, right_cache, rtol=2 * torch.finfo(self.dtype).eps, atol=1e-6)
            same = torch.arange(self.capacity, device=DEVICE) != self.seq_lens[:, None]
            assert torch.equal(
                bits(cache)[same[:, None].expand(cache.shape[:3])], bits(before)[same[:, None].expand(cache.shape[:3])]
            )

    def in_torch(self, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """PyTorch's own attention in the case's dtype on caches that hold the new token."""
        plain = Case(self.histories, self.heads, self.kv_heads, self.head_dim, self.capacity, self.dtype)
        given = {name: self.options.get(name) for name in ("bias", "qkv_out_scale", "rotary", "rotary_style")}
        queries = torch.zeros(len(self.histories), self.heads, self.head_dim, dtype=self.dtype)
        result = np.zeros(queries.shape)
        from onewave.ops.append_kv.reference import rotate

        x = self.qkv.cpu().float()
        x = x if given["qkv_out_scale"] is None else x * given["qkv_out_scale"].cpu()
        x = x if given["bias"] is None else x + given["bias"].cpu().float()
        q = x[:, : self.heads]
        if given["rotary"] is not None:
            q = rotate(q, given["rotary"].cpu(), interleaved=given["rotary_style"] == "interleaved")
        for row, history in enumerate(plain.histories):
            if history < 0:
                continue
            keys, values = (
                torch.from_numpy(c[row, :, : history + 1])
                .to(self.dtype)
                .repeat_interleave(self.heads // self.kv_heads, 0)
                for c in (k, v)
            )
            mask = self.options.get("src_mask")
            mask = None if mask is None else mask[row, :, :, : history + 1].cpu().to(self.dtype)
            o = torch.nn.functional.scaled_dot_product_attention(
                q[row, :, None].to(self.dtype), keys, values, attn_mask=mask, scale=self.options.get("scale")
            )[:, 0]
            o = o if self.options.get("out_shift") is None else o + self.options["out_shift"].cpu().to(self.dtype)
            o = o if self.options.get("out_smooth") is None else o * self.options["out_smooth"].cpu().to(self.dtype)
            result[row] = o.double().numpy()
        return result
