"""Masked multi-head attention, written once more in NumPy loops that share no code with the operator."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def numbers(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().float().numpy() if tensor.is_floating_point() else tensor.cpu().numpy()


def turned(x: np.ndarray, angles: np.ndarray, interleaved: bool) -> np.ndarray:
    """One head, float32: each pair is a complex number times e^(i angle)."""
    pairs = len(angles) // 2
    result = x.copy()
    for i in range(pairs):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
        cos, sin = angles[i], angles[pairs + i]
        result[a] = x[a] * cos - x[b] * sin
        result[b] = x[b] * cos + x[a] * sin
    return result


def mmha_in_numpy(
    qkv: Tensor, cache_k: Tensor, cache_v: Tensor, seq_lens: Tensor, **given: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(out, k cache, v cache) in float64, caches plain. `given` as the operator's; skipped rows of out are NaN."""
    kind = cache_v.dtype
    options = {name: numbers(value) if isinstance(value, Tensor) else value for name, value in given.items()}
    x, lengths = numbers(qkv).astype(np.float32), numbers(seq_lens)
    k, v = numbers(cache_k).astype(np.float64), numbers(cache_v).astype(np.float64)
    rows, width, dims = x.shape
    kv_heads = k.shape[1]
    heads = width - 2 * kv_heads
    for name, combine in (("qkv_out_scale", np.multiply), ("bias", np.add)):
        if options.get(name) is not None:
            x = combine(x, options[name].astype(np.float32)[None])
    out = np.full((rows, heads, dims), np.nan)

    def stored(values: np.ndarray) -> np.ndarray:
        """float32 rounded to what the cache can hold."""
        return torch.from_numpy(values).to(kind).double().numpy()

    for row in range(rows):
        history = int(lengths[row])
        if history < 0 or (options.get("finished") is not None and options["finished"][row]):
            continue
        head_rows = x[row].copy()
        if options.get("rotary") is not None:
            for head in range(heads + kv_heads):
                head_rows[head] = turned(
                    head_rows[head], options["rotary"][row], options.get("rotary_style") == "interleaved"
                )
        for kv_head in range(kv_heads):
            k[row, kv_head, history] = stored(head_rows[heads + kv_head])
            v[row, kv_head, history] = stored(head_rows[heads + kv_heads + kv_head])
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            scores = k[row, kv_head, : history + 1] @ stored(head_rows[head])
            scores *= options.get("scale") or 1 / np.sqrt(dims)
            if options.get("src_mask") is not None:
                mask = options["src_mask"][row]
                scores = scores + mask[head if len(mask) > 1 else 0, 0, : history + 1]
            if np.all(scores == -np.inf):
                out[row, head] = 0
                continue
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ v[row, kv_head, : history + 1] / weights.sum()
        for name, combine in (("out_shift", np.add), ("out_smooth", np.multiply)):
            if options.get(name) is not None:
                out[row] = combine(out[row], options[name].astype(np.float64))
    return out, k, v


def quantise_in_numpy(out: np.ndarray, scale: float, rounding: str, max_bound: float, min_bound: float) -> np.ndarray:
    """int8 of float64 values."""
    scaled = np.float64(np.float32(max_bound) * np.float32(scale)) * out
    whole = np.rint(scaled) if rounding == "half_even" else np.copysign(np.floor(np.abs(scaled) + 0.5), scaled)
    return np.clip(whole, min_bound, max_bound).astype(np.int8)
