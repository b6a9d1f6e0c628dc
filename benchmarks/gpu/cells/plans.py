"""Plans and predictions of cells, made in processes beside the device's work."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.pool import AsyncResult, Pool
from pathlib import Path
from typing import Self

from benchmarks.gpu.jobs.campaign import Cell
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.metrics import executed_flops
from twinstream.models.recipe import Recipe
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.files import write_document
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import HOST
from twinstream.schedule.timeline import Timeline
from twinstream.schedule.worker_processes import WorkerContext
from twinstream.schedule.workload import Workload
from twinstream.screens.tables import workload_line


@dataclass(frozen=True)
class PlanRequest:
    """A cell, the machine it is planned for, the recipe, and where documents go."""

    cell: Cell
    machine: Machine
    recipe: Recipe
    folder: Path


@dataclass(frozen=True)
class Short:
    """A plan that will be run: its rounds, its predicted step, and its documents."""

    rounds: int
    step_s: float
    schedule: Path
    predicted: Path


@dataclass(frozen=True)
class PlannedCell:
    """The whole step as planned and predicted, and the plans to run."""

    workload: Workload
    workload_line: str
    policy: str
    predicted_step_s: float
    bound_step_s: float
    model_flops: int
    executed_flops: int
    device_cap_bytes: int | None
    host_arena_bytes: int
    shorts: tuple[Short, Short]
    whole: Short | None
    plan_s: float

    @property
    def predicted_extended_s(self) -> float:
        first, second = self.shorts
        return extended_s(
            self.workload.rounds_per_step,
            (first.rounds, second.rounds),
            (first.step_s, second.step_s),
        )


@dataclass(frozen=True)
class Refused:
    """A cell that cannot be planned, and why; `broke` where that may not be the cell's fault."""

    reason: str
    broke: bool = False


def extended_s(rounds: int, short_rounds: tuple[int, int], short_s: tuple[float, float]) -> float:
    """Seconds of a step of so many rounds, from steps of fewer.

    What the longer takes beyond the shorter is the time of the rounds that it has more; the
    optimizer and what else a step does once are in the shorter.

    >>> extended_s(32, (2, 4), (3.5, 6.5))
    48.5
    """
    (few, more), (few_s, more_s) = short_rounds, short_s
    return few_s + (rounds - few) * (more_s - few_s) / (more - few)


def extended_spread_s(
    rounds: int, short_rounds: tuple[int, int], short_spreads_s: tuple[float, float]
) -> float:
    """Standard deviation of a step so extended, from those of the shorter steps.

    >>> extended_spread_s(32, (2, 4), (0.0, 0.01))
    0.15
    """
    (few, more), (few_s, more_s) = short_rounds, short_spreads_s
    times = (rounds - few) / (more - few)
    return math.hypot((1.0 - times) * few_s, times * more_s)


def plan_cell(request: PlanRequest) -> PlannedCell | Refused:
    """Plan the whole step, then its short ones cut the same way, and predict each."""
    start_s = time.perf_counter()
    try:
        return _plan_cell(request, start_s)
    except TwinstreamError as error:
        return Refused(str(error))
    except Exception as error:  # a bug met in one cell must not cost the others
        return _broken(error)


def _broken(error: Exception) -> Refused:
    return Refused(f"planning broke: {type(error).__name__}: {error}", broke=True)


def _plan_cell(request: PlanRequest, start_s: float) -> PlannedCell:
    cell = request.cell
    whole, predicted = _planned(request, cell)
    workload = whole.workload
    assert whole.bound is not None, "plans have bounds"
    first, second = (
        _written(request, *_planned(request, cell.shortened(workload, rounds)))
        for rounds in cell.short_rounds
    )
    return PlannedCell(
        workload=workload,
        workload_line=workload_line(workload),
        policy=whole.policy,
        predicted_step_s=predicted.step_ns / 1e9,
        bound_step_s=whole.bound.step_s,
        model_flops=whole.model_flops,
        executed_flops=executed_flops(whole.only)[0],
        device_cap_bytes=whole.caps.device_bytes,
        host_arena_bytes=max(arena_bytes(whole.only, HOST), 0),
        shorts=(first, second),
        whole=_written(request, whole, predicted) if cell.whole else None,
        plan_s=time.perf_counter() - start_s,
    )


def _planned(request: PlanRequest, cell: Cell) -> tuple[Schedule, Timeline]:
    from twinstream import api

    schedule = api.plan(
        cell.spec, request.machine, step=cell.step(request.recipe),
        device_mem=cell.device_bytes, host_mem=cell.host_bytes, policy=cell.policy,
    )  # fmt: skip
    return schedule, api.simulate(schedule, request.machine)


def _written(request: PlanRequest, schedule: Schedule, predicted: Timeline) -> Short:
    rounds = schedule.workload.rounds_per_step
    name = f"{request.cell.key.replace(' ', '_')}.{rounds}"
    paths = [request.folder / f"{name}.{what}.json" for what in ("schedule", "predicted")]
    write_document(schedule, paths[0])
    write_document(predicted, paths[1])
    return Short(rounds, predicted.step_ns / 1e9, *paths)


class PlanPool:
    """Plans cells in the order given, in so many processes; with none, when asked for."""

    def __init__(self, requests: Sequence[PlanRequest], num_jobs: int) -> None:
        self._requests = {request.cell.key: request for request in requests}
        self._pool: Pool | None = None
        self._pending: dict[str, AsyncResult[PlannedCell | Refused]] = {}
        if num_jobs and requests:
            context = WorkerContext()
            self._pool = context.Pool(min(num_jobs, len(requests)))
            self._pending = {
                key: self._pool.apply_async(plan_cell, (request,))
                for key, request in self._requests.items()
            }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()

    def is_ready(self, key: str) -> bool:
        return self._pool is None or self._pending[key].ready()

    def get(self, key: str) -> PlannedCell | Refused:
        """The plan; made now where there are no processes. Call it when it is ready."""
        if self._pool is None:
            return plan_cell(self._requests[key])
        try:
            return self._pending[key].get()
        except Exception as error:  # what its process, or the way from there, made of it
            return _broken(error)
