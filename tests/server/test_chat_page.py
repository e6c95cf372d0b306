"""The chat page in a real Chromium, before a tiny model's server."""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kit.browser import check, watch
from kit.serving import NAME, Serving, serve_in_thread, tiny_llm
from onewave.server.options import ServeOptions

LONG, SHORT = "Tell me much.", "Hi <img src=x onerror=alert(1)>"
Opener = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Opener]:
    """Open a server's page in a profile of its own; whatever the console or the page complains about, or loads from
    elsewhere, fails the test."""
    contexts: list[Any] = []
    complaints: list[str] = []

    def open_one(url: str, settings: dict[str, str] | None = None, **options: Any) -> Any:
        context = browser.new_context(
            **{"viewport": {"width": 1000, "height": 700}, "reduced_motion": "reduce"} | options
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("request", lambda request: request.url.startswith(url) or complaints.append(request.url))
        watch(page, complaints)
        page.goto(url)
        page.locator("#settings[open], #model:not(:empty)").first.wait_for()  # a key is asked for, or none is needed
        fill(page, {"temperature": "0", "max_tokens": "24"} | (settings or {}))
        return page

    yield open_one
    for context in contexts:
        context.close()
    check(complaints)


def fill(page: Any, settings: dict[str, str]) -> None:
    if not page.locator("#settings").is_visible():
        page.get_by_role("button", name="Settings").click()
    for name, value in settings.items():
        page.locator(f'#settings [name="{name}"]').fill(value)
    page.get_by_role("button", name="Done").click()


def say(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def ended(page: Any, count: int) -> list[str]:
    """The texts of so many messages, once the last has ended."""
    page.locator(f"#talk li:nth-child({count}) .foot button", has_text="Again").wait_for()
    return page.locator("#talk .text").all_text_contents()


def test_a_conversation_is_what_the_api_answers_and_outlives_a_reload(open_page: Opener, serving: Serving) -> None:
    page = open_page(serving.url, {"system": "Be brief."})
    messages = [{"role": "system", "content": "Be brief."}]
    shown: list[str] = []
    for turn, text in enumerate([SHORT, "two\nlines"], start=1):
        messages.append({"role": "user", "content": text})
        body = {"messages": messages, "temperature": 0.0, "max_tokens": 24}
        answer = serving.post("/v1/chat/completions", body).json()
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        say(page, text)
        shown = ended(page, 2 * turn)
        foot = page.locator("#talk li:last-child .foot").inner_text()
        assert f"{answer['usage']['completion_tokens']} tokens" in foot
        assert "tokens/s" in foot
        assert f"prompt {answer['usage']['prompt_tokens']}, " in foot
    assert shown == [message["content"] for message in messages[1:]]
    assert page.locator("#talk img").count() == 0
    page.reload()
    assert ended(page, 4) == shown
    assert page.locator("#model").inner_text() == NAME
    assert page.locator('[name="system"]').input_value() == "Be brief."
    page.get_by_role("button", name="New chat").click()
    assert page.locator("#talk li").count() == 0
    page.reload()
    assert page.locator("#empty").is_visible()


@pytest.mark.parametrize("way", ["button", pytest.param("escape", marks=pytest.mark.slow)])
def test_an_answer_that_is_stopped_stays_and_ends_on_the_server_too(
    open_page: Opener, serving: Serving, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, gate, steps = serving.llm.runner, threading.Event(), [0]
    step = runner.decode

    def decode(*given: Any) -> Any:
        steps[0] += 1
        assert steps[0] < 20 or gate.wait(120)
        return step(*given)

    monkeypatch.setattr(runner, "decode", decode)
    page = open_page(serving.url, {"max_tokens": "400"})
    say(page, LONG)
    page.locator("#talk li.running .foot", has_text="token").wait_for()
    if way == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    page.locator("#talk .foot", has_text="stopped").wait_for()
    gate.set()
    while serving.served.engine.num_requests:
        page.wait_for_timeout(20)
    assert steps[0] < 399  # what all 400 tokens would take
    kept = ended(page, 2)[1]
    assert kept
    say(page, SHORT)  # the conversation goes on with what was said
    assert ended(page, 4)[1] == kept


def test_a_server_with_keys_has_one_asked_for_and_a_refusal_is_shown(
    open_page: Opener, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = ServeOptions(model_names=(NAME,), api_keys=("secret",))
    with tiny_llm(tmp_path_factory.mktemp("keys")) as llm, serve_in_thread(llm, options) as guarded:
        page = open_page(guarded.url)
        page.locator('#settings [name="key"]').wait_for()
        fill(page, {"key": "secret"})
        page.locator("#model", has_text=NAME).wait_for()
        say(page, "x" * 600)
        page.get_by_role("alert").get_by_text("max_model_len").wait_for()
        assert page.get_by_label("Message", exact=True).input_value() == "x" * 600
        assert "secret" not in json.dumps(page.evaluate("() => ({...localStorage})"))


def test_on_a_phone_it_fits_and_fingers_reach_everything(open_page: Opener, serving: Serving) -> None:
    page = open_page(serving.url, viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)
    page.locator("#model", has_text=NAME).wait_for()
    page.evaluate("() => { document.getElementById('model').textContent = 'a-long-name-'.repeat(9); }")
    page.get_by_label("Message", exact=True).fill("word " * 60)
    page.get_by_role("button", name="Send").tap()
    ended(page, 2)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
    for name in ("New chat", "Settings", "Send"):
        box = page.get_by_role("button", name=name).bounding_box()
        assert box["height"] >= 44
        assert 0 <= box["x"] <= box["x"] + box["width"] <= 360
        assert box["y"] + box["height"] <= 640
