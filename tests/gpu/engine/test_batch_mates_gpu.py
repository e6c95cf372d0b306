"""On a GPU: logits do not depend on batch-mates, prefix hits, chunks or preemptions, bit for bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kit.crowd import alone, ragged, runner_of, together
from kit.models.tiny_decoders import BASE, random_model
from kit.operands.on_gpu import ON_HOPPER
from kit.operands.wave_on_gpu import on_gpu
from onewave.engine.load.kv_format import measured_scales
from onewave.engine.runner import ModelRunner
from onewave.engine.wave_decode import WaveDecoder
from onewave.memory.kv_cache import GPU_BLOCK_SIZE, KVFormat
from onewave.models.batch import StepRows
from onewave.models.config.model_config import RopeConfig
from onewave.models.llama import Llama

pytestmark = ON_HOPPER

# Heads of 64, whose prompts run packed.
CONFIG = replace(BASE, head_dim=64, rope=RopeConfig("default", 500.0, 64))


@pytest.fixture(scope="module")
def model() -> Llama:
    return on_gpu(random_model(CONFIG))


@pytest.mark.parametrize(
    ("path", "kv_dtype"),
    [
        *[(path, None) for path in ("wave", "waves", "graph", "eager")],
        ("wave", torch.float8_e4m3fn),
        ("graph", torch.int8),
    ],
)
def test_requests_under_load_get_the_bits_that_each_gets_alone(
    model: Llama, path: str, kv_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kv_dtype is not None:
        scales = measured_scales(model, list(range(64)), kv_dtype)
        monkeypatch.setattr(model, "kv_format", KVFormat(kv_dtype, *(scale.cuda() for scale in scales)))
    asked = ragged(30, vocab_size=131, block_size=GPU_BLOCK_SIZE, max_new=150)
    rows = {"wave": 8, "waves": 3}.get(path)  # of a launch; a step of eight takes three launches of three
    given: dict[str, Any] = {"decode": path} if rows is None else {"wave": WaveDecoder(model, rows)}
    assert runner_of(model, tokens=2048, **given).limits.max_prompts > 1
    found, counts = together(runner_of(model, blocks=6, tokens=300, **given), asked)
    assert counts["preempted"] > 6, counts
    assert counts["cached"] > 400, counts
    assert counts["chunks"] > 5, counts
    assert counts["copies"] > 3, counts
    for one, same in zip(found, alone(runner_of(model, tokens=2048, **given), asked), strict=True):
        for mine, theirs in zip(one.samples, same.samples, strict=True):
            assert mine.token_ids == theirs.token_ids
            # Log-probabilities of the four highest, of raw logits, are equal to the last bit.
            assert mine.logprobs == theirs.logprobs


@pytest.mark.parametrize("path", ["graph", "wave"])
def test_a_block_table_that_changes_between_replays_is_read_anew(model: Llama, path: str) -> None:
    wave = WaveDecoder(model, 8) if path == "wave" else None
    made = ModelRunner(model, max_num_seqs=8, max_model_len=1024, wave=wave)
    made._kv.k.normal_()
    made._kv.v.normal_()
    one = torch.ones(1, dtype=torch.int64, device="cuda")
    places = [(0, place, 3 * place) for place in range(8)]
    made.set_blocks(places)
    found = [made.decode(StepRows(one * 5, one * 700, one * 0)).clone()]
    # The same keys in other blocks.
    made.copy_blocks([(3 * place, 3 * place + 1) for place in range(8)])
    made.set_blocks([(0, place, 3 * place + 1) for place in range(8)])
    found.append(made.decode(StepRows(one * 5, one * 700, one * 0)).clone())
    # Other keys.
    made.set_blocks([(0, 2, 2)])
    found.append(made.decode(StepRows(one * 5, one * 700, one * 0)).clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
