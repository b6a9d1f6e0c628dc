"""The repository passes ruff, the linter and the formatter."""

import pytest

from tests.contract.package_tree import REPO
from tests.contract.run_python import run_python


@pytest.mark.parametrize("command", ["check --output-format=concise", "format --check"])
def test_the_repository_passes_ruff(command):
    run_python("-m", "ruff", *command.split(), ".", cwd=REPO)
