"""One set of processes for all that ends well."""

from collections.abc import Iterator

import pytest

from twinstream.executor.ranks.launch import RankProcesses


@pytest.fixture(scope="session")
def four() -> Iterator[RankProcesses]:
    with RankProcesses(4) as processes:
        yield processes
