"""How long a training step of a layout takes on a cluster, and which bytes it needs."""

from collections.abc import Mapping
from dataclasses import dataclass

from twinstream.clusters.job import Job
from twinstream.clusters.lowering.lower import lower
from twinstream.clusters.refusals import require_possible
from twinstream.clusters.shares import shares_of
from twinstream.hardware_profiles.clusters.loader import machine_of
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.shapes.flops import shape_flops_per_sequence
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.schedule.document import Schedule
from twinstream.schedule.workload import MachineRef
from twinstream.simulator.cluster.costs import ClusterCosts
from twinstream.simulator.cluster.simulate import replay_cluster

_PEAKS = {"bf16": "peak_bf16_flop_per_s", "fp16": "peak_bf16_flop_per_s",
          "fp8": "peak_fp8_flop_per_s", "fp4": "peak_fp4_flop_per_s"}  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """A step of a layout.

    `memory` has the bytes of the fullest stage by class of tensor (`parameter`, `gradient`,
    `optimizer_state`, `activation`, `scratch`, ...), `reserve` what the device keeps back;
    `room_bytes` what the device has. `shares` of the step, mean over ranks: `compute`, `talk`
    (collectives that compute waits for), `bubble` (all else that it waits for).
    """

    step_s: float
    memory: Mapping[str, int]
    room_bytes: int
    model_flops: int
    num_gpus: int
    tokens_per_step: int
    peak_flop_per_s: float
    shares: Mapping[str, float]

    @property
    def memory_bytes(self) -> int:
        """All of it, on the fullest stage."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.room_bytes

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the GPUs' bf16 peak (fp8's of an fp8 job) would do in the step."""
        return self.model_flops / (self.step_s * self.num_gpus * self.peak_flop_per_s)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.step_s


def predict(job: Job, cluster: Cluster, machine: Machine | None = None) -> Prediction:
    """Simulate a step in steady state.

    Args:
        machine: the profile of a node in place of the cluster's own.

    Raises:
        LayoutError: the layout cannot be.
        MissingNumberError, MissingNetworkNumberError: a profile lacks a number that is needed.
    """
    return Prepared(job, cluster).on(cluster, machine)


class Prepared:
    """A job laid out on nodes of a size, to be timed on one profile after the other.

    Steps of many microbatches are simulated with fewer, at two numbers of them: in all orders of
    pipelines every further one (interleaved: every further pp) takes equally long. `documents` are
    of so many.
    """

    def __init__(self, job: Job, cluster: Cluster) -> None:
        require_possible(job)
        self.job = job
        counts: tuple[int, ...] = (2, 3)
        if job.layout.pp > 1:
            counts = (2 * job.layout.pp, 3 * job.layout.pp)
        if job.num_microbatches <= counts[-1]:
            counts = (job.num_microbatches,)
        self._counts = counts
        self.documents = [document_of(_with_microbatches(job, n), cluster) for n in counts]

    def on(self, cluster: Cluster, machine: Machine | None = None) -> Prediction:
        """Its step on a cluster whose nodes have as many GPUs."""
        job = self.job
        cluster = cluster if job.network_reduction else without_reduction(cluster)
        machine = machine or machine_of(cluster)
        memory = self._memory()
        memory["reserve"] = round(machine.number("device_reserve_bytes"))
        step_ns, timeline = self._timed(cluster, machine)
        return Prediction(
            step_s=step_ns / 1e9,
            memory=memory,
            room_bytes=round(machine.number("device_memory_bytes")),
            model_flops=job.global_batch * shape_flops_per_sequence(job.shape, job.seq_len),
            num_gpus=job.layout.num_gpus,
            tokens_per_step=job.tokens_per_step,
            peak_flop_per_s=machine.number(_PEAKS[job.precision]),
            shares=self._shares(timeline),
        )

    @property
    def _further(self) -> float:
        """How many times the step from the few to the more microbatches comes on top."""
        few, more = self._counts[0], self._counts[-1]
        return (self.job.num_microbatches - more) / (more - few) if more > few else 0.0

    def _timed(self, cluster: Cluster, machine: Machine) -> tuple[float, ClusterTimeline]:
        """The step, and the timeline of as many microbatches as were simulated."""
        found = [
            replay_cluster(
                document, ClusterCosts(document, cluster, machine), cluster.name, num_passes=2
            )
            for document in self.documents
        ]
        few, more = found[0], found[-1]
        return more.step_ns + (more.step_ns - few.step_ns) * self._further, more

    def _shares(self, timeline: ClusterTimeline) -> dict[str, float]:
        return shares_of(self.documents[-1], timeline)

    def _memory(self) -> dict[str, int]:
        """Of the fullest stage."""
        few, more = (
            [memory_of(document.of(one)) for one in document.classes]
            for document in (self.documents[0], self.documents[-1])
        )
        stages = [
            {
                kind: round(size + (size - less.get(kind, 0)) * self._further)
                for kind, size in one.items()
            }
            for less, one in zip(few, more, strict=True)
        ]
        return max(stages, key=lambda stage: sum(stage.values()))


def without_reduction(cluster: Cluster) -> Cluster:
    """The cluster with switches that do not reduce; all-reduce curves were measured with them."""
    return cluster.model_copy(
        update={
            "node_in_switch_efficiency": None,
            "network_in_switch_efficiency": None,
            "curves": tuple(
                one
                for one in cluster.curves
                if cluster.node_in_switch_efficiency is None or one.collective != "all_reduce"
            ),
        }
    )


def document_of(job: Job, cluster: Cluster) -> ClusterSchedule:
    """The whole step as a document."""
    machine = MachineRef(name=cluster.name, content_hash=cluster.name)
    return lower(job, cluster.count("gpus_per_node"), machine)


def memory_of(schedule: Schedule) -> dict[str, int]:
    """Bytes of a stage's slots by class of tensor."""
    roles = {tensor.tensor_id: tensor.role for tensor in schedule.tensors}
    held: dict[str, str] = {}
    for op in schedule.ops:
        if op.kind in ("compute", "communicate"):
            for operand in op.operands:
                held.setdefault(operand.slot, roles[operand.tensor])
    found: dict[str, int] = {}
    for slot in schedule.slots:
        role = held.get(slot.slot_id, "activation")
        found[role] = found.get(role, 0) + slot.size_bytes
    return found


def _with_microbatches(job: Job, count: int) -> Job:
    layout = job.layout
    return job.model_copy(update={"global_batch": count * layout.dp * layout.micro_batch})
