"""The output on docs/cost.md is that of its command."""

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


@pytest.mark.parametrize(("command", "shown"), _BLOCKS, ids=["charged"])
def test_an_output_on_the_page_is_what_its_command_prints(command, shown):
    outcome = call(*shlex.split(command.replace("\\\n", ""))[1:])
    assert "".join(f"{line.rstrip()}\n" for line in outcome.out.splitlines()) == shown
