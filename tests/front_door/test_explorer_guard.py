"""What the explorer refuses: pages of other sites, and broken requests, without a traceback."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("dash", reason="Dash is not installed")

from flask.testing import FlaskClient

from twinstream.study.explore.answers import Answers, State
from twinstream.study.explore.app import explorer

CALLBACKS = "/_dash-update-component"
TINY = State("tiny", "cpu", "64", "256", "8MiB", "", "streaming")


@pytest.fixture(scope="module")
def client() -> Iterator[FlaskClient]:
    app = explorer(Answers({}, {}), host="127.0.0.1")
    with app.server.test_client() as opened:
        opened.get("/")
        yield opened


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "127.0.0.1:8050"}, 200),
        ({"Host": "localhost:8050"}, 200),
        ({"Host": "[::1]:8050"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:8050"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "localhost:8050", "Origin": "http://localhost:8050"}, 200),
        ({"Host": "localhost:8050", "Origin": "http://evil.example"}, 403),
        ({"Host": "localhost:8050", "Origin": "http://localhost:9999"}, 403),
        ({"Host": "localhost:8050", "Origin": "null"}, 403),
        ({"Host": "localhost:8050", "Origin": "http://["}, 403),
        ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
        (
            {
                "Sec-Fetch-Site": "cross-site",
                "Sec-Fetch-Mode": "navigate",
                "Sec-Fetch-Dest": "iframe",
            },
            403,
        ),
        (
            {
                "Sec-Fetch-Site": "cross-site",
                "Sec-Fetch-Mode": "navigate",
                "Sec-Fetch-Dest": "document",
            },
            200,
        ),
    ],
)
def test_only_pages_of_its_own_are_answered(client, headers, status):
    answer = client.get("/", headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.headers["X-Frame-Options"] == "DENY"
    report = client.get("/report?seq_len=0", headers=headers)
    assert report.status_code == (403 if status == 403 else 400)


def asked(**changes: Any) -> dict[str, Any]:
    """The callback that answers a URL, as the page asks it."""
    return {
        "output": "..answers.children...answered.data...poll.disabled..",
        "outputs": [
            {"id": "answers", "property": "children"},
            {"id": "answered", "property": "data"},
            {"id": "poll", "property": "disabled"},
        ],
        "inputs": [url_of(TINY.url), {"id": "poll", "property": "n_intervals", "value": 0}],
        "changedPropIds": ["url.search"],
        "state": [{"id": "answered", "property": "data", "value": None}],
    } | changes


def url_of(value: object) -> dict[str, object]:
    return {"id": "url", "property": "search", "value": value}


def test_a_callback_of_the_page_is_answered(client):
    answer = client.post(CALLBACKS, json=asked())
    assert answer.status_code == 200
    assert "speed-cpu" in answer.text


BROKEN = [
    {"output": "nothing.children"}, {"output": ["answers"]}, {"outputs": [3]}, {"outputs": None},
    {"outputs": []}, {"inputs": None}, {"inputs": []}, {"inputs": [{}, {}]}, {"inputs": "url"},
    {"state": [1]}, {"state": None}, {"changedPropIds": 3}, {"changedPropIds": [{}]},
    {"inputs": [url_of(3), {"id": "poll", "property": "n_intervals"}]},
]  # fmt: skip
DEEP = b"[" * 200_000 + b"]" * 200_000


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"3",
        b"{}",
        b"\xff",
        DEEP,
        *(json.dumps(asked(**b)) for b in BROKEN),
    ],
)
def test_a_broken_callback_is_refused_and_no_traceback_is_left(client, body, capsys, caplog):
    answer = client.post(CALLBACKS, data=body, content_type="application/json")
    assert answer.status_code == 400, answer.text
    assert "Traceback" not in answer.text + capsys.readouterr().err + caplog.text


def test_a_file_that_no_component_has_is_refused(client):
    assert client.get("/_dash-component-suites/dash/..").status_code in (400, 404)
    assert client.get("/_dash-component-suites/nothing/x.js").status_code in (400, 404)
