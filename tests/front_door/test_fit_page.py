"""The page of many models on many cards: what a cell says is what its command says."""

import re
import shlex

import pytest

from benchmarks import fit_page
from benchmarks.fit_page import CARDS, MODELS
from tests.front_door.command_line import call
from tests.helpers.browser import browser_page
from twinstream.hardware_profiles.loader import machine_names
from twinstream.models.presets import preset_names, traced_presets
from twinstream.study.fit.chart import Chart, chart, chart_html

STEP = {"seq_len": 256, "tokens_per_step": 1024}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Chart:
    """tiny, and a name that is no model, on three sizes of memory."""
    sizes = {"much": "1GiB", "less": "10.5MiB", "none": "1MiB"}
    folder = tmp_path_factory.mktemp("cards")
    for name, size in sizes.items():
        lines = ['base = "cpu"', f'name = "{name}"', f'device_memory_bytes = "{size}"']
        text = "\n".join([*lines, 'host_memory_bytes = "256KiB"', "device_reserve_bytes = 0"])
        (folder / f"{name}.toml").write_text(text)
    cards = [str(folder / f"{name}.toml") for name in sizes]
    return chart(["tiny", "nowhere"], cards, **STEP)


def test_a_cell_is_of_the_fullest_way_that_fits_and_its_command_says_the_same(found):
    much, less, none = found.rows["tiny"]
    assert (much.way, less.way) == ("full", "LoRA") and not none.fits
    for cell in (much, less):
        command = shlex.split(cell.plan_command)
        assert command[:2] == ["twinstream", "plan"]
        told = call(*command[1:], "--json").json()
        assert told["tokens_per_s"] == cell.tokens_per_s
    assert all("nowhere" in cell.refused for cell in found.rows["nowhere"])


def test_the_page_is_small_and_needs_nothing_else(found, tmp_path):
    text = chart_html(found)
    assert len(text) < 20_000 and not re.search(r"(src|href)=", text)
    assert text.count("<td class=w") == 2 and text.count("<td class=no") == 4
    path = tmp_path / "fit.html"
    path.write_text(text)
    with browser_page(width=390) as opened:
        opened.page.goto(f"file://{path}")
        opened.page.locator("td.w1").click()
        about = opened.page.locator("#about").inner_text()
        assert found.rows["tiny"][1].plan_command in about and "--lora r=16" in about
        assert opened.page.evaluate("document.documentElement.scrollWidth") == 390
        assert opened.complaints == []


def test_a_page_that_was_stopped_goes_on(found, tmp_path, monkeypatch):
    """Models that are done are read, but for a line that was cut off; then the file goes."""
    planned: list[str] = []

    def planning(models, cards, *, num_jobs, on_cell):
        planned.extend(models)
        if planned == ["tiny", "nowhere"]:
            raise KeyboardInterrupt
        return Chart(cards, {models[0]: found.rows[models[0]]})

    monkeypatch.setattr(fit_page, "MODELS", ("tiny", "nowhere"))
    monkeypatch.setattr(fit_page, "CARDS", found.cards)
    monkeypatch.setattr(fit_page, "chart", planning)
    page = tmp_path / "fit.html"
    with pytest.raises(KeyboardInterrupt):
        fit_page.main([str(page)])
    with (tmp_path / "fit.html.done.jsonl").open("a") as file:
        file.write('{"made_by": ')
    fit_page.main([str(page)])
    assert planned == ["tiny", "nowhere", "nowhere"]
    assert found.html in page.read_text()
    assert list(tmp_path.iterdir()) == [page]


def test_the_shipped_page_is_of_models_and_cards_that_there_are():
    assert len(set(MODELS)) == 30 and len(set(CARDS)) == 20
    assert set(CARDS) <= set(machine_names())
    assert set(MODELS) <= {*preset_names(), *traced_presets()}
