"""Models by Hugging Face id, through huggingface_hub (which honours HF_HOME, HF_HUB_OFFLINE and HF_TOKEN)."""

import errno
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onewave.base.errors import CapacityError, DownloadError, ModelNotFoundError, OnewaveError

_TEXT_FILES = ("*.json", "tokenizer*", "*.jinja", "*.model")
_WEIGHT_FILES = ("*.safetensors",)
# Second copies of the weights, in formats of other programs.
_OTHER_COPIES = ("original/*", "onnx/*", "consolidated*", "*.bin", "*.pth")
_LONGEST_MESSAGE = 300


def snapshot(repo_id: str, *, revision: str | None, weights: bool, progress: bool) -> Path:
    """Return the directory of a repository's snapshot, fetching what is missing.

    weights: fetch the safetensors files as well as the configuration and the tokenizer.
    Raises ModelNotFoundError for a repository or revision that is not there, DownloadError for every other failure,
    CapacityError when the disk is full.
    """
    import huggingface_hub

    library: Any = huggingface_hub
    patterns = [*_TEXT_FILES, *(_WEIGHT_FILES if weights else ())]
    try:
        with _progress_bars(progress):
            path: str = library.snapshot_download(
                repo_id, revision=revision, allow_patterns=patterns, ignore_patterns=list(_OTHER_COPIES)
            )
            return Path(path)
    except Exception as error:
        raise _explained(error, repo_id, revision) from error


def _explained(error: Exception, repo_id: str, revision: str | None) -> OnewaveError:
    """Return the onewave error that says what huggingface_hub's exception means for the user."""
    from huggingface_hub import errors

    what = f"Hugging Face model {repo_id}" + (f" at revision {revision}" if revision else "")
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    reason = first_line[:_LONGEST_MESSAGE]
    if isinstance(error, errors.GatedRepoError):
        return DownloadError(
            what, got="its owner asks you to accept terms first", next="Do so on its page, then run `hf auth login`."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(what, got="no such revision")
    if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
        return ModelNotFoundError(
            what, got="no such repository, or a private one", next="Check the id, or run `hf auth login`."
        )
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        return DownloadError(
            what,
            got="not in the local cache, and the hub can't be reached",
            next="Go online (HF_HUB_OFFLINE unset) to fetch it once, or give the path of a local directory.",
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError(
            f"disk space for {what}", got=reason, next="Free some space, or set HF_HOME to a larger disk."
        )
    return DownloadError(what, got=f"{type(error).__name__} ({reason})", next="Check the network and try again.")


@contextmanager
def _progress_bars(enabled: bool) -> Generator[None]:
    """Silence huggingface_hub's progress bars for the block when they are not wanted."""
    from huggingface_hub import utils

    tools: Any = utils
    if enabled or tools.are_progress_bars_disabled():
        yield
        return
    tools.disable_progress_bars()
    try:
        yield
    finally:
        tools.enable_progress_bars()
