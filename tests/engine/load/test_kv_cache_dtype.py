"""Keys and values in 8 bits through the model and the engine, on a CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.lanes import slow
from kit.models.tiny_models import config_of, our_logits, ours, relative_error, save_checkpoint, tokens
from onewave import LLM, SamplingParams
from onewave.base.errors import UnsupportedError
from onewave.engine.load.kv_format import measured_scales
from onewave.memory.kv_cache import KVFormat
from onewave.models import llama
from onewave.models.llama import Llama

INT8, FP8 = torch.int8, torch.float8_e4m3fn
CHUNKS = [4, 9, 1, 7, 1, 1, 6]


def in_8_bits(model: Llama, dtype: torch.dtype) -> KVFormat:
    return KVFormat(dtype, *measured_scales(model, tokens(24, seed=3), dtype))


def grid(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that a cache of 8 bits can hold nearest to x [.., kv_heads, keys, head_dim]."""
    scaled = x / scale[:, None, None]
    if dtype is INT8:
        return scaled.round().clamp(-128, 127) * scale[:, None, None]
    # Four significant bits, from 2^-6 up; below it steps of 2^-9.
    step = torch.exp2(torch.floor(torch.log2(scaled.abs().clamp(min=2**-6))) - 3)
    return (scaled / step).round() * step * scale[:, None, None]


@pytest.mark.parametrize(
    ("family", "options", "dtype"),
    [("llama", {}, INT8), ("mistral", {"sliding_window": 5}, FP8), ("qwen2", {}, INT8), ("qwen3", {}, FP8)],
)
def test_logits_are_those_of_rounded_keys_and_values(
    family: str, options: dict[str, Any], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, config_of(family, **options))
    model, ids = ours(tmp_path), tokens(sum(CHUNKS))
    unrounded = our_logits(model, ids, CHUNKS)
    form = in_8_bits(model, dtype)
    append, scales = llama.append_kv, (form.k_scale, form.v_scale)
    layer = 0

    def rounding(qkv: Tensor, rotary: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> Tensor:
        nonlocal layer
        queries = append(qkv, rotary, k, v, *rest, **more)
        for cache, scale in zip((k, v), scales, strict=True):
            cache.copy_(grid(cache, scale[layer % len(scale)], dtype))
        layer += 1
        return queries

    monkeypatch.setattr(llama, "append_kv", rounding)
    expected = our_logits(model, ids, CHUNKS)
    monkeypatch.undo()
    model.kv_format = form
    found = our_logits(model, ids, CHUNKS)
    assert relative_error(found, expected) <= 2e-3
    assert 4e-3 < relative_error(found, unrounded) <= (0.03 if dtype is INT8 else 0.1)


@pytest.mark.parametrize("name", ["fp8", slow("int8")])
def test_an_llm_holds_as_many_tokens_in_a_quarter_of_float32_s_bytes(name: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of("llama", eos_token_id=2))
    blocks = {}
    for asked in ("auto", name):
        with LLM(tmp_path, kv_cache_dtype=asked, device="cpu", kv_cache_memory_bytes=200_000) as llm:
            blocks[asked] = llm.runner.num_blocks + 1
            assert llm.kv_cache_dtype == ("float32" if asked == "auto" else name)
            assert llm._prefixes.kv_dtype == llm.kv_cache_dtype
            out = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False))
            assert len(out[0].outputs[0].token_ids) == 4
    assert blocks[name] // 4 == blocks["auto"] > 1


@pytest.mark.parametrize("name", ["e5m2", "bfloat16", None])
def test_another_dtype_is_refused_before_anything_loads(name: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"kv_cache_dtype.*auto, int8, fp8"):
        LLM("no-such-model", kv_cache_dtype=name)
