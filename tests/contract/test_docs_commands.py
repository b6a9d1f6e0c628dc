"""The commands of a page that plan and predict end well, one after the other.

Not those that take many minutes: `fit` and what-ifs of a cluster.
"""

import re
import shlex
from pathlib import Path

import pytest

from tests.contract.package_tree import REPO
from tests.contract.test_docs import PAGES
from tests.front_door.command_line import call

ANSWERS = {
    *("plan", "verify", "simulate", "report", "trace", "whatif", "estimate", "cost", "fleet"),
    *("optimum", "compare", "calibrate", "validate", "models", "machines", "clusters"),
}
READERS = ("verify", "simulate", "report", "trace", "compare")  # of a file, or a run's folder
WRITTEN = ("-o", "--output", "--html")
_BLOCK = re.compile(r"^(?:    |\$ )(twinstream .*)$", re.MULTILINE)
_PLACEHOLDER = re.compile(r"[A-Z_]{3,}|[A-Z]|\.\.\.|.*<.*")
_FILE = re.compile(r".+\.(?:json|toml|jsonl|csv|txt|py(?::\w+)?)|.*/.*")


def commands_of(text: str) -> list[list[str]]:
    """The words of each command in a block of code that asks for an answer, in order."""
    found = []
    for line in _BLOCK.findall(re.sub(r"\\\n\s*", " ", text)):
        for command in line.split(" && "):
            words = shlex.split(command, comments=True)[1:]
            is_long = words[:2] == ["whatif", "--cluster"]  # ten searches
            if is_long or not words or words[0] not in ANSWERS:
                continue
            if not any(map(_PLACEHOLDER.fullmatch, words)):
                found.append(words)
    return found


def files_read(words: list[str]) -> list[str]:
    """Arguments that name a file which has to be there."""
    named = words[1:2] if words[0] in READERS else []
    return named + [
        word.partition(":")[0]
        for before, word in zip(["", *words], words, strict=False)
        if before not in WRITTEN and _FILE.fullmatch(word) and "=" not in word
    ]


def has_commands(page: Path) -> bool:
    return page.name != "CHANGELOG.md" and bool(commands_of(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if has_commands(page)],
    ids=lambda page: str(page.relative_to(REPO)),
)
def test_the_commands_of_a_page_end_well(page, tmp_path, monkeypatch):
    """Those whose files the page's own commands write, or the repository has."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(REPO / "examples")
    refused = []
    for words in commands_of(page.read_text(encoding="utf-8")):
        if all(Path(name).exists() for name in files_read(words)):
            outcome = call(*words)
            if outcome.code:
                refused.append((" ".join(words), outcome.err.splitlines()[-1][:300]))
    assert not refused


def test_a_pages_commands_are_found_with_what_they_read():
    text = (
        "Text `twinstream plan --no`\n\n    twinstream plan 8b --machine h100 \\\n"
        "        --policy 'a b' -o p.json   # a remark\n"
        "    twinstream verify p.json && twinstream report p.json -o r.html\n"
        "    twinstream plan --model MODEL\n    twinstream whatif ... --target 75%\n"
        "    twinstream train tiny a.jsonl -o run\n"
    )
    found = commands_of(text)
    assert found == [
        ["plan", "8b", "--machine", "h100", "--policy", "a b", "-o", "p.json"],
        ["verify", "p.json"],
        ["report", "p.json", "-o", "r.html"],
    ]
    assert [set(files_read(words)) for words in found] == [set(), {"p.json"}, {"p.json"}]
