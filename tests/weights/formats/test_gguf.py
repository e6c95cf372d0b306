"""GGUFFile and GGUFStore: what they read, and the one clear error for everything they can't."""

import os
import struct

import numpy as np
import pytest
import torch

from kit.refusals import refused
from kit.sample_files import (
    ARRAY,
    BOOL,
    I32,
    STRING,
    U8,
    U16,
    U32,
    gguf_bytes,
    small_gguf,
    small_gguf_tensors,
    text,
)
from onewave.base.errors import WeightsError
from onewave.weights.formats import gguf_file
from onewave.weights.formats.gguf_file import GGUFFile
from onewave.weights.formats.gguf_pieces import piece_paths
from onewave.weights.formats.gguf_store import GGUFStore

F32_ID, F16_ID, BF16_ID = 0, 1, 30


def write(directory, content, name="model.gguf"):
    (directory / name).write_bytes(content)
    return directory / name


def nested_arrays(depth: int) -> bytes:
    """Return a pair whose value is `depth` arrays inside each other."""
    return text("deep") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQ", U8, 0)


def head(num_tensors: int, num_pairs: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs)


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_comes_as_plain_python_values(tmp_path, version):
    content = small_gguf().replace(struct.pack("<I", 3), struct.pack("<I", version), 1)
    metadata = GGUFFile.open(write(tmp_path, content)).metadata
    assert metadata == {
        "general.architecture": "llama",
        "general.alignment": 32,
        "an.int": -5,
        "a.float": 0.5,
        "a.flag": True,
        "some.words": ["a", "Ġb", ""],
        "some.numbers": [1, -2, 3],
        "some.lists": [[1, 2], []],
    }
    assert metadata["a.flag"] is True


def test_metadata_that_is_not_utf8_is_shown_with_replacement_characters(tmp_path):
    content = gguf_bytes([("general.name", STRING, b"Caf\xe9"), ("words", ARRAY, (STRING, [b"caf\xe9", "é"]))])
    assert GGUFFile.open(write(tmp_path, content)).metadata == {
        "general.name": "Caf\ufffd",
        "words": ["caf\ufffd", "é"],
    }


def test_shapes_come_in_torch_order_and_plain_tensors_keep_their_dtype(tmp_path):
    values = np.arange(6, dtype="<f4")
    bf16 = torch.tensor([1.5, -2.0, 3.25]).to(torch.bfloat16)
    tensors = [
        ("matrix", (3, 2), F32_ID, values.tobytes()),
        ("half", (6,), F16_ID, values.astype("<f2").tobytes()),
        ("brain", (3,), BF16_ID, bf16.view(torch.int16).numpy().tobytes()),
        ("wide", (2,), 27, np.array([1, -(1 << 40)], "<i8").tobytes()),
        ("scalar", (), F32_ID, np.float32(7).tobytes()),
    ]
    store = GGUFStore.open(write(tmp_path, gguf_bytes(tensors=tensors)))
    assert store.tensors["matrix"].shape == (2, 3)
    assert torch.equal(store.load("matrix"), torch.arange(6.0).reshape(2, 3))
    assert store.load("half").dtype is torch.float16
    assert torch.equal(store.load("brain"), bf16)
    assert store.load("wide").tolist() == [1, -(1 << 40)]
    assert store.load("scalar").item() == 7
    assert all(store.load_quantized(name) is None for name in store.tensors)


def test_another_alignment_is_honoured(tmp_path):
    tensors = [("a", (1,), F32_ID, struct.pack("<f", 1)), ("b", (1,), F32_ID, struct.pack("<f", 2))]
    content = gguf_bytes([("general.alignment", U32, 256)], tensors, alignment=256)
    store = GGUFStore.open(write(tmp_path, content))
    assert [store.load(name).item() for name in "ab"] == [1, 2]


def test_quantised_tensors_are_views_when_packed_and_float32_when_loaded(tmp_path):
    store = GGUFStore.open(write(tmp_path, small_gguf()))
    rows = store.load_quantized("q4_1.weight")
    assert (rows.qtype, rows.shape, rows.data.shape) == ("Q4_1", (3, 64), (3, 40))
    assert rows.data.base is not None
    loaded = store.load("q4_1.weight")
    assert loaded.dtype is torch.float32
    assert np.array_equal(loaded.numpy(), rows.dequantize())
    store.close()
    assert np.array_equal(loaded.numpy(), rows.dequantize())


def test_a_quantised_tensor_that_is_not_a_matrix_is_only_loaded(tmp_path):
    raw = {name: raw for name, _, _, raw in small_gguf_tensors()}["q4_1.weight"]
    tensors = [("vector", (192,), 3, raw), ("cube", (32, 3, 2), 3, raw)]
    store = GGUFStore.open(write(tmp_path, gguf_bytes(tensors=tensors)))
    assert store.load_quantized("vector") is None
    assert store.load_quantized("cube") is None
    assert store.load("cube").shape == (2, 3, 32)
    assert torch.equal(store.load("cube").flatten(), store.load("vector"))


def test_a_header_that_is_remembered_is_not_read_again(tmp_path, monkeypatch):
    path, headers = write(tmp_path, small_gguf()), {}
    first = GGUFFile.open(path, headers)
    monkeypatch.setattr(gguf_file, "_HeaderReader", None)
    again = GGUFFile.open(path, headers)
    assert (again.metadata, again.tensors) == (first.metadata, first.tensors)
    assert all(np.array_equal(again.raw(tensor), first.raw(tensor)) for tensor in first.tensors.values())
    monkeypatch.undo()
    path.write_bytes(small_gguf()[:-200])  # another size
    with pytest.raises(WeightsError, match="truncated"):
        GGUFFile.open(path, headers)


def test_an_unknown_tensor_is_refused_by_name(tmp_path):
    with pytest.raises(WeightsError, match="no tensor 'c'"):
        GGUFStore.open(write(tmp_path, small_gguf())).load("c")


VALID = small_gguf()
ONE = [("w", (4,), F32_ID, bytes(16))]


@pytest.mark.parametrize(
    "values",
    [(ARRAY, (U8, [1] * 9)), (ARRAY, (STRING, ["a"] * 9)), (ARRAY, (ARRAY, [(U8, [1] * 3)] * 3))],
    ids=["numbers", "strings", "lists"],
)
def test_metadata_of_more_values_than_any_model_has_are_refused(tmp_path, monkeypatch, values):
    """Each is an object, which takes many times the file's bytes."""
    path = write(tmp_path, gguf_bytes([("k", *values)], ONE))
    GGUFStore.open(path)
    monkeypatch.setattr(gguf_file, "_MAX_VALUES", 8)
    with pytest.raises(WeightsError, match=r"its metadata hold \d+ values up to 'k'; allowed: up to 8"):
        GGUFStore.open(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["0 bytes"]),
        (b"GG", ["2 bytes"]),
        (b"PK\x03\x04" + bytes(100), ["not a GGUF file"]),
        (b"GGUF", ["header ends inside 'version'"]),
        (head(0, 0, version=1), ["version 1", "2, 3"]),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), ["big-endian"]),
        (VALID[:200], ["truncated"]),
        (VALID[:-30], ["'q8_0.weight'", "truncated"]),
        (VALID[:-200], ["'q4_1.weight'", "truncated"]),
        (head(1 << 60, 0), ["1152921504606846976 tensors"]),
        (head(0, 1 << 60), ["1152921504606846976 metadata pairs"]),
        (head(0, 1) + text("k") + struct.pack("<IQ", STRING, 1 << 60) + bytes(9), ["'k'", "truncated"]),
        (head(0, 1) + text("k") + struct.pack("<IIQ", ARRAY, STRING, 1 << 60), ["'k'", "1152921504606846976 strings"]),
        (head(0, 1) + text("k") + struct.pack("<IIQ", ARRAY, U8, 1 << 60), ["'k'", "1152921504606846976 values"]),
        (head(0, 1) + text("k") + struct.pack("<IIQ", ARRAY, ARRAY, 1 << 60), ["'k'", "1152921504606846976 arrays"]),
        (head(0, 1) + nested_arrays(1000), ["'deep'", "nests"]),
        (head(0, 1) + text("k") + struct.pack("<I", 99) + bytes(9), ["'k'", "value type 99"]),
        (head(0, 1) + text("k") + struct.pack("<IB", BOOL, 7), ["'k'", "truth value"]),
        (head(0, 1) + text(b"\xff") + bytes(20), ["UTF-8"]),
        (head(0, 1) + text("") + bytes(20), ["metadata key 0", "empty"]),
        (gguf_bytes([("k", U8, 1), ("k", U8, 2)]), ["'k' appears twice"]),
        (gguf_bytes([("general.alignment", U32, 48)], ONE), ["general.alignment", "48", "power of two"]),
        (gguf_bytes([("general.alignment", U32, 0)], ONE), ["general.alignment", "power of two"]),
        (gguf_bytes([("general.alignment", STRING, "32")], ONE), ["general.alignment", "power of two"]),
        (gguf_bytes(tensors=ONE * 2), ["'w' appears twice"]),
        (gguf_bytes(tensors=[("w", (4,), 99, bytes(16))]), ["'w'", "unknown type 99", "Q4_1"]),
        (gguf_bytes(tensors=[("w", (4,), 4, bytes(16))]), ["'w'", "unknown type 4"]),
        (gguf_bytes(tensors=[("w", (33,), 3, bytes(40))]), ["'w'", "33", "Q4_1", "32"]),
        (gguf_bytes(tensors=[("w", (0,), F32_ID, b"")]), ["'w'", "shape [0]"]),
        (gguf_bytes(tensors=[("w", (1 << 40, 1 << 40), F32_ID, b"")]), ["'w'", "shape"]),
        (gguf_bytes(tensors=[("w", (1 << 40,), F32_ID, bytes(16))]), ["'w'", "truncated"]),
        (gguf_bytes(tensors=[("w", (1, 1, 1, 1, 1), F32_ID, bytes(16))]), ["'w'", "5 dimensions"]),
        (head(1, 0) + text("w") + struct.pack("<I", 1 << 31) + bytes(40), ["'w'", "2147483648 dimensions"]),
        (gguf_bytes(tensors=ONE, offsets={"w": 1 << 63}), ["'w'", "truncated"]),
        (gguf_bytes(tensors=[*ONE, ("v", (4,), F32_ID, bytes(16))], offsets={"w": 3}), ["'w'", "multiple"]),
        (gguf_bytes(tensors=[*ONE, ("v", (4,), F32_ID, bytes(16))], offsets={"v": 0}), ["'w' and 'v' overlap"]),
        (gguf_bytes(tensors=[("a\nb", (4,), 99, bytes(16))]), ["'a\\nb'"]),
    ],
)
def test_every_corruption_is_one_line_that_names_the_file_and_the_tensor(tmp_path, content, words):
    with refused(WeightsError, str(tmp_path / "model.gguf"), *words):
        GGUFStore.open(write(tmp_path, content))


def test_the_first_tensor_beyond_the_end_is_the_one_that_is_named(tmp_path):
    tensors = [(f"t{i}", (8,), F32_ID, bytes(32)) for i in range(4)]
    with pytest.raises(WeightsError, match="'t1' ends at byte"):
        GGUFFile.open(write(tmp_path, gguf_bytes(tensors=tensors)[:-70]))


def test_paths_that_are_no_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    for path, words in [(tmp_path, "not a file"), (tmp_path / "pipe.gguf", "not a file"), (tmp_path / "x", "no such")]:
        with pytest.raises(WeightsError, match=words):
            GGUFFile.open(path)


# Split models.


def write_pieces(directory, *, numbers=(0, 1), total=4, repeat=False):
    tensors = small_gguf_tensors()
    halves = [tensors[:2], tensors[:2] if repeat else tensors[2:]]
    for index, (number, half) in enumerate(zip(numbers, halves, strict=True)):
        pairs = [("split.no", U16, number), ("split.count", U16, 2), ("split.tensors.count", I32, total)]
        pairs += [("general.architecture", STRING, "llama")] if index == 0 else []
        write(directory, gguf_bytes(pairs, half), f"m-{index + 1:05}-of-00002.gguf")
    return directory / "m-00001-of-00002.gguf", directory / "m-00002-of-00002.gguf"


def test_a_split_model_opens_by_any_of_its_pieces(tmp_path):
    whole = GGUFStore.open(write(tmp_path, small_gguf()))
    for path in write_pieces(tmp_path):
        store = GGUFStore.open(path)
        assert store.metadata["general.architecture"] == "llama"
        assert store.tensors.keys() == whole.tensors.keys()
        assert all(torch.equal(store.load(name), whole.load(name)) for name in whole.tensors)


def test_the_pieces_of_a_split_model_are_found_by_name(tmp_path):
    names = [path.name for path in piece_paths(tmp_path / "m-00002-of-00003.gguf")]
    assert names == ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"]
    assert piece_paths(tmp_path / "m.gguf") == [tmp_path / "m.gguf"]
    assert piece_paths(tmp_path / "m-00004-of-00003.gguf") == [tmp_path / "m-00004-of-00003.gguf"]


def test_a_missing_and_a_renamed_piece_are_named(tmp_path):
    first, second = write_pieces(tmp_path)
    second.unlink()
    with pytest.raises(WeightsError, match=r"m-00002-of-00002\.gguf: no such file"):
        GGUFStore.open(first)
    first.rename(tmp_path / "model.gguf")
    with pytest.raises(WeightsError, match=r"one of '2' pieces.*00001-of-0000N"):
        GGUFStore.open(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"numbers": (0, 5)}, "piece '5'"), ({"total": 9}, "4 tensors"), ({"repeat": True}, "is also in")],
)
def test_pieces_that_do_not_belong_together_are_refused(tmp_path, changes, words):
    with pytest.raises(WeightsError, match=words):
        GGUFStore.open(write_pieces(tmp_path, **changes)[0])


def test_what_the_gguf_library_writes_is_read(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "é", "漢"])
    writer.add_float32("llama.rope.freq_base", 1e4)
    weight = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("a.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("b.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    store = GGUFStore.open(tmp_path / "model.gguf")
    assert store.metadata["tokenizer.ggml.tokens"] == ["<s>", "é", "漢"]
    assert torch.equal(store.load("b.weight"), torch.as_tensor(weight))
    assert np.array_equal(
        store.load("a.weight").numpy(), gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
    )
