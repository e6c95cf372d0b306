"""Whom the lab answers: not other sites in the same browser, not whoever sends too much."""

import pytest

pytest.importorskip("fastapi", reason="the lab's server needs onewave[lab]")

from starlette.testclient import TestClient

from onewave.lab.app import make_app
from onewave.lab.guard import Guard


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8137", "localhost:8137", "localhost", "[::1]:8137", "192.168.0.7:80", "LOCALHOST"]
)
def test_addresses_and_localhost_are_answered(client, host):
    assert client.get("/api/choices", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8137", "127.0.0.1.evil.example", "localhost.evil.example", "", "[::1", "a@b:c"],
)
def test_a_rebound_name_is_refused(client, host):
    answer = client.get("/", headers={"host": host})
    assert answer.status_code == 403
    assert "Host header" in answer.json()["error"]


def test_the_name_that_the_lab_was_started_for_is_answered():
    named = TestClient(make_app(frozenset({"MyBox"})), base_url="http://mybox:8137")
    assert named.get("/api/choices").status_code == 200


def test_a_request_from_another_site_is_refused(client):
    for origin in ("http://evil.example", "null", "http://127.0.0.1:9999", "https://localhost", "http://["):
        answer = client.post("/api/best", json={"order": []}, headers={"origin": origin})
        assert answer.status_code == 403, origin
    own = client.post("/api/best", json={"order": []}, headers={"origin": "http://127.0.0.1:8137"})
    assert own.status_code == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize("mode", ["no-cors", "cors", "navigate"])
def test_a_get_that_another_site_makes_is_refused_but_for_opening_the_page(client, site, mode):
    headers = {"sec-fetch-site": site, "sec-fetch-mode": mode}
    for path in ("/api/choices", "/static/index.html"):
        assert client.get(path, headers=headers).status_code == 403, path
    assert client.get("/", headers=headers).status_code == (200 if mode == "navigate" else 403)


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_a_get_of_the_page_itself_or_of_the_address_bar_is_answered(client, site):
    for path in ("/", "/api/choices", "/static/index.html"):
        assert client.get(path, headers={"sec-fetch-site": site}).status_code == 200, path


def test_every_answer_forbids_foreign_scripts_and_frames(client):
    for answer in (
        client.get("/"),
        client.get("/api/game"),
        client.get("/nothing"),
        client.get("/", headers={"host": "evil.example"}),
    ):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_body_of_unknown_length_is_cut_off_where_it_gets_too_large():
    small = TestClient(
        Guard(make_app(), frozenset(), max_bytes=1000), base_url="http://localhost", raise_server_exceptions=False
    )

    def pieces():
        for _ in range(50):
            yield b" " * 100

    answer = small.post("/api/best", content=pieces())
    assert answer.status_code == 413
    assert "1,000 bytes" in answer.json()["error"]
    assert small.post("/api/best", content=iter([b'{"order":', b"[[0,0]]}"])).json()["order"][0] == [0, 0]
