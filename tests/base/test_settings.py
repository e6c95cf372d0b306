"""Environment variables and their page."""

import re
from pathlib import Path

import pytest

from kit.paths import DOCS
from onewave.base import settings
from onewave.base.errors import InvalidArgumentError

PAGE = DOCS / "reference" / "environment.md"
VARIABLE = re.compile(r"\bONEWAVE_[A-Z_]+\b")


def test_the_reference_lists_every_variable_that_is_read():
    source = Path(settings.__file__).read_text(encoding="utf-8")
    read = set(re.findall(r'"(ONEWAVE_[A-Z_]+)"', source))
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `ONEWAVE_")]
    assert {VARIABLE.findall(row)[0] for row in rows} == read


@pytest.mark.parametrize(("text", "meant"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_debugging_is_on_or_off(text: str | None, meant: bool):
    env = {} if text is None else {"ONEWAVE_DEBUG": text}
    assert settings.Settings.from_env(env).debug is meant


def test_the_home_of_nobody_is_a_name_like_any_other():
    assert settings.Settings.from_env({"ONEWAVE_CACHE": "~no-such-user/x"}).cache_dir.name == "x"
    assert "~" not in str(settings.Settings.from_env({"ONEWAVE_CACHE": "~/x"}).cache_dir)


def test_debugging_takes_nothing_else():
    with pytest.raises(InvalidArgumentError, match="ONEWAVE_DEBUG: 'yes'; allowed: 0 or 1"):
        settings.Settings.from_env({"ONEWAVE_DEBUG": "yes"})


@pytest.mark.parametrize(("text", "meant"), [(None, True), ("", True), ("1", True), ("0", False)])
def test_prebuilt_kernels_are_taken_unless_told_otherwise(text: str | None, meant: bool):
    env = {"ONEWAVE_NUM_THREADS": "many"} | ({} if text is None else {"ONEWAVE_PREBUILT": text})
    assert settings.takes_prebuilt(env) is meant
    with pytest.raises(InvalidArgumentError, match="ONEWAVE_PREBUILT: 'no'; allowed: 0 or 1"):
        settings.takes_prebuilt({"ONEWAVE_PREBUILT": "no"})


def test_without_a_home_the_cache_has_to_be_named(monkeypatch: pytest.MonkeyPatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(settings.Path, "home", no_home)
    with pytest.raises(InvalidArgumentError, match=r"no home\. Set ONEWAVE_CACHE"):
        settings.Settings.from_env({})
    assert settings.Settings.from_env({"ONEWAVE_CACHE": "/models"}).cache_dir == Path("/models")
