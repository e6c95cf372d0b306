"""The Decode and Profile pages in a real Chromium."""

import json
from pathlib import Path
from typing import Any

import pytest

from kit.lanes import slow
from onewave.lab import decode

STEP = "decode?model=llama-3.2-1b&weights=int8&batch=1&context=64&sms=16&gpus=1"


def text(page: Any, selector: str) -> str:
    return page.locator(selector).inner_text()


def planned(open_page: Any, **options: Any) -> Any:
    page = open_page(STEP, **options)
    page.locator("#proof:not(:empty)").wait_for()
    return page


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "llama-3.2-1b", "weights": "int8", "batch": 1, "context": 64, "sms": 16, "layers": 2, **more}


def test_a_step_is_planned_changed_and_refused(open_page):
    page = planned(open_page)
    own = decode.step(asked())
    assert "proved: no deadlock" in text(page, "#proof")
    assert f"{own['step_ms']:.4f} ms" in text(page, ".figures")
    page.locator("#longest").click()
    assert " waits for split " in text(page, "#wait-detail")
    drawn = page.locator(".hand-offs").inner_html()
    page.locator("canvas.timeline").first.press("+")
    assert page.locator(".hand-offs").inner_html() not in ("", drawn)  # the line stays at its tasks
    # A row block from one SM to another, by the form.
    page.locator("input[name=source]").fill("2")
    page.locator("input[name=target]").fill("9")
    page.locator("#move-blocks").click()
    moved = decode.step(asked(moves=[["gate_up", 2, 9]]))
    page.locator(f".figures b:has-text('{moved['step_ms']:.4f} ms')").wait_for()
    assert page.locator(".hand-offs").inner_html() == ""
    assert "1 row blocks moved" in text(page, "#shares")
    # A queue in another order: what waits for itself is refused, and the picture stays.
    page.locator("input[name=queue]").fill("0")
    page.locator("input[name=queue]").press("Tab")
    page.locator("#queue li").nth(1).get_by_role("button", name="earlier").click()
    page.locator("#proof.bad").wait_for()
    assert "Refused: deadlock" in text(page, "#proof")
    page.locator("#undo-all").click()
    page.locator(f".figures b:has-text('{own['step_ms']:.4f} ms')").wait_for()


def test_the_plan_is_exported_and_a_measured_trace_laid_beside_it(open_page, tmp_path):
    page = planned(open_page)
    with page.expect_download() as download:
        page.locator("#export-plan").click()
    assert '"plan": "decode step"' in Path(download.value.path()).read_text()
    trace = tmp_path / "measured.json"
    found = decode.step(asked())["trace"]
    trace.write_text(json.dumps(found | {"source": "measured", "report": None}))
    page.locator("#file-measured").set_input_files(str(trace))
    page.locator("section[aria-label=Differences] table").first.wait_for()


@pytest.mark.parametrize("width", [slow(1280), 390])
def test_both_pages_fit_their_screens(open_page, width):
    page = planned(open_page, viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page = open_page("profile?model=llama-3.2-1b&gpu=A100&tokens=64", viewport={"width": width, "height": 800})
    page.locator("section[aria-label=Parts] tbody tr").first.wait_for()
    assert page.locator("img.roofline").evaluate("image => image.complete && image.naturalWidth > 0")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
