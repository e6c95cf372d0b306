"""Chains, traces and orders in a real Chromium, and the page's frame around them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kit.browser import stop_clock
from kit.lanes import slow
from onewave.lab.launches import CHAIN_ORDERS, chain
from onewave.tiles.order.policies import POLICIES
from onewave.tiles.sim.trace import Trace

SMALL_TRACE = "traces?program=gemm&sizes=256,256,128&workers=2&order=row&sync=tile"
VIEWS = {
    "game": ("m=3&n=3&slots=3", ".score tr.best"),
    "chains": ("rows=2&cols=2&inner=3", ".matrix"),
    "traces": (SMALL_TRACE.partition("?")[2], ".figures b"),
    "orders": ("m=6&n=6&rows=2&cols=2&inner=2&most=512", ".chart"),
}
"""A small question for each view, and what shows that it was answered."""


def text(page: Any, selector: str) -> str:
    return page.locator(selector).inner_text()


def made_trace(tasks: int, workers: int, seed: int = 0, slower: float = 1.0) -> Trace:
    """A measured trace as a GPU would give it: irregular waits and runs on every worker."""
    chance = np.random.default_rng(seed)
    worker = np.arange(tasks) % workers
    wait, run = chance.exponential(0.4, tasks), chance.exponential(2.0, tasks) * slower + 0.1
    # Each worker's tasks follow each other: a running sum along its column.
    rows = -(-tasks // workers)
    spent = np.zeros(rows * workers)
    spent[:tasks] = wait + run
    before = (np.cumsum(spent.reshape(rows, workers), axis=0) - spent.reshape(rows, workers)).reshape(-1)[:tasks]
    names = tuple(("load", "gemm", "store")[i % 3] for i in range(tasks))
    return Trace(
        "measured", "us", workers, np.arange(tasks), worker, before, before + wait, before + wait + run, names, names
    )


def send(page: Any, place: str, trace: Trace | bytes, name: str = "measured.json") -> None:
    body = trace if isinstance(trace, bytes) else trace.to_json().encode()
    page.locator(f"#file-{place}").set_input_files({"name": name, "mimeType": "application/json", "buffer": body})


def open_traces(open_page: Any, **options: Any) -> Any:
    page = open_page(SMALL_TRACE, **options)
    page.locator("#view-traces .figures b").first.wait_for()
    return page


def show(page: Any, trace: Trace) -> None:
    send(page, "a", trace)
    page.locator("#view-traces .figures b", has_text=f"{len(trace):,}").wait_for()


def test_chains_show_what_every_tile_does_at_every_moment(open_page):
    page = open_page("chains?program=gemms&rows=3&cols=3&inner=4&workers=5&a=sequential.none&b=critical-path.tile")
    wanted = {"rows": 3, "cols": 3, "inner": 4, "workers": 5, "cache": 24}
    found = {
        "A": chain(wanted | {"order": "sequential", "sync": "none"}),
        "B": chain(wanted | {"order": "critical-path", "sync": "tile"}),
    }
    page.locator(".matrix").wait_for()
    wide = max(one["makespan"] for one in found.values())
    for part in (0, 400, 1000):
        page.locator("#moment").fill(str(part))
        now = part / 1000 * wide
        for name, one in found.items():
            trace = Trace.from_dict(one["trace"])
            side = page.locator(f'[aria-label="Launch {name}"]')
            shown = {kind: side.locator(f"rect.state-{kind}").count() for kind in ("done", "running", "waiting")}
            assert shown["done"] == int((trace.end <= now + 1e-9).sum())
            assert shown["running"] == int(((trace.start <= now) & (trace.end > now + 1e-9)).sum())
            assert shown["running"] + shown["waiting"] <= 5
            assert sum(int(b) for b in side.locator(".keys b").all_inner_texts()) == len(trace)
    idle = {name: round(100 * one["idle_share"]) for name, one in found.items()}
    assert f"{idle['A']} %" in text(page, '[aria-label="Launch A"] .figures')


def test_every_order_and_policy_stands_in_one_table_and_can_be_opened(open_page):
    page = open_page("chains?workers=3&rows=2&cols=2&inner=3")
    page.locator(".matrix").wait_for()
    assert page.locator(".matrix tbody tr").count() == len(CHAIN_ORDERS)
    assert page.locator(".matrix thead th").count() == len(POLICIES) + 2
    page.locator(".matrix tr", has_text="bpt").locator("button").nth(1).click()
    assert page.locator("[name=order-b]").input_value() == "bpt"
    page.locator('[aria-label="Launch B"] .figures').wait_for()
    assert f"b=bpt.{list(POLICIES)[1]}" in page.url


def test_a_chain_too_large_for_the_table_is_shown_without_it(open_page):
    page = open_page("chains?rows=8&cols=8&inner=8&workers=16")
    page.locator('[aria-label="All orders and policies"]', has_text="up to 300 tasks").wait_for()
    assert page.locator('[aria-label="Launch A"] rect').count() == 8 * 8 + 8 * 8 * 8


def test_idle_time_is_red(open_page):
    page = open_page("chains?workers=6&rows=3&cols=3&inner=4&a=sequential.none")
    page.locator(".matrix").wait_for()
    reds = page.evaluate("""() => {
      const canvas = document.querySelector('[aria-label="Launch A"] canvas');
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      let count = 0;
      for (let i = 0; i < data.length; i += 4) {
        count += data[i] > 180 && data[i] > 1.8 * data[i + 1] && data[i + 2] < 140;
      }
      return count / (data.length / 4);
    }""")
    assert reds > 0.2  # the workers wait for the whole first stage


def test_the_chain_is_played_over_time(open_page):
    page = open_page("chains?rows=2&cols=2&inner=2", color_scheme="light")  # with a clock of its own
    page.locator(".matrix").wait_for()
    stop_clock(page)
    page.locator("#chain-play").click()
    page.clock.run_for(3000)  # of nine seconds
    page.locator("#chain-play", has_text="Pause").click()
    assert text(page, "#chain-play") == "Play"
    assert 320 < int(page.locator("#moment").input_value()) < 340
    assert "µs" in text(page, 'output[for="moment"]')


SCROLL = """async ({ frames, zoomed }) => {
  const canvas = [...document.querySelectorAll("#view-traces canvas.timeline")].find((one) => one.clientWidth);
  const wheel = (more) => canvas.dispatchEvent(new WheelEvent("wheel", { bubbles: true, cancelable: true, ...more }));
  const box = canvas.getBoundingClientRect();
  const place = { clientX: box.left + 500, clientY: box.top + 60 };
  for (let i = 0; i < zoomed; i++) wheel({ deltaY: -150, ctrlKey: true, ...place });
  const frame = () => new Promise(requestAnimationFrame);
  await frame();
  const began = performance.now();
  for (let step = 1; step <= frames; step++) {
    wheel({ deltaX: Math.floor(step / 40) % 2 ? -14 : 14, deltaY: 0 });
    if (step % 3 === 0) wheel({ deltaX: 0, deltaY: Math.floor(step / 30) % 2 ? -9 : 9 });
    await frame();
  }
  return (1000 * frames) / (performance.now() - began);
}"""


PAINT = """async (zoomed) => {
  const canvas = [...document.querySelectorAll("#view-traces canvas.timeline")].find((one) => one.clientWidth);
  const frame = () => new Promise(requestAnimationFrame);
  await frame();
  const box = canvas.getBoundingClientRect();
  const [drawn, fill] = [Number(canvas.dataset.frames), Int32Array.prototype.fill];
  let fills = 0;
  Int32Array.prototype.fill = function (...given) { fills++; return fill.apply(this, given); };
  for (let i = 0; i <= zoomed; i++) {
    const more = { deltaY: i ? -150 : 0, ctrlKey: true, clientX: box.left + 500, clientY: box.top + 60 };
    canvas.dispatchEvent(new WheelEvent("wheel", { bubbles: true, cancelable: true, ...more }));
  }
  await frame();
  Int32Array.prototype.fill = fill;
  const { frames, from, to } = canvas.dataset;
  return { frames: frames - drawn, fills, from: Number(from), to: Number(to) };
}"""


def open_many(open_page: Any) -> tuple[Any, Trace]:
    page, trace = open_traces(open_page), made_trace(20_000, 132)
    show(page, trace)
    return page, trace


def test_a_frame_is_painted_once_and_costs_what_is_visible(open_page):
    page, trace = open_many(open_page)
    for zoomed, most in ((0, 20_000), (4, 10_000), (8, 1000)):
        found = page.evaluate(PAINT, zoomed)
        visible = int(((trace.end > found["from"]) & (trace.wait_start < found["to"])).sum())
        assert 0 < visible <= most
        assert found["frames"] == 1
        assert 0 < found["fills"] <= 1 + 2 * (visible + trace.workers)


@pytest.mark.slow
def test_a_trace_of_20_000_tasks_scrolls_at_30_frames_a_second_or_more(open_page):
    page, _ = open_many(open_page)
    # Everything visible; some tasks a lane; and tasks wide enough for their names.
    for zoomed in (0, 4, 4):
        assert page.evaluate(SCROLL, {"frames": 60, "zoomed": zoomed}) >= 30


def test_a_task_tells_when_it_waited_and_ran(open_page):
    trace = made_trace(40, 4)
    page = open_traces(open_page)
    show(page, trace)
    page.locator('canvas[aria-label^="Trace A"]').focus()
    for _ in range(3):
        page.keyboard.press("n")
    # The third task of worker 0 is task 8.
    said = text(page, "#task-detail")
    assert said.startswith("store 8: worker 0")
    assert f"runs {trace.end[8] - trace.start[8]:.2f} µs" in said
    assert f"starts at {trace.start[8]:.2f} µs" in said or "µs" in said
    page.keyboard.press("Escape")
    page.locator("#task-detail").wait_for(state="hidden")


def test_fingers_move_zoom_and_choose(open_page):
    page = open_traces(open_page, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    show(page, made_trace(400, 4))
    timeline = page.locator('canvas[aria-label^="Trace A"]')
    timeline.scroll_into_view_if_needed()
    y = timeline.bounding_box()["y"] + 60
    touches = page.context.new_cdp_session(page)

    def touch(kind: str, *places: float) -> None:
        points = [{"x": x, "y": y, "id": i} for i, x in enumerate(places)]
        touches.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": points})

    def shown(*steps: tuple[float, ...]) -> tuple[float, float]:
        touch("Start", *steps[0])
        for step in steps[1:]:
            touch("Move", *step)
        touch("End")
        page.evaluate("() => new Promise(requestAnimationFrame)")
        first, last = (float(timeline.get_attribute(f"data-{end}")) for end in ("from", "to"))
        return first, last - first

    _, whole = shown((200,))
    start, apart = shown(*[(180 - 6 * i, 240 + 6 * i) for i in range(12)])
    assert apart < whole / 2
    assert start > 0
    moved, span = shown(*[(260 - 8 * i,) for i in range(12)])
    assert moved > start
    assert span == pytest.approx(apart)
    shown((200,))
    assert "worker 0" in text(page, "#task-detail") or "worker 1" in text(page, "#task-detail")


def test_two_traces_are_shown_with_their_difference(open_page):
    page = open_traces(open_page)
    show(page, made_trace(60, 4))
    send(page, "b", made_trace(60, 4, slower=3.0))
    total = page.locator('[aria-label="Differences"] tr', has_text="total")
    total.wait_for()
    assert "2." in total.locator("td").first.inner_text()  # some 2.9 times as long, with the fixed part
    assert page.locator("canvas.timeline:visible").count() == 2
    page.locator("[name=colour]").select_option("run")
    page.locator('[aria-label="Differences"] .plain button').first.click()
    assert ". A: " in text(page, "#task-detail")
    page.locator("#remove-b").click()
    assert page.locator("canvas.timeline:visible").count() == 1


def test_a_trace_is_saved_for_perfetto(open_page, tmp_path: Path):
    page = open_traces(open_page)
    with page.expect_download() as download:
        page.locator("#perfetto").click()
    saved = tmp_path / "trace.json"
    download.value.save_as(saved)
    events = json.loads(saved.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" and event["cat"] != "wait" for event in events) == 4


def test_a_file_that_is_no_trace_gets_a_clear_message_and_changes_nothing(open_page):
    page = open_traces(open_page)
    before = text(page, "#view-traces .figures")
    small = made_trace(4, 2).to_json()
    for body, said in (
        (b"", "the file is empty"),
        (b"{", "not valid JSON"),
        (b"\x00\xff\xfe", "not valid JSON"),
        (b"[1, 2]", "allowed: an object"),
        (b'{"format": "chrome"}', 'allowed: format "onewave-trace"'),
        (small.replace('"workers":2', '"workers":1').encode(), "allowed: 0 to 0"),
        (small.replace('"end":[', '"end":[-5,').encode(), "allowed"),
    ):
        send(page, "a", body, "broken.json")
        page.locator("#message.error", has_text=said).wait_for()
        assert text(page, "#message").startswith("broken.json: ")
        assert "Traceback" not in text(page, "body")
        page.evaluate("document.getElementById('message').textContent = ''")
    assert text(page, "#view-traces .figures") == before


def test_a_name_in_a_trace_is_text_and_never_markup(open_page):
    page = open_traces(open_page)
    evil = made_trace(6, 2).to_json().replace("gemm", "<img src=x onerror=document.title=1>")
    send(page, "a", evil.encode())
    page.locator("#view-traces .figures b", has_text="6").first.wait_for()
    assert "<img src=x" in text(page, '[aria-label="Phases"]')
    assert page.locator("#view-traces img").count() == 0


def test_sizes_that_would_take_too_long_are_refused_in_words(open_page):
    page = open_traces(open_page)
    page.locator("[name=sizes]").fill("1000000000,1")
    page.locator("#simulate").click()
    page.locator("#message.error", has_text="sizes").wait_for()


def test_a_view_whose_first_question_failed_still_answers(open_page):
    page = open_page("traces?sizes=nonsense")
    page.locator("#message.error", has_text="sizes").wait_for()
    for name in ("#fit", "#zoom-in", "#perfetto"):
        page.locator(name).click()
        page.locator("#message.error", has_text="open a trace first").wait_for()
    show(page, made_trace(30, 3))


def test_all_orders_stand_in_one_chart_with_the_bound(open_page):
    page = open_page("orders?m=8&n=8&rows=3&cols=3&inner=3&most=1024")
    page.locator(".chart").nth(2).wait_for()
    gemm, chains = page.locator(".chart-pair").nth(0), page.locator(".chart-pair").nth(1)
    assert gemm.locator(".line:not(.limit)").count() == 10
    assert chains.locator(".line:not(.limit)").count() == len(CHAIN_ORDERS)
    gemm.locator(".chart").focus()
    page.keyboard.press("ArrowRight")
    assert "At 2 panels of cache" in gemm.inner_text()
    values = [int(b) for b in gemm.locator(".legend li:not(.limit) b").all_inner_texts()]
    assert values == sorted(values)
    assert values[0] >= int(gemm.locator(".legend .limit b").inner_text())
    gemm.locator("summary").click()
    gemm.locator("table").wait_for()
    assert gemm.locator("table tbody tr").count() == 11
    gemm.locator(".legend button", has_text="random").click()
    assert gemm.locator(".line:not(.limit)").count() == 9
    assert "waves at M = 1,024" in page.locator("section.card", has_text="Latency staircase").inner_text()


@pytest.mark.parametrize("scheme", ["light", slow("dark")])
def test_no_view_is_wider_than_a_phone(open_page, scheme):
    page = open_page(viewport={"width": 360, "height": 740}, color_scheme=scheme, has_touch=True, is_mobile=True)
    for view, (query, ready) in VIEWS.items():
        page.evaluate("place => { location.hash = place }", f"{view}?{query}")
        page.locator(f"#view-{view} {ready}").first.wait_for(state="attached")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, view
        if view == "game":
            page.locator('[data-tile="1,1"]').tap()
            assert text(page, "#loads") == "2"
            assert min(page.locator(".tile").first.bounding_box()[side] for side in ("width", "height")) >= 34


NAMELESS = """view => {
  const kinds = ["input", "select", "button", "canvas:not([aria-hidden])", "svg[role=img]"];
  return [...document.querySelectorAll(kinds.map((kind) => `#view-${view} ${kind}`).join())]
    .filter((node) => !(node.getAttribute("aria-label") || node.labels?.length || node.textContent.trim()))
    .map((node) => node.outerHTML.slice(0, 80));
}"""


def test_every_control_has_a_name(open_page):
    page = open_page()
    for view, (query, ready) in VIEWS.items():
        page.evaluate("place => { location.hash = place }", f"{view}?{query}")
        page.locator(f"#view-{view} {ready}").first.wait_for(state="attached")
        nameless = page.evaluate(NAMELESS, view)
        assert nameless == [], view
        assert page.locator(f"#view-{view} h1").count() == 1


def test_the_colours_change_and_stay_changed(open_page):
    page = open_page(color_scheme="light")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.locator("#theme").click()
    dark = page.evaluate(paper)
    assert dark != light
    page.reload()
    assert page.evaluate(paper) == dark
    assert page.locator("#theme").get_attribute("aria-label") == "Colours: dark"


def test_views_keep_their_state_and_the_address_follows(open_page):
    page = open_page("game?m=2&n=2&slots=3&path=0.1")
    page.locator("nav a", has_text="Chains").click()
    page.locator(".matrix").wait_for()
    assert "chains?program=gemms" in page.url
    page.locator("nav a", has_text="Game").click()
    page.locator("#place", has_text="2 / 2").wait_for()
    page.wait_for_url(lambda url: "game?m=2&n=2" in url)
    assert page.locator("nav a[aria-current]").inner_text() == "Game"
