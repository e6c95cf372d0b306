"""The lab's application without a network, and the lab served on loopback with a real Chromium in front of it."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kit.browser import browser as browser
from kit.browser import check, watch


@pytest.fixture(scope="session")
def client() -> Any:
    """Requests to the application itself; an exception inside becomes its answer, as it does for a browser."""
    pytest.importorskip("fastapi", reason="the lab's server needs onewave[lab]")
    from starlette.testclient import TestClient

    from onewave.lab.app import make_app

    return TestClient(make_app(), base_url="http://127.0.0.1:8137", raise_server_exceptions=False)


@pytest.fixture(scope="session")
def lab_url() -> Iterator[str]:
    """The lab's address while it is served on a free port."""
    pytest.importorskip("fastapi", reason="the lab's server needs onewave[lab]")
    import uvicorn

    from onewave.lab.app import make_app
    from onewave.lab.serve import bind, url_of

    listening = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(make_app(), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield url_of(listening, "127.0.0.1")
    server.should_exit = True
    thread.join(timeout=60)


VIEW: dict[str, Any] = {"viewport": {"width": 1280, "height": 720}, "reduced_motion": "reduce"}


@pytest.fixture(scope="module")
def shared_context(browser: Any) -> Iterator[Any]:
    """One profile for all pages that ask for nothing special: what it has loaded once it need not load again."""
    context = browser.new_context(**VIEW)
    yield context
    context.close()


Opener = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any, shared_context: Any, lab_url: str) -> Iterator[Opener]:
    """Open the lab at a hash, say "game?m=3"; whatever the console or the page complains about fails the test."""
    opened: list[Any] = []
    complaints: list[str] = []

    def open_one(place: str = "game", **options: Any) -> Any:
        context = shared_context
        if options:
            context = browser.new_context(**(VIEW | options))
            opened.append(context)
        page = context.new_page()
        opened.append(page)
        page.set_default_timeout(60_000)
        watch(page, complaints)
        page.goto(f"{lab_url}#{place}")
        return page

    yield open_one
    for one in reversed(opened):
        one.close()
    check(complaints)
