"""Profiles: FLOPs, bytes, predictions and verdicts of prompts and decode steps."""

from dataclasses import replace

import pytest

from onewave.base.errors import InvalidArgumentError
from onewave.base.gpus import GPUS, find_gpu
from onewave.base.weight_formats import COMPACT
from onewave.models.config.read import builtin_config
from onewave.models.profile import DECODE, PREFILL, STEP, Predictor, parts, verdict

CONFIG = builtin_config("llama-3.1-8b")


def test_flops_and_bytes_are_those_of_the_weights_and_the_keys() -> None:
    listed = {part.name: part for part in parts(CONFIG, PREFILL, 512, 0)}
    matrices = 32 * (6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096)
    products = sum(listed[name].flops for name in ("qkv", "o", "gate_up", "down"))
    assert products == 2 * 512 * matrices
    assert listed["head"].flops == 2 * 128256 * 4096  # of the last token alone
    assert listed["attention"].flops == 32 * 4 * 4096 * (512 * 513 / 2)
    assert listed[STEP].flops == sum(part.flops for name, part in listed.items() if name != STEP)
    step = {part.name: part for part in parts(CONFIG, DECODE, 8, 1024, weight_bytes=1.625)}
    assert step["head"].flops == 2 * 8 * 128256 * 4096
    assert step["qkv"].memory_bytes == pytest.approx(32 * 1.625 * 6144 * 4096, rel=0.02)
    assert step["attention"].memory_bytes == pytest.approx(8 * 32 * 2 * 1025 * 8 * 128 * 2, rel=0.02)
    windowed = replace(CONFIG, layer_windows=(256,) * 32)
    [narrow] = [part for part in parts(windowed, DECODE, 8, 1024) if part.name == "attention"]
    assert narrow.flops == 8 * 32 * 4 * 4096 * 256


def test_a_part_is_bound_by_the_ceiling_that_it_is_near() -> None:
    gpu = GPUS["H200"]
    [product] = [part for part in parts(CONFIG, PREFILL, 2048, 0) if part.name == "gate_up"]
    fast, slow = product.flops / (0.75 * 989e12), product.flops / (0.2 * 989e12)
    assert verdict(product, fast, gpu).bound == "compute"
    assert verdict(product, slow, gpu).bound == "latency"
    [step] = [part for part in parts(CONFIG, DECODE, 1, 512) if part.name == STEP]
    found = verdict(step, step.memory_bytes / (0.9 * 4800e9), gpu)
    assert (found.bound, round(found.memory, 2)) == ("memory", 0.9)
    assert "ridge is 206" in found.reason


@pytest.mark.parametrize("name", list(GPUS))
def test_every_gpu_gets_a_prediction_no_better_than_its_ceilings(name: str) -> None:
    gpu, shallow = GPUS[name], replace(CONFIG, num_layers=2, layer_windows=(None, None))
    predictor = Predictor(shallow, gpu)
    for phase, rows in ((PREFILL, 256), (DECODE, 2), (DECODE, 4096)):
        listed, seconds = predictor.parts(phase, rows, 64), predictor.seconds(phase, rows, 64)
        assert set(seconds) == {part.name for part in listed}
        assert seconds[STEP] == pytest.approx(sum(seconds[part.name] for part in listed[:-1]))
        judged = [verdict(part, seconds[part.name], gpu) for part in listed if part.flops]
        # A part of a wave may read its weights during the part before.
        assert all(max(each.compute, each.memory) < 1.0 for each in judged if rows > 16 or not gpu.wave)
        assert max(judged[-1].compute, judged[-1].memory) > 0.05
    tiles = [gpu.tile_us((1, 64), 16, 14336, 4096), gpu.tile_us((2, 128), 16, 14336, 4096)]
    least = 2 * 64 * 14336 * 4096 / gpu.tflops * 1e-6
    assert all(us > least for us in tiles)  # a tile has 64 rows, 16 of them filled


@pytest.mark.parametrize("name", [name for name in GPUS if name != "H100"])  # as an H200
def test_more_tokens_sequences_or_keys_are_never_predicted_to_take_less(name: str) -> None:
    config = builtin_config("llama-3.2-1b")
    shallow = replace(config, num_layers=1, layer_windows=(None,), vocab_size=4096)
    predictor = Predictor(shallow, GPUS[name], COMPACT)
    prompts = [(PREFILL, rows, 0) for rows in (1, 2, 63, 64, 65, 66, 128, 129, 192, 193, 512, 513, 8192)]
    batches = [(DECODE, rows, 512) for rows in (1, 2, 16, 17, 64, 65)]
    keys = [(DECODE, 2, context) for context in (0, 512, 131072)]
    for cases in (prompts, batches, keys):
        found = [predictor.seconds(*case)[STEP] for case in cases]
        assert found == sorted(found), cases


@pytest.mark.parametrize(
    ("model", "batch", "measured_ms"),
    [("llama-3.2-1b", 1, 0.8153), ("llama-3.2-1b", 8, 1.0768), ("llama-3.1-8b", 1, 3.819), ("llama-3.1-8b", 8, 4.703)],
)
def test_a_step_without_a_wave_is_predicted_as_graphs_were_measured(model: str, batch: int, measured_ms: float) -> None:
    # ledger/h200.jsonl:2882, 2884, 2886 and 2888. Whatever the wave's weights have, these read 16 bits.
    predictor = Predictor(builtin_config(model), replace(GPUS["H200"], wave=False), COMPACT)
    assert predictor.seconds(DECODE, batch, 512)[STEP] * 1e3 == pytest.approx(measured_ms, rel=0.08)
    assert predictor.parts(DECODE, batch, 512) == parts(predictor.config, DECODE, batch, 512)


def test_gpus_are_found_by_any_spelling_and_others_refused() -> None:
    assert find_gpu("rtx-4090") is GPUS["RTX 4090"]
    with pytest.raises(InvalidArgumentError, match="gpu: 'B200'; allowed: H200, H100"):
        find_gpu("B200")
