"""The outputs on docs/cost.md are those of its commands."""

import re
import shlex

import pytest

from tests.contract.package_tree import REPO
from tests.front_door.command_line import call

_BLOCKS = re.findall(
    r"^```console\n\$ ((?:[^\n]*\\\n)*[^\n]*)\n(.*?)^```$",
    (REPO / "docs" / "cost.md").read_text(encoding="utf-8"),
    re.DOTALL | re.MULTILINE,
)


@pytest.mark.parametrize(("command", "shown"), _BLOCKS, ids=["work", "time", "charged"])
def test_an_output_on_the_page_is_what_its_command_prints(command, shown):
    outcome = call(*shlex.split(command.replace("\\\n", ""))[1:])
    printed = "".join(f"{line.rstrip()}\n" for line in outcome.out.splitlines())
    start, left_out, end = shown.rpartition("...\n")
    assert printed == shown if not left_out else printed.endswith(end) and not start


def test_the_seeds_two_commands_are_on_the_page():
    assert [days for _, shown in _BLOCKS[:2] for days in re.findall(r"([\d.]+) days", shown)] == [
        "118.8",
        "101.8",
    ]
