"""One set of processes of each number for what ends well, and quick starts for what does not."""

import multiprocessing
from collections.abc import Iterator

import pytest

from twinstream.executor.launch.rank_processes import RankProcesses


@pytest.fixture(scope="session")
def one(torch_is_imported_once: None) -> Iterator[RankProcesses]:
    with RankProcesses(1, start_method="forkserver") as processes:
        yield processes


@pytest.fixture(scope="session")
def two(torch_is_imported_once: None) -> Iterator[RankProcesses]:
    with RankProcesses(2, start_method="forkserver") as processes:
        yield processes


@pytest.fixture(scope="session")
def four(torch_is_imported_once: None) -> Iterator[RankProcesses]:
    with RankProcesses(4, start_method="forkserver") as processes:
        yield processes


@pytest.fixture(scope="session", autouse=True)
def torch_is_imported_once() -> None:
    """For processes that are started by fork from one that has imported it."""
    multiprocessing.set_forkserver_preload(["twinstream.executor.launch.worker"])
