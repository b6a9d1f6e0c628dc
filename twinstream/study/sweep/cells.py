"""The cells of a sweep, and the rows that they make: here, in processes, or on a Ray cluster."""

import hashlib
import json
import logging
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points, version
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from twinstream.clusters.search.space import NoLayoutError
from twinstream.cost.bill import Prices, bill_of
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.planner import Planner
from twinstream.planner.policies import GROUP
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.worker_processes import in_processes
from twinstream.study.answer import StudyError
from twinstream.study.processes import new_planner
from twinstream.study.query import Query
from twinstream.study.values import Value

Row = dict[str, Any]

OK, INFEASIBLE, REFUSED, BUG = "ok", "infeasible", "refused", "bug"
OUTCOME = (
    "status", "reason", "plan_of", "enough_device_bytes", "enough_host_bytes", "less_may_do",
    "seconds",
)  # fmt: skip
MONEY = ("money_per_million_tokens", "money_per_billion_tokens")
PACKAGES = (
    "twinstream.hardware_profiles", "twinstream.models", "twinstream.planner",
    "twinstream.schedule", "twinstream.simulator", "twinstream.measures", "twinstream.clusters",
    "twinstream.cost",
)  # fmt: skip
_MODULES = ("query.py", "answer.py", "one_device.py", "layouts.py", "questions.py", "processes.py",
            "sweep/cells.py")  # fmt: skip
_PER_CPU = 2
_CONNECT_S = 10


@dataclass(frozen=True)
class Cell:
    """One query of a sweep: the values that were asked for, and what they amount to.

    `key` changes with anything that the result depends on, twinstream's sources among it. It does
    not with `beside`, a cell of less whose plan is the answer where it is faster.
    """

    values: Mapping[str, Value]
    query: Query
    price_per_gpu_hour: float | None = None
    beside: "Cell | None" = None

    @property
    def key(self) -> str:
        about = {
            "sources": sources_hash(),
            "query": self.query.content,
            "price": self.price_per_gpu_hour,
        }
        canonical = json.dumps(about, sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def run_cell(cell: Cell, planner: Planner) -> Row:
    """Answer a cell; caps that are too small are a row, too."""
    start_s = time.perf_counter()
    row = {**_outcome(cell, planner), **_about(cell)}
    return {**row, "seconds": round(time.perf_counter() - start_s, 3)}


def _outcome(cell: Cell, planner: Planner) -> Row:
    try:
        known = [] if cell.beside is None else [cell.beside.query.answer(planner=planner)]
        answer = cell.query.answer(known, planner)
    except InfeasiblePlan as error:
        found = error.shortage
        return {
            "status": INFEASIBLE, "reason": str(error),
            "enough_device_bytes": found.enough_device_bytes,
            "enough_host_bytes": found.enough_host_bytes,
            "less_may_do": found.less_may_do,
        }  # fmt: skip
    except NoLayoutError as error:
        return {"status": INFEASIBLE, "reason": str(error)}
    except TwinstreamError as error:
        return {"status": REFUSED, "reason": str(error)}
    prices = Prices(price_per_gpu_hour=cell.price_per_gpu_hour)
    bills = [bill_of(n / answer.tokens_per_s, answer.num_gpus, prices) for n in (1e6, 1e9)]
    row = {"status": OK, **answer.figures}
    row |= {name: bill.money for name, bill in zip(MONEY, bills, strict=True)}
    if cell.beside is not None and answer.is_known:
        row["reason"] = f"the plan of {_differing(cell.beside, cell)} is faster than its own"
        row["plan_of"] = cell.beside.key
    return row


def _differing(cell: Cell, other: Cell) -> str:
    """What was asked for otherwise, in words."""
    values = cell.values.items()
    return ", ".join(f"{name} {value}" for name, value in values if other.values[name] != value)


def _about(cell: Cell) -> Row:
    return {"key": cell.key, **cell.values}


def _bug_row(cell: Cell, error: BaseException) -> Row:
    """The row of a cell whose planning fell over; the sweep goes on, and ends with an error."""
    return {"status": BUG, "reason": f"{type(error).__name__}: {error}", **_about(cell)}


@cache
def sources_hash() -> str:
    """Of all modules that plan, predict and sum up, and of the version of the solver (HiGHS).

    Comments count too: to tell them from code would take longer than it may save.
    """
    found = hashlib.sha256(version("highspy").encode())
    for name, file in sources():
        found.update(f"\n{name}\n".encode() + file.read_bytes())
    return found.hexdigest()


def sources() -> Iterator[tuple[str, Traversable]]:
    """Names and files, in the same order everywhere; registered policies are among them."""
    registered = {entry.module.rpartition(".")[0] for entry in entry_points(group=GROUP)}
    for package in sorted({*PACKAGES, *registered} - {""}):
        yield from _modules(package, files(package))
    for name in _MODULES:
        file = files("twinstream.study")
        for part in name.split("/"):
            file = file / part
        yield f"twinstream.study.{name.replace('/', '.')}", file


def _modules(name: str, folder: Traversable) -> Iterator[tuple[str, Traversable]]:
    for one in sorted(folder.iterdir(), key=lambda one: one.name):
        if one.is_dir():
            yield from _modules(f"{name}.{one.name}", one)
        elif one.name.endswith(".py"):
            yield f"{name}.{one.name}", one


def on_cores(cells: Sequence[Cell], num_jobs: int) -> Iterator[Row]:
    """Rows as they come, from so many processes.

    Raises:
        WorkerDied: a process died, probably for want of memory.
    """
    for cell, outcome in in_processes(run_cell, cells, num_jobs, new_planner):
        yield _bug_row(cell, outcome) if isinstance(outcome, Exception) else outcome


def on_ray(cells: Sequence[Cell], address: str) -> Iterator[Row]:
    """Rows as they come, from a Ray cluster that has twinstream installed.

    Args:
        address: of the cluster; `auto` is the one this machine belongs to, `local` a new one here.

    Raises:
        StudyError: Ray is not installed, or there is no cluster.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise StudyError(
            "--ray needs Ray, which is not installed: pip install 'twinstream[ray]'"
        ) from None
    _require_listening(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise StudyError(f"there is no Ray cluster at '{address}': {error}") from None
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
        raise StudyError(
            f"there is no Ray cluster at '{address}': {error}; give HOST:PORT of its head"
        ) from None


def _from_ray(ray: Any, cells: Sequence[Cell]) -> Iterator[Row]:
    remote = ray.remote(num_cpus=1, max_retries=2)(_run_alone)
    left = list(reversed(cells))
    in_flight: dict[Any, Cell] = {}
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
                yield _bug_row(cell, error)


def _run_alone(cell: Cell) -> Row:
    return run_cell(cell, new_planner())
