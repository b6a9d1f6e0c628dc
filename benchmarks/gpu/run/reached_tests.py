"""A pytest plugin: tests that were reached before, named in a file by their ids, are left out."""

import json
import os
from pathlib import Path

import pytest

REACHED = "TWINSTREAM_REACHED_TESTS"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what is not in the file that the environment names, which has ids as pytest prints."""
    reached = set(json.loads(Path(os.environ[REACHED]).read_text(encoding="utf-8")))
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        printed = f"{os.path.relpath(item.path)}::{item.nodeid.partition('::')[2]}"
        known = printed in reached
        (left_out if known else kept).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept
