"""A decode step of the wave is as close to transformers in float32 as transformers itself is in bfloat16: every family,
1 to 16 sequences, caches around every length at which their keys are split otherwise."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.models.tiny_models import VOCAB, config_of, oracle, save_checkpoint
from kit.operands.on_gpu import GPU, ON_WAVE
from onewave.base.weight_formats import COMPACT, WeightFormat
from onewave.engine.load.options import LoadOptions
from onewave.engine.load.wave import load_streamed
from onewave.models.batch import Batch
from onewave.models.config.read import load_config
from onewave.models.decode_wave import DecodeWave
from onewave.weights.fetch.sources import ModelLocation

pytestmark = ON_WAVE
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 300},
    "qwen2": {"num_attention_heads": 7, "num_key_value_heads": 1},
    "qwen3": {"head_dim": 128},
}
LENGTHS = (1, 2, 15, 17, 127, 128, 129, 255, 256, 257, 258, 385, 511, 512, 513, 1025)
"""Tokens in a sequence's cache before its step."""


@dataclass(frozen=True)
class Asked:
    """A checkpoint, texts, and transformers' logits after each in float32 and in bfloat16."""

    directory: Path
    texts: list[Tensor]
    exact: Tensor
    rounded: Tensor


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Asked]:
    """A family's checkpoint of a seed, made once."""

    @cache
    def made(family: str, seed: int) -> Asked:
        directory = tmp_path_factory.mktemp(family)
        save_checkpoint(directory, config_of(family, **SIZES | FAMILIES[family]), seed=seed, dtype=torch.bfloat16)
        dice = torch.Generator().manual_seed(seed)
        texts = [torch.randint(VOCAB, (length + 1,), generator=dice) for length in LENGTHS]
        exact, rounded = (last_logits(directory, dtype, texts) for dtype in (torch.float32, torch.bfloat16))
        return Asked(directory, texts, exact, rounded)

    return made


@pytest.mark.pairs
@pytest.mark.parametrize("weight_format", [None, COMPACT], ids=["plain", "compact"])
@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_as_close_to_float32_as_those_of_transformers_in_bfloat16(
    family: str, batch: int, weight_format: WeightFormat | None, checkpoint: Callable[[str, int], Asked]
) -> None:
    ours, theirs = [], []
    for seed in range(3):
        asked = checkpoint(family, seed)
        ours.append(decoded(asked.directory, asked.texts, batch, weight_format) - asked.exact)
        theirs.append(asked.rounded - asked.exact)
    our_errors, their_errors = torch.cat(ours), torch.cat(theirs)
    assert rms(our_errors) <= 1.1 * rms(their_errors), (rms(our_errors), rms(their_errors))
    # A single worst logit is a draw of luck for either side; the mean over sequences of the worst is not.
    peaks = [float(errors.abs().amax(1).mean()) for errors in (our_errors, their_errors)]
    assert peaks[0] <= 1.1 * peaks[1], peaks


def rms(errors: Tensor) -> float:
    return float(errors.square().mean().sqrt())


@torch.inference_mode()
def last_logits(directory: Path, dtype: torch.dtype, texts: list[Tensor]) -> Tensor:
    """transformers' logits after each text, float32 [texts, vocab]."""
    model = oracle(directory, dtype, attention="sdpa").to(GPU)
    return torch.stack([model(text[None].to(GPU)).logits[0, -1].float() for text in texts])


@torch.inference_mode()
def decoded(directory: Path, texts: list[Tensor], batch: int, weight_format: WeightFormat | None) -> Tensor:
    """The wave's logits after each text, whose last tokens are fed `batch` sequences at a time."""
    location = ModelLocation("hf", directory, directory.name)
    config = load_config(location)
    how = LoadOptions(
        dtype=torch.bfloat16,
        device=GPU,
        max_num_seqs=batch,
        max_model_len=max(LENGTHS) + 1,
        cache_dir=directory,
        weight_format=weight_format,
    )
    made = load_streamed(location, config, how)
    model = made.model
    wave = DecodeWave(model, batch=batch, stream=made.stream)
    kv = model.new_cache(num_slots=len(texts), capacity=max(LENGTHS) + 1)
    # Entries that were never written must never be read.
    kv.k.fill_(torch.nan)
    kv.v.fill_(torch.nan)
    for slot, text in enumerate(texts):
        model.forward(Batch.prefill([(slot, text[:-1].tolist(), 0)], GPU), kv)
    wave.bind_cache(kv)
    tokens, positions = (
        torch.tensor(values, device=GPU)
        for values in ([int(text[-1]) for text in texts], [len(text) - 1 for text in texts])
    )
    slots = torch.arange(len(texts), device=GPU)
    found = [
        wave(tokens[at : at + batch], positions[at : at + batch], slots[at : at + batch])
        for at in range(0, len(texts), batch)
    ]
    torch.cuda.synchronize()
    wave.wave.check()
    return torch.cat(found)
