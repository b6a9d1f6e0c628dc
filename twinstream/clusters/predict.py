"""How long a training step of a layout takes on a cluster, and which bytes it needs."""

from collections.abc import Mapping
from dataclasses import dataclass

from twinstream.clusters.job import Job
from twinstream.clusters.lowering.lower import lower
from twinstream.hardware_profiles.clusters.loader import machine_of
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.shapes.flops import shape_flops_per_sequence
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
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
    `room_bytes` what the device has.
    """

    step_s: float
    memory: Mapping[str, int]
    room_bytes: int
    model_flops: int
    num_gpus: int
    tokens_per_step: int
    peak_flop_per_s: float

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

    Steps of many microbatches are simulated with fewer, at two numbers of them: all orders of
    pipelines take equally long for every further one (interleaved: for every further pp).

    Args:
        machine: the profile of a node in place of the cluster's own.
    """
    cluster = without_reduction(cluster) if not job.network_reduction else cluster
    machine = machine or machine_of(cluster)
    layout = job.layout
    counts = (2 * layout.pp, 3 * layout.pp) if layout.pp > 1 else (2, 3)
    if job.num_microbatches <= counts[1]:
        step_ns, memory = _simulated(job, cluster, machine)
    else:
        few, more = (_simulated(_with_microbatches(job, n), cluster, machine) for n in counts)
        each = (job.num_microbatches - counts[1]) / (counts[1] - counts[0])
        step_ns = more[0] + (more[0] - few[0]) * each
        memory = {
            kind: round(size + (size - few[1].get(kind, 0)) * each) for kind, size in more[1].items()
        }
    memory["reserve"] = round(machine.number("device_reserve_bytes"))
    return Prediction(
        step_s=step_ns / 1e9,
        memory=memory,
        room_bytes=round(machine.number("device_memory_bytes")),
        model_flops=job.global_batch * shape_flops_per_sequence(job.shape, job.seq_len),
        num_gpus=layout.num_gpus,
        tokens_per_step=job.tokens_per_step,
        peak_flop_per_s=machine.number(_PEAKS[job.precision]),
    )


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


def _simulated(job: Job, cluster: Cluster, machine: Machine) -> tuple[float, dict[str, int]]:
    document = document_of(job, cluster)
    costs = ClusterCosts(document, cluster, machine)
    step_ns = replay_cluster(document, costs, cluster.name, num_passes=2).step_ns
    stages = [memory_of(document.of(one)) for one in document.classes]
    return step_ns, max(stages, key=lambda stage: sum(stage.values()))
