"""Queries that are answered in processes: each has a planner, which learns from plan to plan."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from twinstream.planner.planner import Planner
from twinstream.schedule.worker_processes import in_processes
from twinstream.simulator.replay import steady_state

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def new_planner() -> Planner:
    """What each process begins with."""
    return Planner(steady_state)


def answers_of(
    work: Callable[[_Item, Planner], _Result],
    items: Sequence[_Item],
    num_jobs: int,
    on_result: Callable[[_Result], object] = lambda result: None,
) -> list[_Result]:
    """What the work returns of each item, in their order; `on_result` is called as they come.

    Raises:
        WorkerDied: a process died.
        Exception: what the work raised.
    """
    found: dict[int, _Result] = {}
    for item, outcome in in_processes(work, items, num_jobs, new_planner):
        if isinstance(outcome, Exception):
            raise outcome
        found[id(item)] = outcome
        on_result(outcome)
    return [found[id(item)] for item in items]
