"""SafetensorsStore: what it reads, and the one clear error for everything it can't."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import save_file

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


def test_empty_tensors_and_scalars_are_read(tmp_path):
    saved = {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5)}
    save_file(saved, tmp_path / "model.safetensors")
    store = SafetensorsStore.open(tmp_path)
    assert store.load("empty").shape == (0, 3)
    assert store.load("scalar").item() == 2.5


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


def test_tensors_outlive_the_store(tmp_path):
    save_file({"a": torch.arange(1000)}, tmp_path / "model.safetensors")
    store = SafetensorsStore.open(tmp_path)
    tensor = store.load("a")
    store.close()
    assert torch.equal(tensor, torch.arange(1000))


def test_a_lone_file_of_another_name_is_read(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "weights.safetensors")
    assert SafetensorsStore.open(tmp_path).load("a").tolist() == [1, 1]


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
        (safetensors_bytes(b'{"a": \xff}'), ["malformed"]),
        (safetensors_bytes(b'{"a": 1, "a": 2}'), ["'a' appears twice"]),
        (safetensors_bytes(b'{"a": ' + b"9" * 5000 + b"}"), ["malformed"]),
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
    with pytest.raises(WeightsError) as caught:
        SafetensorsStore.open(write(tmp_path, content))
    message = str(caught.value)
    assert "\n" not in message
    message.encode()
    for word in [str(tmp_path / "model.safetensors"), *words]:
        assert word in message


def test_a_missing_shard_is_named_with_a_tensor_of_it(tmp_path):
    write_shards(tmp_path, {"a": "m-1.safetensors", "b": "m-2.safetensors"}, {"m-1.safetensors": {"a": torch.ones(1)}})
    with pytest.raises(WeightsError, match=r"m-2\.safetensors: missing.*'b'"):
        SafetensorsStore.open(tmp_path)


def test_an_index_that_names_a_tensor_its_shard_lacks_is_refused(tmp_path):
    write_shards(tmp_path, {"a": "m-1.safetensors", "b": "m-1.safetensors"}, {"m-1.safetensors": {"a": torch.ones(1)}})
    with pytest.raises(WeightsError, match=r"m-1\.safetensors: has no tensor 'b'"):
        SafetensorsStore.open(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    shards = {f"m-{i}.safetensors": {"a": torch.ones(1), f"b{i}": torch.ones(1)} for i in (1, 2)}
    weight_map = {"a": "m-1.safetensors", "b1": "m-1.safetensors", "b2": "m-2.safetensors"}
    with pytest.raises(WeightsError, match=r"m-2\.safetensors: tensor 'a' is also in m-1\.safetensors"):
        SafetensorsStore.open(write_shards(tmp_path, weight_map, shards))


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", "", "a\\b.safetensors", 3]
)
def test_an_index_may_only_name_files_beside_it(tmp_path, shard):
    write_shards(tmp_path, {"a": shard}, {})
    with pytest.raises(WeightsError, match=r"index\.json: puts tensor 'a' in"):
        SafetensorsStore.open(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": 1}', "not json", ""])
def test_a_malformed_index_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightsError, match=r"model\.safetensors\.index\.json"):
        SafetensorsStore.open(tmp_path)


def test_shards_without_an_index_ask_for_it(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(WeightsError, match=r"index\.json: missing"):
        SafetensorsStore.open(tmp_path)


def test_pickled_weights_are_refused_by_name(tmp_path):
    write(tmp_path, b"\x80\x04cos\nsystem\n", "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"pickle \(pytorch_model\.bin\).*save_pretrained"):
        SafetensorsStore.open(tmp_path)


def test_a_directory_without_weights_says_what_is_looked_for(tmp_path):
    with pytest.raises(WeightsError, match=r"no weights.*model\.safetensors"):
        SafetensorsStore.open(tmp_path)
    with pytest.raises(WeightsError, match="can't be read"):
        SafetensorsStore.open(tmp_path / "absent")


def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="not a file"):
        SafetensorsStore.open(tmp_path)


def test_a_pipe_in_place_of_an_index_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    with pytest.raises(WeightsError, match="not a file"):
        SafetensorsStore.open(tmp_path)


def test_a_shard_whose_name_no_system_takes_is_missing(tmp_path):
    write_shards(tmp_path, {"a": "a" * 300 + ".safetensors"}, {})
    with pytest.raises(WeightsError, match=r"missing.*'a'"):
        SafetensorsStore.open(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_link_that_leads_nowhere_is_there_and_can_not_be_read(tmp_path, name):
    (tmp_path / name).symlink_to(tmp_path / "gone")
    with pytest.raises(WeightsError, match=rf"{name}: (no such file|not a file|can't be read)"):
        SafetensorsStore.open(tmp_path)


def test_an_unknown_tensor_is_refused_by_name(tmp_path):
    store = SafetensorsStore.open(write(tmp_path, small_safetensors()))
    with pytest.raises(WeightsError, match="no tensor 'c'"):
        store.load("c")
    with pytest.raises(WeightsError, match="no tensor 'c'"):
        store.load_quantized("c")
