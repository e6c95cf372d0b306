"""The engine on a GPU that the wave runs on: taken by default, weights there once, the same text in any batch."""

import gc
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kit.models.tiny_decoders import BASE
from kit.operands.on_gpu import GPU, ON_WAVE
from kit.operands.read_back import differs
from onewave import LLM, SamplingParams
from onewave.base.errors import UnsupportedError
from onewave.engine import wave_decode
from onewave.engine.load.checkpoint import load_model
from onewave.engine.load.options import LoadOptions
from onewave.models.decode_wave import wave_weights
from onewave.models.llama_plan import DecodeStep, plan_decode
from onewave.wave.weights.pack import StreamMatrix, WeightStream
from onewave.weights.fetch.sources import ModelLocation

pytestmark = ON_WAVE
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
PROMPTS = [{"prompt_token_ids": [7 * i % 1000 + 3 for i in range(n)]} for n in (1, 5, 40, 300)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONEWAVE_CACHE", str(tmp_path))
    return tmp_path


def llm(**more: object) -> LLM:
    given = {"load_format": "dummy", "device": "cuda", "max_model_len": 512, "max_num_seqs": 4, **more}
    return LLM("llama-3.2-1b", **given)


def tokens(model: LLM, prompts: list[dict[str, list[int]]]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in model.generate(prompts, GREEDY)]


def test_auto_takes_the_wave_with_the_weights_there_once_and_batch_mates_change_no_token(cache: Path) -> None:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with llm() as model:
        weights = 2 * (model.config.vocab_size * model.config.hidden_size) + sum(
            getattr(layer, name).nbytes
            for layer in model.runner.model.weights.layers
            for name in ("qkv", "o", "gate_up", "down")
        )
        assert torch.cuda.max_memory_allocated() - before <= weights + (1 << 30)
        assert model.decode_path == "wave"
        assert isinstance(model.runner.model.weights.layers[0].qkv, StreamMatrix)
        together = tokens(model, PROMPTS)
        assert tokens(model, PROMPTS) == together
        for prompt, expected in zip(PROMPTS, together, strict=True):
            assert tokens(model, [prompt]) == [expected]
    assert len(list((cache / "wave").glob("*.program"))) == 1


@pytest.mark.parametrize("count", [1, 2])
def test_the_gpus_kernels_pack_and_unpack_as_plain_indexing_does(count: int) -> None:
    config = replace(
        BASE, hidden_size=512, intermediate_size=1088, num_heads=8, num_kv_heads=4, tie_word_embeddings=True
    )
    location = ModelLocation("builtin", None, "tiny")
    for dtype in (torch.bfloat16, torch.float16):
        model = load_model(
            location, config, LoadOptions(dtype=dtype, device=GPU, load_format="dummy", max_model_len=64)
        )
        for batch in (1, 8, 16):
            program = plan_decode(DecodeStep(config, batch), workers=17).program
            weights = wave_weights(model)
            stream = WeightStream(program, dtype, GPU)
            for name, weight in weights.items():
                stream.put(name, weight)
                assert not differs(stream, name, weight)
                if len(weight.matrices) == count:
                    height, cols = weight.matrices[0].shape
                    found = stream.matrix(name, height, cols, count).dense()
                    folded = weight.block(0, count * height, GPU).view(height, count, cols).transpose(0, 1)
                    assert torch.equal(found, folded.reshape(-1, cols))


def test_a_wave_that_is_wrong_is_named_and_replaced_by_graphs(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wave_decode, "_MAX_DIFFERENCE", -1.0)
    with pytest.raises(UnsupportedError, match="self-check"):
        llm(decode="wave")
    caplog.set_level(logging.WARNING)
    with llm() as model:
        assert model.decode_path == "graph"
        assert len(tokens(model, PROMPTS)[0]) == 24
    assert [record.name for record in caplog.records] == ["onewave"]


def test_prompts_leave_no_unpacked_matrices_behind_where_they_are_not_to_be_kept(cache: Path) -> None:
    with llm() as model:
        kept = tokens(model, PROMPTS)
    with llm() as model:
        model.runner.stream.release()
        gc.collect()  # an earlier test's model held memory in cycles
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        assert tokens(model, PROMPTS) == tokens(model, PROMPTS) == kept
        gc.collect()
        left = torch.cuda.memory_allocated() - before
        layers = model.runner.model.weights.layers
        matrices = sum(getattr(layer, name).nbytes for layer in layers for name in ("qkv", "o", "gate_up", "down"))
    assert abs(left) < matrices / 4


def test_more_sequences_than_a_wave_takes_decode_with_graphs(cache: Path) -> None:
    with llm(max_num_seqs=17) as model:
        assert model.decode_path == "graph"


def test_rows_end_by_themselves_and_a_closed_stream_leaves_nothing_behind(cache: Path) -> None:
    with llm() as model:
        whole = tokens(model, PROMPTS)
    lengths, stops = (3, 24, 17, 9), (20, 6, 30, 30)
    params = [
        SamplingParams(
            temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False, stop_token_ids=row[stop : stop + 1]
        )
        for row, most, stop in zip(whole, lengths, stops, strict=True)
    ]
    expected = [
        row[: min(most, row.index(row[stop]) + 1 if stop < len(row) else most)]
        for row, most, stop in zip(whole, lengths, stops, strict=True)
    ]
    with llm() as model:
        found = [list(output.outputs[0].token_ids) for output in model.generate(PROMPTS, params)]
        assert found == expected
        long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, detokenize=False)
        for _ in range(3):
            stream = model.stream(PROMPTS[1], long)
            next(stream)
            next(stream)
            stream.close()
            assert tokens(model, PROMPTS) == whole
