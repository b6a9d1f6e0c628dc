"""The examples in docstrings are true."""

import doctest
import importlib
import importlib.util

import pytest

from tests.contract.package_tree import module_files, needs_torch


def with_examples() -> list[str]:
    """Modules that have any."""
    return [name for name, path in module_files().items() if ">>> " in path.read_text("utf-8")]


@pytest.mark.parametrize("module", with_examples())
def test_the_examples_of_a_module_are_true(module):
    if needs_torch(module) and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    result = doctest.testmod(importlib.import_module(module))
    assert result.failed == 0, "see the captured output"
