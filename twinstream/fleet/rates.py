"""How fast each job is on so many nodes: the predictions that a fleet is planned with."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from twinstream.fleet.jobs import HOUR_S, FleetError, FleetFile, FleetJob
from twinstream.hardware_profiles.clusters.loader import load_cluster
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node
from twinstream.study.questions import query_of
from twinstream.study.values import Value


class SpeedOnNodes(Node):
    """A job on so many nodes, by its fastest layout; `error` is that of the speed, None unknown."""

    nodes: int
    layout: str
    tokens_per_s: float
    error: float | None


@dataclass(frozen=True)
class FleetTask:
    """A job as the calendar sees it: seconds of the whole job by the count of its nodes."""

    job: FleetJob
    speeds: Mapping[int, SpeedOnNodes]
    seconds: Mapping[int, float]

    @property
    def fastest_s(self) -> float:
        """Seconds on its best count of nodes."""
        return min(self.seconds.values())


Predict = Callable[[FleetJob, int], SpeedOnNodes]


def predicted_speed(cluster: str, job: FleetJob, nodes: int) -> SpeedOnNodes:
    """The fastest layout of a job on some nodes of a cluster, as `plan --cluster` finds it.

    Raises:
        TwinstreamError: the model, the cluster or the layout cannot be, or nothing fits.
    """
    batch = {"global_batch": job.global_batch, "tokens_per_step": job.tokens_per_step}
    gpus = nodes * load_cluster(cluster).count("gpus_per_node")
    values: dict[str, Value] = {
        "model": job.model, "cluster": cluster, "gpus": gpus, "seq_len": job.seq_len,
        **{name: value for name, value in batch.items() if value is not None},
    }  # fmt: skip
    if twice := sorted(values.keys() & job.layout.keys()):
        raise FleetError(f"layout.{twice[0]} is no part of a layout: leave it out")
    found = query_of({**values, **job.layout}).answer(advises=False)
    return SpeedOnNodes(
        nodes=nodes, layout=found.layout_text, tokens_per_s=found.tokens_per_s,
        error=found.uncertainty.symmetric,
    )  # fmt: skip


def tasks_of(
    fleet: FleetFile, predict: Predict, source: str, on_job: Callable[[], object] = lambda: None
) -> list[FleetTask]:
    """Every job with what is predicted of it; jobs that are alike are predicted once.

    Raises:
        FleetError: a job fits on no count of nodes.
    """
    known: dict[object, SpeedOnNodes | TwinstreamError] = {}
    found = []
    for job in fleet.jobs:
        speeds, refusals = {}, []
        for size in job.sizes(fleet.nodes):
            batch, fixed = (job.global_batch, job.tokens_per_step), tuple(job.layout.items())
            key = (job.model, job.seq_len, batch, fixed, size)
            if key not in known:
                known[key] = _attempt(predict, job, size)
            speed = known[key]
            if isinstance(speed, SpeedOnNodes):
                speeds[size] = speed
            else:
                refusals.append(speed)
        if not speeds:
            sizes = ", ".join(map(str, job.sizes(fleet.nodes)))
            raise FleetError(
                f"{source}, job '{job.name}' runs on none of {sizes} nodes: {refusals[-1]}"
            )
        seconds = {n: job.tokens / s.tokens_per_s * fleet.saving_share for n, s in speeds.items()}
        found.append(FleetTask(job, speeds, seconds))
        on_job()
    return found


def _attempt(predict: Predict, job: FleetJob, size: int) -> SpeedOnNodes | TwinstreamError:
    try:
        return predict(job, size)
    except TwinstreamError as error:
        return error


def require_reachable(tasks: Iterable[FleetTask], source: str) -> None:
    """Refuse a deadline that is before the end of the job alone, as fast as its error allows.

    Raises:
        FleetError: says when the job ends at its fastest.
    """
    for task in tasks:
        job = task.job
        size = min(task.seconds, key=task.seconds.__getitem__)
        fastest_s = task.seconds[size] / (1 + (task.speeds[size].error or 0.0))
        if job.arrives_s + fastest_s <= job.deadline_s:
            continue
        needed = (job.arrives_s + task.seconds[size]) / HOUR_S
        raise FleetError(
            f"{source}, job '{job.name}': deadline_hours = {job.deadline_hours:g} cannot be "
            f"reached: alone on {size} node{'s' if size > 1 else ''} it ends at {needed:,.4g} h; "
            f"give it {needed * 1.01:,.4g} h, fewer tokens or more nodes"
        )


def worst_error(tasks: Iterable[FleetTask]) -> float | None:
    """The largest error of the speeds; None where one is not known."""
    errors = [speed.error for task in tasks for speed in task.speeds.values()]
    known = [error for error in errors if error is not None]
    return max(known) if len(known) == len(errors) else None


def data_parallel(fleet: FleetFile) -> FleetFile:
    """The same jobs by replicas alone: no tensor, context or pipeline parallelism."""
    alone = {"tp": 1, "cp": 1, "pp": 1}
    jobs = [job.model_copy(update={"layout": {**job.layout, **alone}}) for job in fleet.jobs]
    return fleet.model_copy(update={"jobs": tuple(jobs)})
