"""The explorer with many machines, on a phone, and while quick plans are refined."""

import shlex
import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("dash", reason="Dash is not installed")

from dash import html
from werkzeug.serving import make_server

from tests.front_door.command_line import call
from tests.helpers.browser import browser_page
from tests.helpers.waiting import comes
from twinstream.study.answer import Answer
from twinstream.study.explore.answers import (
    Answers,
    Refining,
    RefusedPlan,
    State,
    StateError,
    can_be_refined,
)
from twinstream.study.explore.app import explorer
from twinstream.study.explore.show import Found, column, compared, more_of

QUICK = State("tiny", "cpu", "64", "256", "8MiB", "", "optimal", "quick")
SEVEN = ("h100", "a100", "b200", "gh200", "mi300x", "rtx5090", "rtx3090")
ROOMY = State("tiny", ",".join(SEVEN), "64", "256", "4GiB", "", "resident")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = make_server("127.0.0.1", 0, explorer(Answers({}, {})).server, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.port}/"
    server.shutdown()


@pytest.fixture(scope="module")
def seven() -> list[Found]:
    answers = Answers({}, {})
    return [Found(machine, ROOMY, answers.answer(ROOMY, machine)) for machine in SEVEN]


def parts(component: object) -> Iterator[object]:
    yield component
    children = getattr(component, "children", None)
    for child in children if isinstance(children, list | tuple) else [children]:
        if child is not None:
            yield from parts(child)


def test_seven_machines_stand_in_a_table_beside_the_chart_each_in_its_colour(seven):
    (beside,) = compared(seven)
    chart, table = beside.children
    assert beside.className == "beside"
    assert "data-figure" in chart.to_plotly_json()["props"]
    rows = [one for one in parts(table) if isinstance(one, html.Tr)][1:]
    speeds = [float(row.children[1].children.split()[0].replace(",", "")) for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    assert {row.children[0].children[1] for row in rows} == set(SEVEN)
    swatches = [one for one in parts(table) if getattr(one, "className", "") == "swatch"]
    assert len({one.style["background"] for one in swatches}) == 7
    cards = [
        one for one in parts(column(seven[0], 7, "")) if getattr(one, "className", "") == "cards"
    ]
    assert cards == []


def test_two_machines_stand_in_cards(seven):
    assert compared(seven[:2]) == []
    shown = [getattr(one, "className", "") for one in parts(column(seven[0], 2, ""))]
    assert "cards" in shown


def test_where_nothing_more_would_help_no_chart_is_drawn(seven):
    page = more_of({one.machine: one.answer for one in seven if isinstance(one.answer, Answer)})
    assert "data-figure" not in str(page.to_plotly_json())
    assert "compute limits the step" in str(page)


def test_a_quick_plan_says_so_and_the_normal_one_takes_its_place(address):
    with browser_page() as opened:
        page = opened.page
        page.goto(address + QUICK.url)
        page.wait_for_selector("#effort-cpu:has-text('Quick plan')")
        assert "--effort quick" in page.inner_text(".machine code")
        page.wait_for_selector("#effort-cpu:has-text('Refined')", timeout=120_000)
        shown = page.inner_text(".machine code")
        _, *arguments = shlex.split(shown)
        assert "--effort normal" in shown
        expected = call(*arguments, "--json").json()["tokens_per_s"]
        assert page.inner_text("#speed-cpu") == f"{expected:,.0f}"
        assert "effort=normal" in str(page.get_attribute("text=full report", "href"))


def test_a_process_beside_makes_the_normal_plan_and_ends():
    answers = Answers({}, {})
    refining = Refining(answers)
    assert QUICK.refined is not None
    asked = QUICK.refined, "cpu"
    refining.follow([asked], anew=True)
    (process,) = refining._workers.processes
    assert comes(lambda: refining.follow([asked], anew=False) or answers.kept(*asked))
    process.join()
    found, alone = answers.kept(*asked), Answers({}, {}).answer(*asked)
    assert isinstance(found, Answer)
    assert isinstance(alone, Answer)
    assert found.summary == alone.summary
    assert process.exitcode == 0


def test_a_process_that_dies_is_told_once_and_not_begun_again():
    answers = Answers({}, {})
    refining = Refining(answers)
    asked = State(effort="normal"), "h100"
    refining.follow([asked], anew=True)
    refining._workers.processes[0].kill()
    assert comes(lambda: refining.follow([asked], anew=False) or answers.kept(*asked))
    assert isinstance(answers.kept(*asked), RefusedPlan)
    assert "code -9" in str(answers.kept(*asked))
    refining.follow([asked], anew=True)
    assert refining._workers is None


def test_a_new_question_ends_what_runs_for_the_last():
    refining = Refining(Answers({}, {}))
    refining.follow([(State(effort="normal"), "h100")], anew=True)
    (first,) = refining._workers.processes
    refining.follow([(State(effort="normal"), "a100")], anew=False)  # waits for its turn
    assert refining._workers.processes == [first]
    refining.follow([(State(effort="normal"), "a100")], anew=True)
    assert not first.is_alive()
    (second,) = refining._workers.processes
    refining.end()
    assert not second.is_alive()


def test_only_quick_plans_and_refusals_for_memory_are_refined():
    assert not can_be_refined(StateError("wrong"))
    assert can_be_refined(
        Answers({}, {}).answer(State(**{**vars(QUICK), "device_mem": "1MiB"}), "cpu")
    )
    assert State(policy="streaming").refined is None
    assert State(effort="normal").refined is None


def test_answers_that_are_kept_are_so_many_and_no_more():
    answers = Answers({}, {})
    for number in range(100):
        answers.keep((State(seq_len=str(number)), "cpu"), StateError("too long"))
    kept = [n for n in range(100) if answers.kept(State(seq_len=str(n)), "cpu") is not None]
    assert kept == list(range(52, 100))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_on_a_phone_all_is_within_its_width_and_the_menu_shows_the_machines(address, dark):
    with browser_page(dark=dark, width=390) as opened:
        page = opened.page
        page.goto(address + ROOMY.url)
        page.wait_for_selector("#timeline-rtx3090 .main-svg", timeout=60_000)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        plot = page.locator("#timeline-h100 .nsewdrag").first.bounding_box()
        assert plot["width"] > 390 / 2
        # The text of a figure is that of the page.
        text = page.evaluate("getComputedStyle(document.body).color")
        tick = "getComputedStyle(document.querySelector('#timeline-h100 .ytick text')).fill"
        assert page.evaluate(tick) == text
        page.click("#machines")
        menu = page.locator(".dash-dropdown-content").bounding_box()
        option = page.locator(".dash-dropdown-option").first.bounding_box()
        assert menu["height"] / option["height"] > 8
