"""The tile game in a real Chromium, its counts beside those of the simulator."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kit.browser import stop_clock
from kit.lanes import slow
from onewave.lab.best_path import best_from
from onewave.lab.game import Game
from onewave.tiles.search.panels import panel_loads
from onewave.tiles.sim.caches import Stream, replay


def text(page: Any, selector: str) -> str:
    return page.locator(selector).inner_text()


def click(page: Any, row: int, col: int) -> None:
    page.locator(f'[data-tile="{row},{col}"]').click()


def last_step(path: list[tuple[int, int]], policy: str) -> tuple[set[str], set[str]]:
    """Panels that 3 slots hold behind the path on a 3 x 3 grid, and those that its last tile pushed out."""
    panels = np.array([panel for row, col in path for panel in (row, 3 + col)])
    turns = np.repeat(np.arange(len(path)), 2)
    found = replay(policy, Stream(panels, np.zeros(len(panels), np.bool_), np.ones_like(panels), turns), 3)
    gone = list(zip(found.evicted_at.tolist(), found.evicted_tile.tolist(), strict=True))

    def names(chosen: set[int]) -> set[str]:
        return {f"A{panel}" if panel < 3 else f"B{panel - 3}" for panel in chosen}

    last = {panel: at for at, panel in enumerate(panels.tolist())}
    held = {panel for panel in last if all(at <= last[panel] for at, other in gone if other == panel)}
    return names(held), names({panel for at, panel in gone if at // 2 == len(path) - 1})


def chips(page: Any, selector: str) -> set[str]:
    return {chip.split()[0] for chip in page.locator(f"{selector} .chip:not(.empty)").all_inner_texts()}


@pytest.mark.parametrize("policy", ["lru", "belady", slow("fifo")])
def test_a_3x3_game_played_to_the_end_counts_what_the_simulator_counts(open_page, policy):
    page = open_page(f"game?m=3&n=3&slots=3&policy={policy}")
    path = random.Random(11).sample([(row, col) for row in range(3) for col in range(3)], 9)
    for at, tile in enumerate(path, start=1):
        click(page, *tile)
        # Belady sees the path so far, so each step is checked against a simulation of that path.
        resident, evicted = last_step(path[:at], policy)
        assert int(text(page, "#loads")) == panel_loads(3, 3, path[:at], 3, policy)
        assert int(text(page, "#stores")) == at
        assert int(text(page, "#left")) == 9 - at
        assert chips(page, "#cache") == resident
        assert chips(page, "#evicted") == evicted
        assert page.locator(".path").get_attribute("data-arrows") == str(at - 1)
    loads = panel_loads(3, 3, path, 3, policy)
    least = best_from({"m": 3, "n": 3, "slots": 3, "policy": policy})["loads"]
    page.locator("tr.best", has_text=str(least)).wait_for()
    assert str(loads) in text(page, "#verdict")
    assert str(least) in text(page, "#verdict")


COUNT = """async (games) => {
  const { play } = await import("/static/js/model.js");
  return games.map(({ setting, path }) => play(setting, path).loads);
}"""


def test_the_page_counts_random_games_as_the_server_does(open_page):
    chance = random.Random(5)
    games: list[dict[str, Any]] = []
    for unit in ("panels", "tiles"):
        for policy in ("lru", "fifo", "belady"):
            for _ in range(40):
                m, n, k = (chance.randint(1, 6) for _ in range(3))
                tiles = [[row, col] for row in range(m) for col in range(n)]
                path = chance.sample(tiles, chance.randint(1, len(tiles)))
                setting = {"m": m, "n": n, "k": k, "slots": chance.randint(2, 12), "unit": unit, "policy": policy}
                games.append({"setting": setting, "path": path})
    wanted = [Game(**game["setting"]).loads([tuple(tile) for tile in game["path"]]) for game in games]
    assert open_page().evaluate(COUNT, games) == wanted


def test_other_orders_and_the_bound_stand_beside_the_score(open_page):
    page = open_page("game?m=3&n=3&slots=3&policy=lru")
    page.locator("tr.best", has_text="proven").wait_for()
    rows = {
        row.get_attribute("data-row"): row.locator("td").nth(1).inner_text()
        for row in page.locator(".score tbody tr").all()
    }
    assert rows == {"you": "–", "row": "12", "snake": "10", "best": "10", "bound": "7"}


def test_undo_and_redo_go_through_every_act(open_page):
    page = open_page()
    assert page.locator("#undo").is_disabled()
    for tile in ((0, 0), (1, 1), (2, 2)):
        click(page, *tile)
    page.locator("#undo").click()
    assert text(page, "#stores") == "2"
    page.keyboard.press("u")
    assert text(page, "#stores") == "1"
    page.locator("#redo").click()
    page.keyboard.press("Control+y")
    assert text(page, "#stores") == "3"
    page.locator("#clear").click()
    assert text(page, "#stores") == "0"
    page.keyboard.press("Control+z")
    assert text(page, "#stores") == "3"
    assert text(page, "#loads") == "6"


def test_the_replay_shows_every_step_again(open_page):
    page = open_page("game?m=3&n=3&slots=3&path=0.1.2.5.4", color_scheme="light")  # with a clock of its own
    path = [(0, 0), (0, 1), (0, 2), (1, 2), (1, 1)]
    slider = page.locator("#replay")
    for at in (0, 2, 4, 5):
        slider.fill(str(at))
        assert text(page, "#place") == f"{at} / 5"
        assert int(text(page, "#loads")) == panel_loads(3, 3, path[:at], 3)
        assert page.locator(".tile.done").count() == at
    stop_clock(page)
    page.locator("#play").click()
    for at in (1, 2, 5):
        page.clock.run_for(350 * (at - int(text(page, "#place")[0])))
        assert (text(page, "#place"), text(page, "#play")) == (f"{at} / 5", "Pause")
    page.clock.run_for(350)
    assert text(page, "#play") == "Play"


def test_a_click_on_the_past_goes_on_from_there(open_page):
    page = open_page("game?m=3&n=3&slots=3&path=0.1.2.5")
    page.locator("#replay").fill("2")
    click(page, 2, 2)
    assert text(page, "#place") == "3 / 3"
    page.locator("#undo").click()
    assert text(page, "#place") == "4 / 4"


def test_best_from_here_finishes_the_game_at_the_least_cost(open_page):
    page = open_page("game?m=3&n=3&slots=3")
    click(page, 0, 0)
    click(page, 2, 2)
    page.locator("#best").click()
    page.locator("#place", has_text="9 / 9").wait_for()
    page.locator("#message", has_text="fewest possible").wait_for()
    wanted = best_from({"m": 3, "n": 3, "slots": 3, "order": [[0, 0], [2, 2]]})
    assert int(text(page, "#loads")) == wanted["loads"]


def test_a_step_is_explained_in_words(open_page):
    page = open_page("game?m=3&n=3&slots=3&path=0.1.4.3")
    page.locator("#explain").click()
    said = text(page, "#explanation")
    assert "C(1, 0) needs row panel A1 and column panel B0" in said
    assert "In the cache already: A1" in said
    assert "Loaded from memory: B0" in said
    assert "A0 had to go (touched longest ago)" in said


def test_a_shared_link_opens_the_same_game(open_page):
    page = open_page("game?m=4&n=5&k=3&slots=9&unit=tiles&policy=fifo")
    for tile in ((0, 0), (3, 4), (2, 1)):
        click(page, *tile)
    page.locator("#share").click()
    page.locator("#message", has_text="ink").wait_for()
    loads, place = text(page, "#loads"), page.url.partition("#")[2]
    other = open_page(place)
    assert text(other, "#loads") == loads
    assert text(other, "#place") == "3 / 3"
    assert other.locator(".tile").count() == 20
    assert other.locator("[name=policy]").input_value() == "fifo"
    assert other.locator("[name=unit]").input_value() == "tiles"


def test_a_link_that_cannot_be_played_says_why_and_starts_afresh(open_page):
    page = open_page()
    for query, said in (
        ("m=0", "M must be a whole number from 1 to 64"),
        ("m=1000000000", "M must be a whole number from 1 to 64"),
        ("slots=1", "Cache slots must be"),
        ("m=64&n=64&k=64", "within 200,000 tiles"),
        ("path=0.0", "does not fit its grid"),
        ("path=zz", "does not fit its grid"),
        ("path=<img src=x onerror=alert(1)>", "does not fit its grid"),
    ):
        click(page, 1, 1)
        page.evaluate("query => { location.hash = `game?${query}` }", query)
        page.locator("#message.error", has_text=said).wait_for()
        assert page.locator(".tile").count() == 9
        assert page.locator(".tile.done").count() == 0


def test_a_bad_size_in_a_field_is_named_and_taken_back(open_page):
    page = open_page()
    for value in ("0", "65", "1000000000", "2.5", "-1", ""):
        page.locator("[name=n]").fill(value)
        page.locator("[name=n]").press("Tab")
        page.locator("#message.error", has_text="N must be a whole number from 1 to 64").wait_for()
        assert page.locator("[name=n]").input_value() == "3"
        assert page.locator(".tile").count() == 9
        page.evaluate("document.getElementById('message').hidden = true")


def test_the_order_is_exported_as_the_command_reads_it(open_page, tmp_path: Path):
    from onewave.tiles.order.orders import grid_order

    page = open_page("game?m=2&n=3&slots=3&path=0.1.2.5.4.3")
    with page.expect_download() as download:
        page.locator("#export").click()
    saved = tmp_path / "order.json"
    download.value.save_as(saved)
    assert json.loads(saved.read_text())["order"] == [[0, 0], [0, 1], [0, 2], [1, 2], [1, 1], [1, 0]]
    assert grid_order(f"explicit:{saved}", 2, 3).to_list() == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0)]


def open_file(page: Any, body: str) -> None:
    page.locator("#open-order").set_input_files(
        {"name": "order.json", "mimeType": "application/json", "buffer": body.encode()}
    )


def test_an_order_that_the_search_found_is_opened_and_counted_alike(open_page):
    from onewave.tiles.search.search import search_panels

    found = search_panels(4, 4, 4, "lru").to_dict()
    page = open_page()
    open_file(page, json.dumps(found))
    page.locator("#place", has_text="16 / 16").wait_for()
    assert int(text(page, "#loads")) == found["loads"]


def test_a_file_that_is_no_order_is_refused_in_words(open_page):
    page = open_page()
    for body, said in (
        ("", "malformed JSON"),
        ("null", 'no "order"'),
        ('{"order": 3}', 'no "order"'),
        ('{"rows": 0, "cols": 3, "order": []}', "M must be a whole number"),
        ('{"rows": 1e9, "cols": 3, "order": []}', "M must be a whole number"),
        ('{"rows": 2, "cols": 2, "order": [[0, 2]]}', "outside the 2 x 2 grid"),
        ('{"rows": 2, "cols": 2, "order": [[0, 1], [0, 1]]}', "comes twice"),
        ('{"rows": 2, "cols": 2, "order": [null]}', "outside"),
    ):
        open_file(page, body)
        page.locator("#message.error", has_text=said).wait_for()
        assert page.locator(".tile").count() == 9


def test_the_game_is_played_by_keyboard_alone(open_page):
    page = open_page()
    page.locator('[data-tile="0,0"]').focus()
    for key in ("Enter", "ArrowRight", "Enter", "ArrowDown", "Space", "ArrowLeft", "Enter"):
        page.keyboard.press(key)
    assert text(page, "#place") == "4 / 4"
    assert page.locator('[data-tile="1,0"]').get_attribute("aria-label") == "C(1, 0), number 4, 1 loads"


def test_the_largest_game_is_drawn_and_played(open_page):
    page = open_page("game?m=64&n=64&k=1&slots=20")
    click(page, 0, 0)
    page.locator('tr[data-row="snake"] button').click()
    page.locator("#place", has_text="4096 / 4096").wait_for()
    assert page.locator(".tile.done").count() == 4096
