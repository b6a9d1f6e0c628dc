"""A step laid out on nodes, with a number of microbatches: its bytes, and its time on a profile."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

from twinstream.clusters.alike import AlikePipeline, Role, SteadyPace, is_alike
from twinstream.clusters.assembling import assembled
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.layouts.job import Job
from twinstream.schedule.analysis.idle import ExposedTime, exposed_times
from twinstream.schedule.analysis.occupancy import slot_bytes_by_role
from twinstream.schedule.document import RankSchedule, Schedule
from twinstream.schedule.timeline import Timeline
from twinstream.schedule.workload import MachineRef
from twinstream.simulator.blocks import IrregularError
from twinstream.simulator.network_costs import ClusterCosts
from twinstream.simulator.replay import replay_cluster
from twinstream.simulator.states import KnownStates


@dataclass(frozen=True)
class TimedStep:
    """How long a step takes, where its time goes in every class of ranks, and its pace."""

    step_ns: float
    exposed: tuple[ExposedTime, ...]
    pace: SteadyPace | None = None

    @classmethod
    def of(cls, document: Schedule, timeline: Timeline) -> Self:
        """Of a whole timeline."""
        return cls(timeline.step_ns, exposed_times(document, timeline))

    @classmethod
    def simulated(cls, document: Schedule, cluster: Cluster, machine: Machine) -> Self:
        """Simulate all ops of two steps."""
        costs = ClusterCosts(document, cluster, machine)
        return cls.of(document, replay_cluster(document, costs, cluster.name, num_passes=2))

    def with_further(self, microbatches: int) -> Self | None:
        """The same step with so many more; None where its pace does not say."""
        if self.pace is None or microbatches % self.pace.microbatches:
            return None
        times = microbatches // self.pace.microbatches
        return type(self)(
            self.step_ns + times * self.pace.period_ns,
            tuple(
                one.with_further(more, times)
                for one, more in zip(self.exposed, self.pace.exposed, strict=True)
            ),
            self.pace,
        )


def document_of(job: Job, cluster: Cluster) -> Schedule:
    """The whole step as a document."""
    machine = MachineRef(name=cluster.name, content_hash=cluster.name)
    return assembled(job, cluster.count("gpus_per_node"), machine)


class LaidOutStep:
    """A job's step on nodes of a size, everything on the device.

    Where stages are alike it is simulated by what repeats, else op by op: to the same nanosecond.

    Args:
        lowered: roles of stages that are known from another number of microbatches.
    """

    def __init__(self, job: Job, cluster: Cluster, lowered: dict[Role, RankSchedule]) -> None:
        self._job, self._cluster = job, cluster
        self._alike: AlikePipeline | None = None
        if is_alike(job):
            self._alike = AlikePipeline(job, cluster.count("gpus_per_node"), lowered)

    @cached_property
    def document(self) -> Schedule:
        """All its ops."""
        return document_of(self._job, self._cluster)

    def stage_bytes(self) -> list[dict[str, int]]:
        """Return bytes by class of tensor, of every stage."""
        if self._alike is not None:
            return self._alike.stage_bytes()
        return [slot_bytes_by_role(self.document.of(one)) for one in self.document.classes]

    def timed(self, cluster: Cluster, machine: Machine, known: KnownStates) -> TimedStep:
        """Simulate it on a cluster whose nodes have as many GPUs."""
        if self._alike is not None:
            try:
                step_ns, exposed, pace = self._alike.timed(cluster, machine, known)
                return TimedStep(float(step_ns), exposed, pace)
            except IrregularError:
                pass
        return TimedStep.simulated(self.document, cluster, machine)
