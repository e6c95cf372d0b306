"""resolve(): what a model's name means, and what it says when that is nothing."""

import os
from pathlib import Path

import pytest

from kit.refusals import refused
from kit.sample_files import small_gguf
from onewave.base.errors import ConfigError, InvalidArgumentError, ModelNotFoundError, UnsupportedError
from onewave.base.settings import Settings
from onewave.weights.fetch import download, hub, sources
from onewave.weights.fetch.aliases import ALIASES, DEFAULT_ALIAS
from onewave.weights.fetch.sources import ModelLocation, resolve


@pytest.fixture
def settings(tmp_path):
    return Settings(cache_dir=tmp_path / "cache", num_threads=1)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("this test must not fetch anything")

    monkeypatch.setattr(download, "download_wheel", refuse)
    monkeypatch.setattr(hub, "snapshot", refuse)


@pytest.fixture
def builtin(tmp_path, monkeypatch):
    """A table of built-in configurations with one row, tiny-1b."""
    directory = tmp_path / "builtin"
    directory.mkdir()
    (directory / "tiny-1b.json").write_text("{}")
    monkeypatch.setattr(sources, "BUILTIN_DIR", directory)
    return directory


def hf_directory(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_a_directory_with_a_config_is_a_hugging_face_model(tmp_path, settings):
    path = hf_directory(tmp_path / "my-model")
    (path / "extra.gguf").write_bytes(small_gguf())
    assert resolve(str(path), settings) == ModelLocation("hf", path, "my-model")
    assert resolve(path, settings, load_format="dummy").kind == "hf"


def test_a_gguf_file_and_a_directory_with_nothing_else_are_a_gguf_model(tmp_path, settings):
    with pytest.raises(ConfigError, match=rf"no config\.json: {tmp_path}"):
        resolve(str(tmp_path), settings)
    path = tmp_path / "tiny.Q4_1.GGUF"
    path.write_bytes(small_gguf())
    for given in (path, tmp_path):
        assert resolve(str(given), settings) == ModelLocation("gguf", path, "tiny.Q4_1")
    (tmp_path / "b.gguf").write_bytes(small_gguf())
    with pytest.raises(ConfigError, match=r"b\.gguf, tiny\.Q4_1\.GGUF"):
        resolve(str(tmp_path), settings)


def test_a_split_gguf_is_known_by_its_first_piece(tmp_path, settings):
    pieces = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for piece in pieces:
        piece.write_bytes(small_gguf())
    for given in (pieces[1], tmp_path):
        assert resolve(str(given), settings).path == pieces[0]


def test_a_gguf_file_is_known_by_its_first_bytes_whatever_it_is_called(tmp_path, settings):
    path = tmp_path / "sha256-7462734796d67c40.ab"
    path.write_bytes(small_gguf())
    assert resolve(path, settings) == ModelLocation("gguf", path, "sha256-7462734796d67c40.ab")
    path.write_bytes(b"GGU")
    with pytest.raises(ModelNotFoundError, match="not a model file"):
        resolve(path, settings)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
def test_a_lora_adapter_alone_is_refused_by_that_name(tmp_path, settings, monkeypatch, name):
    (tmp_path / name).write_text("{}")
    monkeypatch.setattr(hub, "snapshot", lambda *args, **kwargs: tmp_path)
    for model in (str(tmp_path), "someone/adapter"):
        with pytest.raises(
            UnsupportedError, match=f"{tmp_path}: a LoRA adapter alone; .* Merge it into its base model"
        ):
            resolve(model, settings)


def test_a_relative_path_and_a_home_path_work_and_win_over_an_id_of_their_name(tmp_path, settings, monkeypatch):
    hf_directory(tmp_path / "org" / "name")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/org/name", settings).path == tmp_path / "org" / "name"
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name", settings).path == Path("org/name")
    monkeypatch.chdir(tmp_path / "org" / "name")
    assert resolve(".", settings).name == "name"


@pytest.mark.parametrize(
    "model",
    ["./no", "/no/such", "../no", "~/no", "no.gguf", "a\\b", "org/no.gguf", "a/b/c", "no-such-alias", "\0", "x" * 9999],
)
def test_what_does_not_exist_is_named_beside_what_is_accepted(settings, model):
    with refused(ModelNotFoundError, repr(model), DEFAULT_ALIAS):
        resolve(model, settings)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json"])
def test_a_file_that_is_no_gguf_says_to_give_its_directory(tmp_path, settings, name):
    (tmp_path / name).write_text("{}")
    with pytest.raises(ModelNotFoundError, match=r"a GGUF file, or a directory"):
        resolve(str(tmp_path / name), settings)
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(ModelNotFoundError, match="not a model file"):
        resolve(str(tmp_path / "m.gguf"), settings)


def test_an_adapters_file_says_what_it_is(tmp_path, settings):
    (tmp_path / "adapter_model.safetensors").write_text("{}")
    with pytest.raises(UnsupportedError, match="a LoRA adapter alone"):
        resolve(tmp_path / "adapter_model.safetensors", settings)


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("", {}, "model"),
        ("  ", {}, "model"),
        (DEFAULT_ALIAS, {"load_format": "pickle"}, "'pickle'; allowed: auto, dummy"),
        *(("org/name", {"revision": wrong}, "revision: .* allowed: a branch") for wrong in (5, "", " ", b"main")),
        (DEFAULT_ALIAS, {"revision": "main"}, "revision"),
        (".", {"revision": "main"}, "revision"),
    ],
)
def test_arguments_that_name_nothing_are_refused(tmp_path, settings, monkeypatch, model, options, says):
    monkeypatch.chdir(hf_directory(tmp_path / "m"))
    with pytest.raises(InvalidArgumentError, match=says):
        resolve(model, settings, **options)


def test_an_alias_is_fetched_into_the_cache(settings, monkeypatch):
    path = settings.cache_dir / "m.gguf"
    monkeypatch.setattr(
        download, "fetch", lambda model, cache, *, progress: path if cache == settings.cache_dir else None
    )
    assert resolve(DEFAULT_ALIAS, settings) == ModelLocation("gguf", path, DEFAULT_ALIAS)


def test_a_builtin_configuration_needs_dummy_weights_whatever_directory_has_its_name(
    builtin, settings, tmp_path, monkeypatch
):
    (tmp_path / "tiny-1b").mkdir()
    monkeypatch.chdir(tmp_path)
    found = resolve("tiny-1b", settings, load_format="dummy")
    assert found == ModelLocation("builtin", builtin / "tiny-1b.json", "tiny-1b")
    with pytest.raises(ModelNotFoundError, match='Add load_format="dummy"'):
        resolve("tiny-1b", settings)


@pytest.mark.parametrize(("load_format", "weights"), [("auto", True), ("dummy", False)])
def test_an_id_is_fetched_from_the_hub_without_weights_that_are_not_wanted(
    tmp_path, settings, monkeypatch, load_format, weights
):
    calls = []
    path = hf_directory(tmp_path / "snapshot")
    monkeypatch.setattr(hub, "snapshot", lambda repo_id, **options: calls.append((repo_id, options)) or path)
    location = resolve("org/name", settings, revision="v1", load_format=load_format, progress=False)
    assert location == ModelLocation("hf", path, "org/name")
    assert calls == [("org/name", {"revision": "v1", "weights": weights, "progress": False})]


def test_an_id_without_a_config_is_named(tmp_path, settings, monkeypatch):
    monkeypatch.setattr(hub, "snapshot", lambda repo_id, **options: tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"org/name: has no config\.json.*GGUF"):
        resolve("org/name", settings)


def test_the_table_of_aliases_is_complete():
    assert DEFAULT_ALIAS in ALIASES
    for alias, model in ALIASES.items():
        assert alias == model.alias
        assert "/" not in alias
        assert len(model.wheel_sha256) == len(model.file_sha256) == 64
        assert model.file_name.endswith(".gguf")
