"""Every way in which huggingface_hub fails becomes one line."""

import errno

import huggingface_hub
import pytest
from huggingface_hub import errors

from kit.refusals import refused
from onewave.base.errors import CapacityError, DownloadError, ModelNotFoundError
from onewave.weights.fetch.hub import snapshot


def failing(error):
    def snapshot_download(*args, **kwargs):
        raise error

    return snapshot_download


def hub_error(kind, message="404 Client Error.\n\nsee the page"):
    """Make an error without the HTTP response that some of their constructors ask for."""
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    return error


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (hub_error(errors.RepositoryNotFoundError), ModelNotFoundError, "no such repository"),
        (hub_error(errors.RevisionNotFoundError), ModelNotFoundError, "no such revision"),
        (hub_error(errors.GatedRepoError), DownloadError, "accept terms"),
        (hub_error(errors.HFValidationError), ModelNotFoundError, "no such repository"),
        (hub_error(errors.LocalEntryNotFoundError), DownloadError, "HF_HUB_OFFLINE"),
        (hub_error(errors.OfflineModeIsEnabled), DownloadError, "HF_HUB_OFFLINE"),
        (hub_error(errors.HfHubHTTPError, "503\nagain"), DownloadError, "HfHubHTTPError (503)"),
        (OSError(errno.ENOSPC, "No space left"), CapacityError, "HF_HOME"),
        (ConnectionError("refused\nby peer"), DownloadError, "ConnectionError (refused)"),
        (RuntimeError(), DownloadError, "RuntimeError"),
    ],
)
def test_a_failure_says_what_it_means_for_the_user(monkeypatch, error, kind, words):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing(error))
    with refused(kind, words, "org/name at revision v1"):
        snapshot("org/name", revision="v1", weights=True, progress=False)


def test_an_interrupt_goes_through(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        snapshot("org/name", revision=None, weights=True, progress=False)


def test_only_what_is_needed_is_asked_for(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda repo_id, **options: asked.append(options) or str(tmp_path)
    )
    assert snapshot("org/name", revision=None, weights=True, progress=False) == tmp_path
    snapshot("org/name", revision=None, weights=False, progress=True)
    assert "*.safetensors" in asked[0]["allow_patterns"]
    assert "*.safetensors" not in asked[1]["allow_patterns"]
    assert "*.json" in asked[1]["allow_patterns"]
    assert not any("bin" in pattern for pattern in asked[0]["allow_patterns"])
    assert not huggingface_hub.utils.are_progress_bars_disabled()


def test_offline_mode_is_honoured_without_a_network(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DownloadError, match="not in the local cache"):
        snapshot("org/name", revision=None, weights=True, progress=False)
