"""A pytest plugin: marks the tests of slow.txt, which only `make test-all` runs; long ones first.

That types are right is `make lint`'s.

Each of these takes more than three seconds of CPU, or is one of several that show the same of other
shapes; what they show is also shown, of a smaller case, by a test that is always run. It is one
list, so that what is left out is seen at a glance.
"""

from pathlib import Path

import pytest

LIST = Path(__file__).with_name("slow.txt")
LONG = ("tests/training", "tests/traced", "tests/executor/ranks", "tests/front_door")


def slow_tests() -> frozenset[str]:
    """Ids of tests, as pytest prints them."""
    return frozenset(LIST.read_text(encoding="utf-8").splitlines())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = slow_tests()
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))  # so that none is the last
