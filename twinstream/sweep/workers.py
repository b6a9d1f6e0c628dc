"""Planning in parallel: on the cores of this machine, or on a Ray cluster."""

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar, cast

from twinstream.planner.planner import Planner
from twinstream.schedule.worker_processes import WorkerContext, end_with_parent, interrupts_held
from twinstream.simulator.replay import steady_state
from twinstream.sweep.asked.values import SweepError
from twinstream.sweep.cell import Row, bug_row, run_cell
from twinstream.sweep.config import AnyCell

_PER_CPU = 2
_CONNECT_S = 10
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def on_cores(cells: Sequence[AnyCell], num_jobs: int) -> Iterator[Row]:
    """Rows as they come, from so many processes.

    Raises:
        SweepError: a process died, probably for want of memory.
    """
    for cell, outcome in in_processes(run_cell, cells, num_jobs):
        yield bug_row(cell, outcome) if isinstance(outcome, BaseException) else outcome


def in_processes(
    work: Callable[[_Item, Planner], _Result], items: Sequence[_Item], num_jobs: int
) -> Iterator[tuple[_Item, _Result | BaseException]]:
    """(item, what the work returns or raises) as they come; `work` is a module's function.

    Each process has a planner, which it gives to all of its work. They end with this one, even if
    it is killed.

    Raises:
        SweepError: a process died, probably for want of memory.
    """
    context = WorkerContext()
    left = list(reversed(items))
    at_work: dict[Connection, _Item] = {}
    processes = []
    try:
        with interrupts_held():
            for _ in range(min(num_jobs, len(items))):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, work), daemon=True)
                processes.append(process)
                process.start()
                theirs.close()
                at_work[ours] = left.pop()
        for ours, item in at_work.items():
            ours.send(item)
        while at_work:
            for ours in cast("list[Connection]", wait(list(at_work))):
                item, outcome = at_work.pop(ours), ours.recv()
                if left:
                    at_work[ours] = left.pop()
                    ours.send(at_work[ours])
                yield item, outcome
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise SweepError(
            "a process died, probably because memory ran out; what is done is kept: run it again "
            "with fewer --jobs to continue"
        ) from None
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _serve(theirs: Connection, work: Callable[[Any, Planner], object]) -> None:
    """Do one piece of work after the other, as they are sent, until there is no more."""
    end_with_parent()
    planner = Planner(steady_state)
    while True:
        try:
            item = theirs.recv()
        except EOFError:
            return
        try:
            outcome = work(item, planner)
        except Exception as error:
            outcome = error
        theirs.send(outcome)


def on_ray(cells: Sequence[AnyCell], address: str) -> Iterator[Row]:
    """Rows as they come, from a Ray cluster that has twinstream installed.

    Args:
        address: of the cluster; `auto` is the one this machine belongs to, `local` a new one here.

    Raises:
        SweepError: Ray is not installed, or there is no cluster.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise SweepError(
            "--ray needs Ray, which is not installed: pip install 'twinstream[ray]'"
        ) from None
    _require_listening(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise SweepError(f"there is no Ray cluster at '{address}': {error}") from None
    try:
        yield from _from_ray(ray, cells)
    finally:
        ray.shutdown()


def _require_listening(address: str) -> None:
    """Ray itself tries for minutes, and then ends the process."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon:
        return  # `auto`, `local`: Ray knows at once
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise SweepError(
            f"there is no Ray cluster at '{address}': {error}; give HOST:PORT of its head"
        ) from None


def _from_ray(ray: Any, cells: Sequence[AnyCell]) -> Iterator[Row]:
    remote = ray.remote(num_cpus=1, max_retries=2)(_run_alone)
    left = list(reversed(cells))
    in_flight: dict[Any, AnyCell] = {}
    while left or in_flight:
        most = _PER_CPU * max(1, int(ray.cluster_resources().get("CPU", 1)))
        while left and len(in_flight) < most:
            cell = left.pop()
            in_flight[remote.remote(cell)] = cell
        done, _ = ray.wait(list(in_flight))
        for reference in done:
            cell = in_flight.pop(reference)
            try:
                yield ray.get(reference)
            except ray.exceptions.RayError as error:
                yield bug_row(cell, error)


def _run_alone(cell: AnyCell) -> Row:
    return run_cell(cell, Planner(steady_state))
