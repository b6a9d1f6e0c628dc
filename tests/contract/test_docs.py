"""What the docs name is there: links and their headings, paths, modules, options, words."""

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from tests.contract.package_tree import REPO
from twinstream.cli import app
from twinstream.commands.arguments.help_text import HELP_ALL

TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
RECORDED_RUNS = REPO / "benchmarks" / "accuracy" / "recorded_runs.sh"  # commands of a page
PAGES = [*(REPO / name for name in TOP), *sorted((REPO / "docs").rglob("*.md"))]
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
_PATH = re.compile(r"[\w.-]+/(?:[\w.-]+/)*[a-z_][\w-]*\.(?:py|sh|md|csv|txt|js|svg|png)\b")
_MODULE = re.compile(r"-m ((?:benchmarks|tests|twinstream)(?:\.\w+)*)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_what_a_page_names_is_there(page):
    missing = missing_in(page.read_text(encoding="utf-8"), page)
    assert not missing, f"{page.relative_to(REPO)} names what is not there: {missing}"


def missing_in(text: str, page: Path) -> list[str]:
    """Links, paths from the top of the repository, and modules that a reader would not find."""
    links = [(page.parent / path if path else page, head) for path, head in _LINK.findall(text)]
    paths = _PATH.findall(re.sub(r"\[[^]]*\]\([^)]*\)|https?:\S*", "", text))
    modules = {REPO / name.replace(".", "/") for name in _MODULE.findall(text)}
    return [
        *(f"{path.name}#{head}" for path, head in links if not _leads_somewhere(path, head)),
        *(path for path in paths if not (REPO / path).is_file()),
        *(str(m) for m in modules if not (m.with_suffix(".py").is_file() or m.is_dir())),
    ]


def _leads_somewhere(path: Path, heading: str) -> bool:
    if not path.exists() or not path.resolve().is_relative_to(REPO):
        return False
    return not heading or heading in _headings(path.read_text(encoding="utf-8"))


def _headings(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "text",
    ["[a](nowhere.md)", "[a](README.md#no-such)", "`../shared/x.csv`", "`a/b.py`", "-m tests.x"],
)
def test_what_is_missing_is_found(text):
    assert missing_in(text, REPO / "README.md")


_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_CALL = re.compile(r"(?:^|[`$;(|] ?)\s*twinstream (\w+)(.*?)(?:`|[|&;#]|$)")
_OTHERS = re.compile(r"pytest|python3? -[mc]|\$FIDELITY |torchrun|pip install|hf download|nsys")


@cache
def options_by_command() -> dict[str, set[str]]:
    """Of each command of the command line, by its name, its options."""
    found: dict[str, set[str]] = {}

    def visit(command: Any, name: str) -> None:
        names = [{*param.opts, *param.secondary_opts} for param in command.params]
        found[name] = {"--help", HELP_ALL}.union(*names)
        if hasattr(command, "list_commands"):  # a group, of typer's own click
            context = click.Context(command)
            for each in command.list_commands(context):
                visit(command.get_command(context, each), f"{name} {each}".strip())

    visit(typer.main.get_command(app), "")
    return found


@pytest.mark.parametrize(
    "page",
    [*(page for page in PAGES if page.name != "CHANGELOG.md"), RECORDED_RUNS],
    ids=lambda page: str(page.relative_to(REPO)),
)
def test_options_on_a_page_are_of_its_commands(page):
    unknown = unknown_options(page.read_text(encoding="utf-8"))
    assert not unknown, f"{page.relative_to(REPO)} has options that are gone: {unknown}"


def unknown_options(text: str) -> list[str]:
    """Options that the command beside them lacks, or, where none is beside them, every command."""
    known = options_by_command()
    anywhere = set().union(*known.values())
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        if _OTHERS.search(line):
            continue
        found += [option for option in _OPTION.findall(line) if option not in anywhere]
        for name, given in _CALL.findall(line):
            options = _OPTION.findall(given)
            found += [f"{name} {each}" for each in options if each not in known.get(name, set())]
    return found


@pytest.mark.parametrize(
    "text",
    [
        "`--no-such`",
        "    twinstream verify plan.json \\\n  --seq-len 8",
        "`twinstream plam --gpus 2`",
    ],
)
def test_an_option_that_is_gone_is_found(text):
    assert unknown_options(text)


def test_a_word_of_the_glossary_has_one_entry():
    glossary = (REPO / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = Counter(re.findall(r"^\| \*\*(.+?)\*\* \|", glossary, re.MULTILINE))
    assert words and max(words.values()) == 1, words.most_common(1)
