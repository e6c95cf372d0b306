"""A headless Chromium for pages' tests."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def chromium_path(own: str) -> str | None:
    """Where a Chromium is: CHROMIUM says, or Playwright's own download, or one that is installed."""
    given = os.environ.get("CHROMIUM")
    found = [given] if given else [own, *map(shutil.which, CHROMIUM_NAMES)]
    return next((path for path in found if path and Path(path).exists()), None)


def watch(page: Any, complaints: list[str]) -> None:
    """Have what the page or its console complains about added to a list."""
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)


def check(complaints: list[str]) -> None:
    """Fail for any complaint but that of a refused request (status 4xx), which the browser itself reports."""
    assert not [text for text in complaints if "the server responded with a status of 4" not in text]


def stop_clock(page: Any) -> None:
    """Have the time of the page, and of all others of its context, stand still but for what its `clock.run_for` lets
    pass."""
    page.clock.install(time=0)
    page.clock.pause_at(1_000_000_000)


# A module's, not the session's: while Playwright runs, no other test of this process could call asyncio.run.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium; without one these tests are skipped, and say how to get it."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pages are tested with playwright")
    with playwright.sync_playwright() as started:
        path = chromium_path(started.chromium.executable_path)
        if path is None:
            pytest.skip("no Chromium: run `playwright install chromium`, or set CHROMIUM to one")
        launched = started.chromium.launch(executable_path=path)
        yield launched
        launched.close()
