"""Kernels compiled before a decode step is measured."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kit.models.tiny_decoders import BASE
from kit.processes import python
from onewave.base.errors import UnsupportedError
from onewave.base.weight_formats import COMPACT
from onewave.bench.engine import ahead
from onewave.bench.engine.ahead import make_ready
from onewave.bench.engine.wave import WaveCase
from onewave.engine.load.options import LoadOptions


@pytest.mark.slow
def test_all_that_a_measurement_launches_is_compiled_ahead() -> None:
    assert json.loads(python("-m", "kit.alone.ahead_alone")) == {"compact": [], "int4": [], "q4_k_m": []}


def test_what_fails_to_compile_stops_nothing_and_what_cannot_be_planned_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object) -> None:
        raise RuntimeError("no such kernel")

    def refused(*given: object) -> None:
        raise UnsupportedError("one wave", got="that")

    planned: list[int] = []
    options = LoadOptions(torch.bfloat16, torch.device("cuda", 0), cache_dir=tmp_path, weight_format=COMPACT)
    monkeypatch.setattr(ahead, "launches_of_cases", fails)
    monkeypatch.setattr(ahead, "program_of", lambda config, how: planned.append(how.max_num_seqs))  # pyright: ignore
    make_ready(BASE, options, [WaveCase(1, 8)], None)
    assert planned == []
    with ThreadPoolExecutor(1) as pool:
        make_ready(BASE, options, [WaveCase(1, 8)], pool)  # pyright: ignore[reportArgumentType] (in place of processes)
        assert planned == [1]
        monkeypatch.setattr(ahead, "program_of", refused)
        with pytest.raises(UnsupportedError, match="that"):
            make_ready(BASE, options, [WaveCase(1, 8)], pool)  # pyright: ignore[reportArgumentType]
