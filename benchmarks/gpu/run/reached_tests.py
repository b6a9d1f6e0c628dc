"""A pytest plugin: tests in the order of the paths given, without those reached before.

pytest collects paths that lie in one another once, in the order of the outer one.
"""

import json
import os
from pathlib import Path

import pytest

REACHED = "TWINSTREAM_REACHED_TESTS"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is in the file that the environment names, which has ids as pytest prints."""
    reached = set(json.loads(Path(os.environ[REACHED]).read_text(encoding="utf-8")))
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        printed = f"{os.path.relpath(item.path)}::{item.nodeid.partition('::')[2]}"
        known = printed in reached
        (left_out if known else kept).append(item)
    config.hook.pytest_deselected(items=left_out)
    given = [os.path.relpath(path) for path in config.args if "::" not in path]
    items[:] = sorted(kept, key=lambda item: _rank(os.path.relpath(item.path), given))


def _rank(path: str, given: list[str]) -> int:
    """Of the first path given that a file is or lies in."""
    inside = (n for n, outer in enumerate(given) if path == outer or path.startswith(f"{outer}/"))
    return next(inside, len(given))
