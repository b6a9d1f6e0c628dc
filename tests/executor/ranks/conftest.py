"""One set of processes for all that ends well, and quick starts for what does not."""

import multiprocessing
from collections.abc import Iterator

import pytest

from twinstream.executor.ranks.launch import RankProcesses


@pytest.fixture(scope="session")
def four() -> Iterator[RankProcesses]:
    with RankProcesses(4) as processes:
        yield processes


@pytest.fixture(scope="session", autouse=True)
def _torch_is_imported_once() -> None:
    """For processes that are started by fork from one that has imported it."""
    multiprocessing.set_forkserver_preload(["twinstream.executor.ranks.worker"])
