"""A tiny checkpoint with a tokenizer and a chat template, and the command line run in this process."""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kit.models.dummy import CONFIG, write_config
from kit.models.tiny_tokenizers import bytes_directory
from onewave.cli import main
from onewave.models.config.hf import from_hf
from onewave.models.names import HF, expected_shapes

CHANGES = {
    "vocab_size": 260, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "tie_word_embeddings": True, "eos_token_id": 257, "torch_dtype": "float32",
}  # fmt: skip


def weights() -> dict[str, np.ndarray]:
    """Random tensors of the checkpoint's shapes."""
    rng = np.random.default_rng(0)
    return {
        name: (np.ones(shape) if "norm" in name else rng.normal(0, 0.3, shape)).astype(np.float32)
        for name, shape in expected_shapes(from_hf(CONFIG | CHANGES), HF).items()
    }


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two layers with a byte-level tokenizer."""
    directory = write_config(bytes_directory(tmp_path_factory.mktemp("tiny-llama")), **CHANGES)
    save_file(weights(), directory / "model.safetensors")
    return directory


@pytest.fixture
def own_model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


_STAGE = re.compile(r"\[ *\d+\.\d s\] (.*)\n")


@dataclass(frozen=True)
class Done:
    """Result of a command line: exit status and both streams. stages: what it told on stderr of stages as they began,
    which `err` is without."""

    status: int
    out: str
    err: str
    stages: list[str]

    def error(self) -> str:
        """The one line of a bad input; checks that it is one, with nothing else said."""
        assert self.status == 2, self
        assert self.out == "", self
        assert self.err.endswith("\n"), self
        assert len(self.err.splitlines()) == 1, self
        assert self.err.startswith("error: "), self
        return self.err.strip()


Onewave = Callable[..., Done]


@pytest.fixture
def onewave(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Onewave:
    """Run a command line in this process, with a cache of its own unless the test sets one."""
    monkeypatch.setenv("ONEWAVE_CACHE", str(tmp_path / "cache"))

    def call(*arguments: Any) -> Done:
        capsys.readouterr()
        status = main.run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Done(status, captured.out, _STAGE.sub("", captured.err), _STAGE.findall(captured.err))

    return call
