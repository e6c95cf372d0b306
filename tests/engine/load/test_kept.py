"""Quantised checkpoints in a wave's stream in their own bits: the values of the file, in plain operators and in the
kernel's own source."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kit.models import plain_wave
from kit.models.plain_wave import PlainWave, how
from kit.models.quantized_files import FP8, blocks, compressed, packed, quantise_checkpoint
from kit.models.tiny_decoders import logits_of
from kit.models.tiny_gguf import write_gguf
from kit.models.tiny_models import config_of, save_checkpoint
from kit.numpy_gpu.simulated_wave import LONG
from onewave.base.blocks import BLOCK_FORMATS
from onewave.base.errors import OutOfReachError, WeightsError
from onewave.base.settings import Settings
from onewave.base.weight_formats import COMPACT, NESTED, NIBBLES, SIX_BITS, GroupRounding, MixedFormat, mixed
from onewave.engine.arguments import EngineOptions
from onewave.engine.load import first_load
from onewave.engine.load import wave as load_wave_module
from onewave.engine.load.checkpoint import load_model, open_parts
from onewave.engine.load.choices import resolve_load
from onewave.engine.load.kept import find_kept, kept_format, stream_kept
from onewave.engine.load.load import warm_up
from onewave.engine.load.options import KeptBits, LoadOptions
from onewave.engine.load.plan_cache import is_shipped, shipped_launchers
from onewave.engine.load.wave import load_wave
from onewave.models.config.model_config import ModelConfig
from onewave.models.config.read import builtin_config, load_config
from onewave.models.llama import Llama
from onewave.models.llama_plan import DecodeStep, plan_decode
from onewave.wave.weights.pack import StreamMatrix, WeightStream
from onewave.wave.weights.row_table import RowTable
from onewave.weights.fetch.sources import ModelLocation
from onewave.weights.formats.gguf_store import GGUFStore

planned = plain_wave.planned  # a fixture
CPU = torch.device("cpu")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG = replace(LONG, hidden_size=256, intermediate_size=512, vocab_size=131, max_position=64)


def written(path: Path, config: ModelConfig, types: dict[str, str]) -> ModelLocation:
    """A GGUF file of random weights, each tensor in the type that its last part asks for."""
    dice, hidden, inner = np.random.default_rng(0), config.hidden_size, config.intermediate_size
    width, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "attn_q": (width, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, width),
        "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
    }  # fmt: skip

    def values(*shape: int) -> np.ndarray:
        return (dice.standard_normal(shape) / 16).astype(np.float32)

    tensors = {"token_embd.weight": (values(config.vocab_size, hidden), types.get("token_embd", "F16"))}
    tensors["output.weight"] = (values(config.vocab_size, hidden), types.get("output", "F16"))
    tensors["output_norm.weight"] = (1 + values(hidden), "F32")
    for layer in range(config.num_layers):
        for name, shape in shapes.items():
            tensors[f"blk.{layer}.{name}.weight"] = (values(*shape), types.get(name, types["other"]))
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = (1 + values(hidden), "F32")
    write_gguf(path, "llama", {}, tensors)
    return ModelLocation("gguf", path, "tiny")


def kept(location: ModelLocation, options: LoadOptions) -> tuple[Llama, MixedFormat]:
    batch = options.max_num_seqs
    with open_parts(location, CONFIG, options) as parts:
        form = kept_format(parts, CONFIG, batch=batch)
        program = plan_decode(DecodeStep(CONFIG, batch, form), workers=3).program
        stream = WeightStream(program, options.dtype, CPU, form)
        return stream_kept(parts, CONFIG, stream, 64), form


EIGHT = {"qkv0": 2, "o0": 2, "gate_up0": 2, "down0": 2, "head": 2}


@pytest.mark.parametrize(
    ("types", "widths", "nibbles"),
    [
        ({"other": "Q4_1", "output": "Q8_0"}, {"head": 2}, NIBBLES[32, True]),
        ({"other": "Q4_0", "attn_v": "Q5_0", "output": "Q4_0"}, {"qkv0": 2}, NIBBLES[32, True]),
        ({"other": "Q4_0", "output": "Q6_K"}, {"head": 2}, NIBBLES[32, True]),
        ({"other": "Q4_0", "ffn_down": "F16", "output": "Q8_0"}, {"down0": 4, "head": 2}, NIBBLES[32, True]),
        ({"other": "Q8_0", "output": "Q8_0", "token_embd": "Q8_0"}, EIGHT, NIBBLES[64, False]),
        (
            {"other": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q5_0", "ffn_down": "Q6_K", "output": "Q6_K"}
            | {"token_embd": "Q4_K"},
            {"qkv0": 2, "o0": 2, "down0": SIX_BITS, "head": SIX_BITS},
            NESTED,
        ),
        (
            {"other": "Q5_K", "attn_output": "Q5_1", "ffn_down": "Q8_0", "output": "Q6_K"},
            EIGHT | {"head": SIX_BITS},
            NESTED,
        ),
        (
            {"other": "Q4_K", "attn_output": "Q4_1", "ffn_up": "Q5_K", "output": "F16"},
            {"o0": 2, "gate_up0": 2, "head": 4},
            NESTED,
        ),
    ],
    ids=[
        "Q4_1",
        "Q4_0 with Q5_0",
        "Q4_0 with Q6_K",
        "Q4_0 with 16 bits and Q8_0",
        "Q8_0",
        "as Q4_K_M",
        "as Q5_K_M",
        "Q4_K with Q4_1",
    ],
)
def test_a_quantised_file_gives_the_bits_of_its_dequantised_values(
    types: dict[str, str], widths: dict[str, int], nibbles: GroupRounding, tmp_path: Path
) -> None:
    location = written(tmp_path / "tiny.gguf", CONFIG, types)
    options = LoadOptions(dtype=torch.float16, device=CPU, max_num_seqs=4, max_model_len=64)
    model, form = kept(location, options)
    assert form.nibbles is nibbles
    assert dict(form.widths) == widths
    whole = load_model(location, CONFIG, options)
    assert isinstance(model.weights.embedding, RowTable) is ("token_embd" in types)
    assert all(torch.equal(a, b) for a, b in zip(logits_of(model), logits_of(whole), strict=True))


@pytest.mark.parametrize("model", ["llama-3.2-1b", "llama-3.1-8b"])
def test_a_q4_k_m_file_of_a_built_in_shape_is_kept_as_its_shipped_program_has_it(model: str) -> None:
    config = builtin_config(model)
    eighth = config.num_layers // 8

    def types(index: int | None, name: str) -> list[str]:
        if index is None:
            return ["Q6_K"]
        more = index < eighth or index >= 7 * eighth or (index - eighth) % 3 == 2
        better = "Q6_K" if more else "Q4_K"
        kinds = {"qkv": ["Q4_K", "Q4_K", better], "o": ["Q4_K"], "gate_up": ["Q4_K", "Q4_K"], "down": [better]}
        return kinds[name]

    parts: Any = SimpleNamespace(group_formats=lambda *place: [BLOCK_FORMATS[kind] for kind in types(*place)])
    form = kept_format(parts, config, batch=1)
    assert is_shipped(DecodeStep(config, 1, form)), "run make kernels"
    assert shipped_launchers(DecodeStep(config, 1, form)), "run make kernels"
    assert not is_shipped(DecodeStep(config, 1, mixed(NESTED, {"head": SIX_BITS})))


def test_zero_points_that_the_first_matrix_lacks_are_not_passed_over(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, config_of("llama", **SIZES, head_dim=64, num_hidden_layers=1))
    made = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128)
    quantise_checkpoint(tmp_path, lambda rows, cols: packed(rows, cols, group=128, sym=rows <= 256), made)
    location = ModelLocation("hf", tmp_path, "tiny")
    config, options = load_config(location), LoadOptions(torch.float16, CPU, max_num_seqs=4, max_model_len=16)
    with open_parts(location, config, options) as parts:
        form = kept_format(parts, config, batch=4)
        assert not form.nibbles.minima
        stream = WeightStream(plan_decode(DecodeStep(config, 4, form), workers=3).program, torch.float16, CPU, form)
        with pytest.raises(OutOfReachError, match="with and without zero points"):
            stream_kept(parts, config, stream, 16)


def test_a_minimum_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    location = written(tmp_path / "tiny.gguf", CONFIG, {"other": "Q4_1"})
    at = GGUFStore.open(tmp_path / "tiny.gguf").tensors["blk.0.attn_q.weight"].offset + 2
    data = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(data[:at] + np.float16(np.inf).tobytes() + data[at + 2 :])
    refused = pytest.raises(WeightsError, match=r"tensor 'blk.0.attn_q.weight': scales or minima that are no finite")
    with open_parts(location, CONFIG, LoadOptions(torch.float16, CPU)) as parts, refused:
        parts.grouped(0, "qkv")


def test_a_file_of_wide_weights_is_dequantised(tmp_path: Path) -> None:
    options = LoadOptions(dtype=torch.float16, device=CPU, max_num_seqs=1, max_model_len=64)
    for number, kind in enumerate(("F16", "F32")):
        location = written(tmp_path / f"{number}.gguf", CONFIG, {"other": kind})
        with open_parts(location, CONFIG, options) as parts:
            assert kept_format(parts, CONFIG, batch=1) is None


def test_nothing_of_a_quantised_file_is_kept_unpacked(
    planned: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_wave_module, "_has_room", lambda stream: True)
    location = written(tmp_path / "tiny.gguf", CONFIG, {"other": "Q4_1", "output": "Q4_1"})
    given = {"dtype": torch.bfloat16, "load_format": "auto"}
    for keeps in (True, False):
        _, wave = load_wave(location, CONFIG, how(tmp_path, keeps=keeps, **given))
        assert wave.stream.keeping is not keeps


def test_what_a_load_begins_with_is_for_the_bits_that_a_file_is_kept_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = written(tmp_path / "tiny.gguf", CONFIG, {"other": "Q4_1", "attn_output": "F16", "output": "Q8_0"})
    dense = written(tmp_path / "dense.gguf", CONFIG, {"other": "F16"})
    seen: list[KeptBits | None] = []

    @contextmanager
    def noting(path: str, config: ModelConfig, options: LoadOptions) -> Iterator[None]:
        seen.append(options.kept)
        yield None

    monkeypatch.setattr(first_load, "compilers", noting)
    given: dict[str, Any] = {"device": torch.device("cuda", 0), "dtype": torch.bfloat16, "load_format": "auto"}
    asked = how(tmp_path, weight_format=COMPACT, keeps=True, max_num_seqs=12, **given)
    for path, file, options in (
        ("wave", location, asked), ("auto", dense, asked), ("wave", location, replace(asked, keeps=False)),
        ("graph", location, asked), ("wave", location, replace(asked, load_format="dummy")),
    ):  # fmt: skip
        with warm_up(path, file, CONFIG, options) as warm:
            assert warm.kept is seen[-1]
            assert warm.max_num_seqs == 12
    form = mixed(NIBBLES[32, True], {"o0": 4, "head": 2})
    assert seen == [KeptBits(form, 8), KeptBits(), KeptBits(), None, KeptBits()]


def test_what_a_checkpoint_asks_for_in_vain_is_said_by_the_load_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint(tmp_path, config_of("llama", **SIZES, head_dim=64, num_hidden_layers=1))
    quantise_checkpoint(tmp_path, blocks, FP8 | {"weight_block_size": [128, 128]})
    location = ModelLocation("hf", tmp_path, "tiny")
    options = replace(how(tmp_path, keeps=True, load_format="auto"), device=torch.device("cuda", 0))
    assert find_kept(location, load_config(location), options).form is not None
    assert not caplog.records


def test_the_wave_takes_a_quantised_file_as_it_is_unless_something_else_is_asked_for(
    planned: list[Any], tmp_path: Path
) -> None:
    location = written(tmp_path / "tiny.gguf", CONFIG, {"other": "Q4_1", "output": "Q8_0"})
    for changes, keeps in (
        ({"dtype": "float16"}, True),
        ({}, True),
        ({"compact": False}, False),
        ({"quantization": "int8"}, False),
    ):
        asked = EngineOptions(max_num_seqs=2, **changes)
        found = resolve_load(asked, CONFIG, device=torch.device("cuda"), decode="auto", settings=Settings.from_env())
        model, wave = load_wave(location, CONFIG, replace(found, device=CPU, max_model_len=64, cache_dir=tmp_path))
        assert wave.stream.gains_apart is keeps
        assert isinstance(model.weights.head, StreamMatrix)
    assert [isinstance(form, MixedFormat) for form in planned] == [True, False, False]  # of both dtypes one plan


_BETWEEN = {"other": "Q4_0", "ffn_down": "Q8_0", "output": "F16"}  # 0.9 bytes a weight; compact ones take 1.6


@pytest.mark.parametrize(
    ("types", "dtype", "rows", "keeps"),
    [
        ({"other": "Q4_0", "output": "F16"}, torch.bfloat16, 8, True),
        ({"other": "Q4_0", "output": "Q8_0"}, torch.bfloat16, 12, True),
        ({"other": "Q8_0", "output": "F16"}, torch.float16, 12, False),
        (_BETWEEN, torch.float16, 8, True),
        (_BETWEEN, torch.bfloat16, 12, False),
    ],
)
def test_a_step_of_more_sequences_than_16_bit_matrices_leave_room_for_takes_two_launches_if_they_read_less(
    planned: list[Any], tmp_path: Path, types: dict[str, str], dtype: torch.dtype, rows: int, keeps: bool
) -> None:
    location = written(tmp_path / "tiny.gguf", CONFIG, types)
    form = COMPACT if dtype is torch.bfloat16 else None
    given = {"dtype": dtype, "weight_format": form, "max_num_seqs": 12, "load_format": "auto"}
    load_wave(location, CONFIG, how(tmp_path, keeps=True, **given))
    assert PlainWave.made[-1].batch == rows
    assert [isinstance(form, MixedFormat) for form in planned] == [keeps]
