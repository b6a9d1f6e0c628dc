"""Replicas, and pipelines of them: the bits of one process that adds up their gradients alike."""

from collections.abc import Iterator

import pytest

from tests.executor.ranks.trained import Case, assert_as_reference, train_ranks
from twinstream.clusters.layout import Layout
from twinstream.executor.ranks.launch import RankProcesses


@pytest.fixture(scope="module")
def two() -> Iterator[RankProcesses]:
    with RankProcesses(2) as processes:
        yield processes


@pytest.fixture(scope="module")
def four() -> Iterator[RankProcesses]:
    with RankProcesses(4) as processes:
        yield processes


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_two_replicas_have_the_bits_of_one_process(two, zero):
    case = Case(Layout(dp=2, zero=zero))
    assert_as_reference(case, train_ranks(case, two))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_pipeline_of_replicas_has_the_bits_of_one_process(four, zero):
    case = Case(Layout(pp=2, dp=2, zero=zero))
    assert_as_reference(case, train_ranks(case, four))
