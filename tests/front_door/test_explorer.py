"""The explorer: what it shows is what the command line says, and the URL is all of its state."""

import json
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from urllib.error import URLError
from urllib.parse import parse_qs, urlencode, urlsplit
from urllib.request import urlopen

import pytest

pytest.importorskip("dash", reason="Dash is not installed")

from dash import Dash
from werkzeug.serving import make_server

from tests.front_door.command_line import call, error_of
from tests.helpers.browser import browser_page
from twinstream.hardware_profiles.loader import load_machine
from twinstream.schedule.errors import TwinstreamError
from twinstream.study.answer import Answer
from twinstream.study.explore.answers import Answers, State, StateError, count_of
from twinstream.study.explore.app import explorer
from twinstream.study.explore.show import Found, column, compared, ranking_note, timeline_of

TINY = State("tiny", "cpu", "64", "256", "8MiB", "", "streaming")


@contextmanager
def served(app: Dash) -> Iterator[str]:
    """The address of an app while it is served."""
    server = make_server("127.0.0.1", 0, app.server, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.port}/"
    server.shutdown()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(explorer(Answers({}, {}))) as address:
        yield address


def cli(command: str):
    """What the command line says to a command that the page shows."""
    program, *arguments = shlex.split(command)
    assert program == "twinstream"
    return call(*arguments, "--json").json()


def test_a_changed_cap_changes_the_number_to_that_of_the_command_line(address):
    with browser_page() as opened:
        page = opened.page
        page.goto(address + TINY.url)
        page.wait_for_selector("#speed-cpu")
        before = page.inner_text("#speed-cpu")
        assert before == f"{cli(TINY.command('cpu'))['tokens_per_s']:,.0f}"
        page.fill("#device_mem", "16MiB")
        page.press("#device_mem", "Enter")
        page.wait_for_selector("code:has-text('--device-mem 16MiB')")
        shown = page.inner_text(".machine code")
        assert page.inner_text("#speed-cpu") != before
        assert page.inner_text("#speed-cpu") == f"{cli(shown)['tokens_per_s']:,.0f}"
        query = parse_qs(urlsplit(page.url).query)
        assert query["device_mem"] == ["16MiB"]
        assert query["model"] == ["tiny"]
        page.wait_for_selector("#timeline-cpu >> text=/cap 16.00 MiB/")
        assert complaints(opened) == []


def test_figures_follow_the_numbers_and_go_where_nothing_fits(address):
    with browser_page() as opened:
        page = opened.page
        page.goto(address + TINY.url)
        page.wait_for_selector("#timeline-cpu .main-svg")
        page.fill("#device_mem", "1MiB")
        page.press("#device_mem", "Enter")
        page.wait_for_selector("#error-cpu")
        page.wait_for_selector("#timeline-cpu", state="detached")
        assert complaints(opened) == []


def test_caps_that_are_too_small_show_the_message_of_the_command_line(address):
    state = State("tiny", "cpu", "64", "256", "1MiB", "", "streaming")
    with browser_page() as opened:
        opened.page.goto(address + state.url)
        opened.page.wait_for_selector("#error-cpu")
        shown = opened.page.inner_text("#error-cpu")
        assert opened.page.locator("#speed-cpu").count() == 0
        assert complaints(opened) == []
    _, *arguments = shlex.split(state.command("cpu"))
    assert shown.strip() == error_of(*arguments).strip()


def test_machines_stand_side_by_side_and_the_url_sets_the_controls(address):
    state = State("tiny", "cpu,rtx3090", "128", "256", "64MiB", "1GiB", "resident")
    with browser_page(dark=True) as opened:
        page = opened.page
        page.goto(address + state.url)
        page.wait_for_selector("#speed-cpu")
        boxes = [page.locator(".machine").nth(i).bounding_box() for i in range(2)]
        assert boxes[0]["y"] == boxes[1]["y"]
        assert boxes[0]["x"] < boxes[1]["x"]
        assert page.input_value("#seq_len") == "128"
        assert page.input_value("#host_mem") == "1GiB"
        assert page.inner_text("#policy").startswith("resident")
        assert complaints(opened) == []


def test_a_step_of_one_round_is_not_counted():
    def title(tokens: str) -> str:
        state = State("tiny", "cpu", "64", tokens, "", "", "resident")
        found = Answers({}, {}).answer(state, "cpu")
        assert isinstance(found, Answer)
        return str(timeline_of("cpu", found).children[0].children)

    assert title("64") == "cpu: the step's only round"
    found = re.fullmatch(r"cpu: round (\d+) of (\d+) \(r(\d+) in .*\)", title("65536"))
    assert found is not None
    number, rounds, index = map(int, found.groups())
    assert 1 <= number == index + 1 <= rounds


def test_the_report_of_a_plan_is_one_link_away(address):
    with browser_page() as opened:
        page = opened.page
        page.goto(address + TINY.url)
        link = page.wait_for_selector("text=full report")
        assert link is not None
        page.goto(address.rstrip("/") + str(link.get_attribute("href")))
        page.wait_for_selector(".main-svg")
        assert page.inner_text("h1") == "tiny on cpu"
        assert complaints(opened) == []


def complaints(opened) -> list[str]:
    """What the console said, but for plotly.js's canvases, which Chromium would know more of."""
    return [text for text in opened.complaints if "willReadFrequently" not in text]


def test_a_state_survives_the_url():
    state = State("8b", "h100,a100", "1024", "", "80%", "1 GiB", "optimal")
    assert State().at_url(state.url) == state


@pytest.mark.parametrize(("machine", "cap"), [("cpu", "4MiB"), ("h100", "80%")])
def test_a_quick_plan_of_the_page_is_that_of_the_command_shown(machine, cap):
    state = State("tiny", machine, "64", "256", cap, "", "optimal", "quick")
    found = Answers({}, {}).answer(state, machine)
    assert isinstance(found, Answer)
    assert "--effort quick" in state.command(machine)
    shown = cli(state.command(machine))
    assert shown["kernels"] == found.schedule.recipe["kernels"]
    assert shown["tokens_per_s"] == found.summary.tokens_per_s
    assert "--effort" not in TINY.command("cpu")


@pytest.mark.parametrize("typed", ["2,048", "2_048", " 2048 "])
def test_a_length_in_the_command_is_one_length_and_not_a_pack(typed):
    state = replace(TINY, seq_len=typed, tokens_per_step="4,096", device_mem=" 1 GiB")
    found = Answers({}, {}).answer(state, "cpu")
    assert isinstance(found, Answer)
    command = state.command("cpu")
    assert "--seq-len 2048 --tokens-per-step 4096 --device-mem '1 GiB'" in command
    shown = cli(command)
    assert shown["workload"]["seq_len"] == found.schedule.workload.seq_len == 2048
    assert shown["tokens_per_s"] == found.summary.tokens_per_s


def test_models_and_machines_of_files_are_files_in_the_command(tmp_path):
    machine = tmp_path / "my box.toml"
    machine.write_text('base = "cpu"\nhbm_bytes_per_s = 30e9\n')
    answers = Answers({}, {"my box": str(machine)})
    found = answers.answer(TINY, "my box")
    assert isinstance(found, Answer)
    shown = cli(answers.command(TINY, "my box"))
    assert (shown["machine"], shown["tokens_per_s"]) == ("my box", found.summary.tokens_per_s)


def test_a_new_page_opens_with_what_was_given_and_each_machine_s_own_memory(tmp_path):
    config, machine = tmp_path / "config.json", tmp_path / "box.toml"
    answers = Answers({"mine": str(config)}, {"box": str(machine), "other": str(machine)})
    assert (answers.new_page.model, answers.new_page.machines) == ("mine", "box,other")
    assert answers.new_page.at_url("?seq_len=64") == replace(answers.new_page, seq_len="64")
    assert Answers({}, {}).new_page == State()
    state = replace(State(), model="tiny", seq_len="64", tokens_per_step="256", policy="resident")
    for name in ("h100", "rtx4090"):
        found = Answers({}, {}).answer(state, name)
        assert isinstance(found, Answer)
        assert found.schedule.caps.device_bytes == load_machine(name).number("device_memory_bytes")
        assert "Limited" not in str(column(Found(name, state, found), 1, ""))
    capped = Answers({}, {}).answer(replace(state, device_mem="24GiB"), "h100")
    shown = str(column(Found("h100", state, capped), 1, ""))
    assert "Limited to 24.00 GiB of its 79.65 GiB of device memory." in shown


@pytest.mark.parametrize(
    ("changes", "recipe"),
    [
        ({"lora": "r=4"}, ("lora", "rank", 4)),
        ({"optimizer_state": "8bit"}, ("optimizer_state", None, "8bit")),
        ({"kernels": "eager"}, ("kernels", "vector", "eager")),
        ({"attention": "eager"}, ("kernels", "attention", "eager")),
    ],
)
def test_what_is_trained_and_with_what_are_controls_of_the_page(changes, recipe):
    state = replace(TINY, machines="h100", device_mem="", policy="resident", **changes)
    found = Answers({}, {}).answer(state, "h100")
    assert isinstance(found, Answer), found
    name, part, value = recipe
    taken = found.schedule.recipe[name]
    assert (taken if part is None else taken[part]) == value
    assert cli(state.command("h100"))["tokens_per_s"] == found.summary.tokens_per_s


def test_machines_that_may_change_places_are_said_to():
    answers = Answers({}, {})
    state = State("tiny", "h100,mi300x", "64", "256", "4GiB", "", "streaming")
    shown = [Found(name, state, answers.answer(state, name)) for name in state.machine_names]
    assert "The order is not certain" in str(ranking_note(shown))
    page = str([column(one, len(shown), "") for one in shown])
    assert "+/- 19 %" in page and "+/- 1.0 %" in page


def test_money_of_a_billion_tokens_stands_beside_speeds_where_there_is_a_price():
    """Hours times the price over 1 +/- the error; a machine without a price has a dash."""
    answers = Answers({}, {}, price="h100=$2.50, b200=6")
    named = {"model": "tiny", "machines": "h100,mi300x", "seq_len": "64"}
    state = replace(answers.new_page, **named, tokens_per_step="256", policy="streaming")
    assert parse_qs(state.url[1:])["price"] == ["h100=$2.50, b200=6"]
    priced, other = (
        Found(name, state, answers.answer(state, name)) for name in state.machine_names
    )
    money, error = 1e9 / priced.answer.tokens_per_s / 3600 * 2.5, priced.answer.uncertainty.mean
    page = str(column(priced, 2, ""))
    assert "money a billion tokens" in page and "at 2.50 a GPU-hour" in page
    assert f"{money / (1 + error):.2f} to {money / (1 - error):.2f}" in page
    assert "no price is of this machine" in str(column(other, 2, ""))
    assert "money" not in str(column(replace(priced, asked=state.unpriced), 2, ""))
    assert "a billion tokens" in str(compared([priced, other] * 2))
    bill = cli(answers.command(state, "h100"))["bill"]
    assert bill["money"] == pytest.approx(money)
    assert "--price" not in answers.command(state, "mi300x")
    cheaper = replace(state, price="1")
    assert answers.answer(cheaper, "h100") is priced.answer  # not planned anew
    wrong = answers.answer(replace(state, price="h100=much"), "h100")
    assert "price 'h100=much' is none" in str(wrong)
    assert "--price 'much' is none: write 2.50" in error_of("explore", "--price", "much")


def test_a_url_may_not_open_files(tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_text('{"password": "1234"}')
    answers = Answers({}, {})
    for state, machine in (
        (State(str(secret), "cpu", "64"), "cpu"),
        (State("tiny", "cpu", "64"), str(secret)),
    ):
        found = answers.answer(state, machine)
        assert isinstance(found, StateError)
        assert "unknown" in str(found)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seq_len": "long"}, "whole number from 1"),
        ({"seq_len": "9" * 5000}, "whole number from 1"),
        ({"device_mem": "9" * 400}, "cannot read the size"),
        ({"seq_len": ""}, "sequence length is missing"),
        ({"seq_len": "0"}, "sequence length needs a whole number from 1"),
        ({"policy": "optimall"}, "policy 'optimall' is unknown"),
        ({"policy": "mine.py:POLICY"}, "a page opens none"),
        ({"tokens_per_step": "100"}, "whole sequences"),
        ({"device_mem": "24XiB"}, "24GiB"),
        ({"policy": "greedy"}, "'greedy'"),
        ({"policy": "optimal", "effort": "most"}, "effort 'most' is unknown"),
        ({"model": "9b"}, "unknown model '9b'"),
        ({"lora": "much"}, "much"),
        ({"optimizer_state": "none"}, "optimizer_state 'none' is unknown"),
        ({"kernels": "best"}, "kernels 'best' is unknown"),
        ({"attention": "best"}, "best"),
    ],
)
def test_a_control_that_is_wrong_is_answered_with_an_error(changes, said):
    found = Answers({}, {}).answer(State(**{**vars(TINY), **changes}), "cpu")
    assert isinstance(found, TwinstreamError)
    assert said in str(found)


def test_a_report_of_what_cannot_be_planned_is_an_error_and_not_a_page():
    client = explorer(Answers({}, {})).server.test_client()
    query = {**vars(TINY), "device_mem": "1MiB", "machine": "cpu"}
    answer = client.get("/report?" + urlencode(query))
    assert answer.status_code == 400
    assert "--device-mem" in answer.text


def test_counts_are_read_as_people_write_them():
    assert (count_of("524,288", "x"), count_of(" ", "x")) == (524_288, None)


def test_the_command_serves_the_page():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = "from twinstream.cli import main; main()"
    running = subprocess.Popen(
        [sys.executable, "-c", command, "explore", "--port", str(port), "--json"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert running.stdout is not None
        told = json.loads("".join(running.stdout.readline() for _ in range(3)))
        assert told == {"url": f"http://127.0.0.1:{port}/"}
        page = fetched(told["url"], running)
    finally:
        running.kill()
        running.wait()
        running.stdout.close()
    assert "twinstream explore" in page


def fetched(url: str, server: subprocess.Popen[str]) -> str:
    """The page, as soon as it is served."""
    while True:
        assert server.poll() is None, "it does not serve"
        try:
            with urlopen(url, timeout=60) as answer:
                return str(answer.read().decode())
        except URLError:
            time.sleep(0.05)


def test_a_host_that_is_not_this_machines_is_an_error_that_names_another():
    message = error_of("explore", "--host", "192.0.2.1")  # of RFC 5737, nobody's
    assert "choose another --host" in message
    assert "while" not in message


def test_a_port_in_use_is_an_error_that_names_another(address):
    port = urlsplit(address).port
    assert "choose another --port" in error_of("explore", "--port", port)
