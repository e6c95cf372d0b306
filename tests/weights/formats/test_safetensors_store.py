"""SafetensorsStore: what it reads, and the one clear error for everything it can't."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from kit.refusals import refused
from kit.sample_files import entry, safetensors_bytes, small_safetensors
from onewave.base.errors import UnsupportedError, WeightsError
from onewave.weights.formats.safetensors_store import SafetensorsStore


def write(directory, content, name="model.safetensors"):
    (directory / name).write_bytes(content)
    return directory


def write_shards(directory, weight_map, shards):
    for name, tensors in shards.items():
        save_file(tensors, directory / name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def test_a_single_file_gives_back_what_was_saved(tmp_path):
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
    saved = {f"t{i}": (torch.randn(3, 5, generator=torch.manual_seed(i)) * 4).to(d) for i, d in enumerate(dtypes)}
    save_file(saved, tmp_path / "model.safetensors")
    store = SafetensorsStore.open(tmp_path)
    assert store.tensors.keys() == saved.keys()
    assert store.tensors["t2"].dtype == "BF16"
    assert store.tensors["t2"].nbytes == 30
    for name, tensor in saved.items():
        assert store.tensors[name].shape == (3, 5)
        assert torch.equal(store.load(name), tensor)
        assert store.load(name).dtype is tensor.dtype
        assert store.load_quantized(name) is None


def test_empty_tensors_and_scalars_of_a_lone_file_of_any_name_outlive_the_store(tmp_path):
    save_file({"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5)}, tmp_path / "weights.safetensors")
    store = SafetensorsStore.open(tmp_path)
    empty, scalar = store.load("empty"), store.load("scalar")
    store.close()
    assert empty.shape == (0, 3)
    assert scalar.item() == 2.5


def test_tensors_beyond_the_first_4_gib_are_read(tmp_path):
    far = 5 << 30
    header = json.dumps(
        {
            "near": {"dtype": "U8", "shape": [far], "data_offsets": [0, far]},
            "far": {"dtype": "F32", "shape": [2], "data_offsets": [far, far + 8]},
        }
    ).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:  # its middle is a hole, which takes no room on a disk
        file.write(len(header).to_bytes(8, "little") + header)
        file.seek(far, os.SEEK_CUR)
        file.write(torch.tensor([1.5, -2.0]).numpy().tobytes())
    assert SafetensorsStore.open(tmp_path).load("far").tolist() == [1.5, -2.0]


def test_shards_are_read_as_one_model(tmp_path):
    saved = {"a": torch.ones(2), "b": torch.zeros(3)}
    write_shards(
        tmp_path,
        {"a": "m-1.safetensors", "b": "m-2.safetensors"},
        {f"m-{i + 1}.safetensors": {n: t} for i, (n, t) in enumerate(saved.items())},
    )
    store = SafetensorsStore.open(tmp_path)
    assert store.tensors["b"].file.name == "m-2.safetensors"
    assert all(torch.equal(store.load(name), tensor) for name, tensor in saved.items())


@pytest.mark.parametrize("name", ["model.safetensors", "adapter_model.safetensors"])
def test_the_tensors_of_a_lora_adapter_are_refused_by_that_name(tmp_path, name):
    """Some tools write the base model's config.json beside them."""
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file({f"{layer}.lora_A.weight": torch.ones(2, 4), f"{layer}.lora_B.weight": torch.ones(4, 2)}, tmp_path / name)
    with pytest.raises(UnsupportedError, match=f"{tmp_path}: a LoRA adapter alone"):
        SafetensorsStore.open(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["0 bytes"]),
        (b"\x01\x02", ["2 bytes"]),
        (small_safetensors()[:60], ["truncated"]),
        (small_safetensors()[:-1], ["'b.weight'", "truncated"]),
        (small_safetensors() + b"\0", ["33 bytes of data", "32"]),
        (safetensors_bytes({}, length=1 << 63), ["header should have 9223372036854775808"]),
        (safetensors_bytes(b"[1]"), ["not a JSON object"]),
        (safetensors_bytes(b"{" + b'"a":{' * 100_000), ["JSON"]),
        (safetensors_bytes(b'{"a": \xff}'), ["not valid JSON"]),
        (safetensors_bytes(b'{"a": 1, "a": 2}'), ["'a' appears twice"]),
        (safetensors_bytes(b'{"a": ' + b"9" * 5000 + b"}"), ["not valid JSON"]),
        (safetensors_bytes({"__metadata__": {"a": 1}}), ["__metadata__"]),
        (safetensors_bytes({"w": 1}), ["'w'", "data_offsets"]),
        (safetensors_bytes({"w": entry("F4_E9", [1], 0, 4)}, bytes(4)), ["'w'", "F4_E9", "BF16"]),
        (safetensors_bytes({"w": entry("F32", [1.0], 0, 4)}, bytes(4)), ["'w'", "shape"]),
        (safetensors_bytes({"w": entry("F32", [-1], 0, 4)}, bytes(4)), ["'w'", "shape"]),
        (safetensors_bytes({"w": entry("F32", [True], 0, 4)}, bytes(4)), ["'w'", "shape"]),
        (safetensors_bytes({"w": entry("F32", [1 << 40, 1 << 40], 0, 4)}, bytes(4)), ["'w'", "shape"]),
        (safetensors_bytes({"w": entry("F32", [1] * 65, 0, 4)}, bytes(4)), ["'w'", "shape", "up to 64 whole numbers"]),
        (safetensors_bytes({"w": entry("F32", [2], 0, 4)}, bytes(4)), ["'w'", "takes 4 bytes", "8"]),
        (safetensors_bytes({"w": entry("F32", [1], 4, 0)}, bytes(4)), ["'w'", "data_offsets"]),
        (safetensors_bytes({"w": entry("F32", [1], 4, 8)}, bytes(8)), ["'w'", "gap"]),
        (
            safetensors_bytes({"v": entry("F32", [1], 0, 4), "w": entry("F32", [1], 2, 6)}, bytes(6)),
            ["'w'", "overlaps"],
        ),
        (safetensors_bytes({"\ud800": entry("F32", [1], 0, 8)}, bytes(8)), ["'\\ud800'"]),
    ],
)
def test_every_corruption_is_one_line_that_names_the_file_and_the_tensor(tmp_path, content, words):
    with refused(WeightsError, str(tmp_path / "model.safetensors"), *words):
        SafetensorsStore.open(write(tmp_path, content))


OUTSIDE = ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", "", "a\\b.safetensors", 3]
ONE, TWO = "m-1.safetensors", "m-2.safetensors"


@pytest.mark.parametrize(
    ("weight_map", "shards", "says"),
    [
        ({"a": ONE, "b": TWO}, {ONE: ["a"]}, r"m-2\.safetensors: missing.*'b'"),
        ({"a": "a" * 300 + ".safetensors"}, {}, r"missing.*'a'"),
        ({"a": ONE, "b": ONE}, {ONE: ["a"]}, r"m-1\.safetensors: has no tensor 'b'"),
        (
            {"a": ONE, "b1": ONE, "b2": TWO},
            {ONE: ["a", "b1"], TWO: ["a", "b2"]},
            r"m-2\.safetensors: tensor 'a' is also in m-1\.safetensors",
        ),
        *(({"a": shard}, {}, r"index\.json: puts tensor 'a' in") for shard in OUTSIDE),
    ],
)
def test_an_index_and_shards_that_do_not_fit_each_other_are_refused(tmp_path, weight_map, shards, says):
    tensors = {file: {name: torch.ones(1) for name in names} for file, names in shards.items()}
    write_shards(tmp_path, weight_map, tensors)
    with pytest.raises(WeightsError, match=says):
        SafetensorsStore.open(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": 1}', "not json", ""])
def test_a_malformed_index_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightsError, match=r"model\.safetensors\.index\.json"):
        SafetensorsStore.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model-00001-of-00002.safetensors", r"index\.json: missing"),
        ("pytorch_model.bin", r"pickle \(pytorch_model\.bin\).*save_pretrained"),
        ("notes.txt", r"no weights.*model\.safetensors"),
        (None, "can't be read"),
    ],
)
def test_a_directory_without_whole_weights_says_what_is_looked_for(tmp_path, name, says):
    if name is not None:
        write(tmp_path, small_safetensors(), name)
    with pytest.raises(WeightsError, match=says):
        SafetensorsStore.open(tmp_path if name else tmp_path / "absent")


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_and_a_link_that_leads_nowhere_are_there_and_can_not_be_read(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(WeightsError, match="not a file"):
        SafetensorsStore.open(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(tmp_path / "gone")
    with pytest.raises(WeightsError, match=rf"{name}: (no such file|not a file|can't be read)"):
        SafetensorsStore.open(tmp_path)


def test_an_unknown_tensor_is_refused_by_name(tmp_path):
    store = SafetensorsStore.open(write(tmp_path, small_safetensors()))
    with pytest.raises(WeightsError, match="no tensor 'c'"):
        store.load("c")
    with pytest.raises(WeightsError, match="no tensor 'c'"):
        store.load_quantized("c")
