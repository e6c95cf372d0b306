"""A wave on a GPU that is not there, of a tiny model with random weights, and what it generates."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kit.models.tiny_decoders import LOCATION as LOCATION
from onewave.base.weight_formats import find_quantization
from onewave.engine.engine import Engine
from onewave.engine.load import wave
from onewave.engine.load.options import LoadOptions
from onewave.engine.params import SamplingParams
from onewave.engine.runner import ModelRunner
from onewave.memory.kv_cache import KVCache
from onewave.models import decode_wave
from onewave.models.batch import Batch
from onewave.models.config.model_config import ModelConfig
from onewave.models.llama import Llama
from onewave.wave.launch import launch
from onewave.wave.plan.program import WaveProgram
from onewave.wave.weights.pack import WeightStream

CPU = torch.device("cpu")


def how(tmp_path: Path, name: str | None = None, **changes: Any) -> LoadOptions:
    given: dict[str, Any] = {"dtype": torch.float16, "device": CPU, "max_num_seqs": 2, "max_model_len": 64}
    rounding = find_quantization(name)
    return LoadOptions(**given | {"cache_dir": tmp_path, "load_format": "dummy", "weight_format": rounding} | changes)


class PlainWave:
    """DecodeWave on a GPU that is not there: plain operators on what the stream holds."""

    made: ClassVar[list["PlainWave"]] = []

    def __init__(self, model: Llama, *, batch: int, stream: WeightStream):
        self.model, self.stream, self.batch, self.wave = model, stream, batch, self
        self.made.append(self)

    def check(self) -> None:
        pass

    def bind_cache(self, kv: KVCache) -> None:
        self.kv = kv

    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        return self.model.forward(Batch.decode(tokens, positions, slots), self.kv)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A CPU that passes for a GPU; for which formats a program was planned."""
    seen: list[Any] = []
    plan = wave.plan_and_compile

    def noting(config: ModelConfig, options: LoadOptions, workers: int) -> WaveProgram:
        seen.append(options.weight_format)
        return plan(config, options, workers)

    monkeypatch.setattr(launch, "runs_here", lambda device: True)
    monkeypatch.setattr(launch, "co_resident", lambda device: 3)
    monkeypatch.setattr(decode_wave, "DecodeWave", PlainWave)
    monkeypatch.setattr(wave, "plan_and_compile", noting)
    monkeypatch.setattr(PlainWave, "made", [])
    return seen


def tokens_of(model: Llama, wave: Any) -> list[list[int]]:
    engine = Engine(ModelRunner(model, max_num_seqs=2, max_model_len=64, wave=wave))
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False)
    requests = [engine.add(None, prompt, params) for prompt in ([5, 9, 80], [3], [44, 45, 46])]
    while engine.has_work:
        engine.step()
    return [list(request.output().outputs[0].token_ids) for request in requests]
