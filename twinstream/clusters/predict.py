"""How long a training step of a layout takes on a cluster, and which bytes it needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from twinstream.clusters.alike import Role
from twinstream.clusters.kernel_sets import with_kernels
from twinstream.clusters.offload import offloaded
from twinstream.clusters.pipeline import Each, in_turn, plan_pipeline
from twinstream.clusters.refusals import require_possible
from twinstream.clusters.timed_step import LaidOutStep, TimedStep, document_of
from twinstream.hardware_profiles.clusters.loader import machine_of
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.providers.flops import model_flops_per_sequence
from twinstream.planner.choices import KINDS, RECOMPUTE_LEVELS, Choices, Home
from twinstream.planner.planner import Planner, gc_paused
from twinstream.planner.request import PlanRequest, TrainingStep, caps_of
from twinstream.schedule.analysis.idle import shares_of
from twinstream.schedule.analysis.occupancy import slot_bytes_by_role
from twinstream.schedule.document import Caps, RankSchedule, Schedule
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.schedule.timeline import Timeline
from twinstream.schedule.workload import MachineRef
from twinstream.simulator.network_costs import share_of
from twinstream.simulator.replay import simulate, steady_state
from twinstream.simulator.states import KnownStates

_PEAKS = {"bfloat16": "peak_bf16_flop_per_s", "float32": "peak_fp32_flop_per_s",
          "fp8": "peak_fp8_flop_per_s", "fp4": "peak_fp4_flop_per_s"}  # fmt: skip
_LEAST_OFFLOADED = 2**28  # bytes of the host: less is tokens and losses
_PLANNED_TASKS = 4000  # of a stage of twinstream's own kernels: shorter steps are planned whole
_PLANNED_MICROBATCHES = 16  # with offload, of steps that have more
_PLANNED_LAYER_PASSES = 1200  # with offload, of a stage: shorter steps are planned whole


@dataclass(frozen=True)
class Prediction:
    """A step of a layout.

    `memory` has the bytes of the fullest stage by class of tensor (`parameter`, `gradient`,
    `optimizer_state`, `activation`, `scratch`, ...), `reserve` what the device keeps back;
    `room_bytes` what the device has. `shares` of the step, mean over ranks: `compute`, and
    what compute waits for, by cause (`schedule.analysis.idle`). With offload, of a
    stage that does not fit, `arena` is all that the planner has on the device, and `host_bytes`
    what the fullest stage has in host memory.
    """

    step_s: float
    memory: Mapping[str, int]
    room_bytes: int
    model_flops: int
    num_gpus: int
    tokens_per_step: int
    peak_flop_per_s: float
    shares: Mapping[str, float]
    host_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        """All of it, on the fullest stage."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the device has room for it."""
        return self.memory_bytes <= self.room_bytes

    @property
    def is_offloaded(self) -> bool:
        """Whether state is copied between the device and the host within a step."""
        return self.host_bytes > _LEAST_OFFLOADED

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the GPUs' bf16 peak (fp8's of an fp8 job) would do in the step."""
        return self.model_flops / (self.step_s * self.num_gpus * self.peak_flop_per_s)

    @property
    def tokens_per_s(self) -> float:
        """Of all GPUs together."""
        return self.tokens_per_step / self.step_s


def predict(
    job: Job, cluster: Cluster, machine: Machine | None = None, caps: Caps | None = None
) -> Prediction:
    """Simulate a step in steady state.

    A layout that runs here is planned as `run` has it; any other is on the device, or offloaded.

    Args:
        machine: the profile of a node in place of the cluster's own.
        caps: of one GPU; None: its share of all that a node has.

    Raises:
        LayoutError: the layout cannot be.
        OffloadError: with offload, it does not even so fit.
        MissingNumberError, MissingNetworkNumberError: a profile lacks a number that is needed.
    """
    machine = machine or machine_of(cluster)
    job = with_kernels(job, machine)
    if not job.is_own:
        return Prepared(job, cluster).on(cluster, machine, caps)
    require_possible(job)
    if job.layout.num_gpus == 1:
        chunk_tokens = job.layout.micro_batch * job.seq_len
        schedule = schedule_alone(job, machine, chunk_tokens, caps)
        return predicted_whole(job, schedule, simulate(schedule, machine), machine, schedule.caps)
    caps = caps or gpu_caps(cluster, machine, job.layout.num_gpus)
    cluster = cluster if job.network_reduction else without_reduction(cluster)
    counts = _counts(job, is_planned=True)
    documents = [planned_ranks(_with_microbatches(job, n), cluster, machine, caps) for n in counts]
    found = _Simulated.of(job, counts, documents, (cluster, machine))
    return found.prediction(machine, caps, *_planned_bytes(documents))


def gpu_caps(cluster: Cluster, machine: Machine, num_gpus: int) -> Caps:
    """What a GPU of so many may take by default: its memory, and its share of its node's."""
    return caps_of(machine, None, None, _on_node(cluster, num_gpus))


def _on_node(cluster: Cluster, num_gpus: int) -> int:
    return min(cluster.count("gpus_per_node"), num_gpus)


class Prepared:
    """A job laid out on nodes of a size, to be timed on one profile after the other.

    Steps of many microbatches are simulated with fewer, at two numbers of them: once all queues
    have found their pace every further one (interleaved: every further pp) takes equally long.
    `documents` are of so many.
    """

    def __init__(self, job: Job, cluster: Cluster) -> None:
        require_possible(job)
        self.job, self._cluster, self._counts = job, cluster, _counts(job)
        on_device, lowered = _with_offload(job, allowed=False), dict[Role, RankSchedule]()
        self.steps = [
            LaidOutStep(_with_microbatches(on_device, n), cluster, lowered) for n in self._counts
        ]

    def on(
        self, cluster: Cluster, machine: Machine | None = None, caps: Caps | None = None,
        known: KnownStates | None = None,
    ) -> Prediction:  # fmt: skip
        """Return its step on a cluster whose nodes have as many GPUs, within a GPU's caps."""
        job, counts = self.job, self._counts
        cluster = cluster if job.network_reduction else without_reduction(cluster)
        machine = machine or machine_of(cluster)
        caps = caps or gpu_caps(cluster, machine, job.layout.num_gpus)
        memory = self.memory() | {"reserve": caps.device_reserve_bytes}
        known = {} if known is None else known
        times = [self.steps[0].timed(cluster, machine, known)]
        if len(counts) > 1:
            more = times[0].with_further(counts[-1] - counts[0])
            times.append(more or self.steps[-1].timed(cluster, machine, known))
        found = _Simulated(job, counts, times)
        if not job.layout.offload or sum(memory.values()) <= _room_bytes(caps, machine):
            return found.prediction(machine, caps, memory)
        jobs = [_with_microbatches(job, n) for n in counts]
        documents = [
            offloaded(document_of(one, self._cluster), one, cluster, machine, caps) for one in jobs
        ]
        least_ns = found.further_ns
        found = _Simulated.of(job, counts, documents, (cluster, machine))
        return found.prediction(machine, caps, *_planned_bytes(documents), least_ns=least_ns)

    def memory(self) -> dict[str, int]:
        """Return bytes by class of tensor on the fullest stage, everything on the device."""
        further = _further(self.job, self._counts)
        few, more = self.steps[0].stage_bytes(), self.steps[-1].stage_bytes()
        stages = [
            {kind: round(size + (size - less.get(kind, 0)) * further) for kind, size in one.items()}
            for less, one in zip(few, more, strict=True)
        ]
        return max(stages, key=lambda stage: sum(stage.values()))


@dataclass(frozen=True)
class _Simulated:
    """A step simulated with as many microbatches as `_counts` has."""

    job: Job
    counts: Sequence[int]
    times: Sequence[TimedStep]

    @classmethod
    def of(
        cls, job: Job, counts: Sequence[int], documents: Sequence[Schedule],
        place: tuple[Cluster, Machine],
    ) -> Self:  # fmt: skip
        """Simulate documents on a cluster whose nodes are of a machine."""
        return cls(job, counts, [TimedStep.simulated(one, *place) for one in documents])

    @property
    def further_ns(self) -> float:
        """What the more microbatches take longer than the few."""
        return self.times[-1].step_ns - self.times[0].step_ns

    def prediction(
        self, machine: Machine, caps: Caps, memory: Mapping[str, int], host_bytes: int = 0, *,
        least_ns: float = 0.0,
    ) -> Prediction:  # fmt: skip
        """Return what the whole step comes to.

        Args:
            memory: by class of tensor.
            least_ns: what the more microbatches take longer at least.
        """
        job, further = self.job, _further(self.job, self.counts)
        step_ns = self.times[-1].step_ns + max(least_ns, self.further_ns) * further
        return Prediction(
            step_s=step_ns / 1e9,
            memory=memory,
            room_bytes=_room_bytes(caps, machine),
            model_flops=job.global_batch
            * model_flops_per_sequence(job.shape, job.seq_len, job.recipe),
            num_gpus=job.layout.num_gpus,
            tokens_per_step=job.tokens_per_step,
            peak_flop_per_s=machine.number(_peak_of(job)),
            shares=shares_of([one.exposed for one in self.times], further),
            host_bytes=host_bytes,
        )


def _planned_bytes(documents: Sequence[Schedule]) -> tuple[dict[str, int], int]:
    """What a planner has on the device, with what lies beside it, and on the host."""
    parts = [part for one in documents for part in one.schedules.values()]
    reserve = max(part.caps.outside_arena_bytes for part in documents[-1].schedules.values())
    memory = {"arena": max(arena_bytes(part, DEVICE) for part in parts), "reserve": reserve}
    return memory, max(arena_bytes(part, HOST) for part in parts)


def _counts(job: Job, *, is_planned: bool = False) -> tuple[int, ...]:
    """Return the numbers of microbatches that are simulated: all, or two of fewer.

    Where stages are planned (`is_planned`, or with offload) short steps are planned
    whole, and so are those of which all microbatches are alive at once (gpipe, ring). Plans with
    offload of few microbatches differ by more than they do from microbatch to microbatch.
    """
    layout = job.layout
    few, more = (2 * layout.pp, 3 * layout.pp) if layout.pp > 1 else (2, 3)
    passes = job.num_microbatches * job.shape.num_layers // layout.pp
    is_short = layout.offload and passes <= _PLANNED_LAYER_PASSES
    if is_planned:
        tasks = 2 * job.num_microbatches * -(-job.shape.num_layers // layout.pp)
        is_short = tasks <= _PLANNED_TASKS
    elif layout.offload:
        more = max(_PLANNED_MICROBATCHES // layout.pp, 4) * layout.pp
        few = more // layout.pp // 2 * layout.pp
    elif layout.pp > 1 and layout.zero >= 2:  # what is reduced for each may fall behind first
        few, more = 5 * layout.pp, 6 * layout.pp
    are_all_alive = layout.pipeline in ("gpipe", "ring") and (is_planned or layout.offload)
    if job.num_microbatches <= more or is_short or are_all_alive:
        return (job.num_microbatches,)
    return few, more


def _further(job: Job, counts: Sequence[int]) -> float:
    """How many times the step from the few to the more microbatches comes on top."""
    few, more = counts[0], counts[-1]
    return (job.num_microbatches - more) / (more - few) if more > few else 0.0


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


def _room_bytes(caps: Caps, machine: Machine) -> int:
    """What a GPU has, where its memory is no hypothesis without end."""
    has = caps.device_bytes
    return round(machine.number("device_memory_bytes")) if has is None else has


def planned_document(job: Job, cluster: Cluster, caps: Caps | None = None) -> Schedule:
    """The whole step as a document, planned within the memories of the cluster's nodes, or caps of
    a GPU; of one GPU the schedule of that alone.

    Raises:
        OffloadError: with offload, it does not even so fit.
    """
    machine = machine_of(cluster)
    job = with_kernels(job, machine)
    require_possible(job)
    if job.is_own and job.layout.num_gpus == 1:
        return schedule_alone(job, machine, job.layout.micro_batch * job.seq_len, caps)
    caps = caps or gpu_caps(cluster, machine, job.layout.num_gpus)
    if job.is_own:
        return planned_ranks(job, cluster, machine, caps)
    document = document_of(_with_offload(job, allowed=False), cluster)
    room = _room_bytes(caps, machine) - caps.device_reserve_bytes
    most = max(sum(slot_bytes_by_role(document.of(one)).values()) for one in document.classes)
    if job.layout.offload and most > room:
        return offloaded(document_of(job, cluster), job, cluster, machine, caps)
    return document


def _with_microbatches(job: Job, count: int) -> Job:
    layout = job.layout
    return job.model_copy(update={"global_batch": count * layout.dp * layout.micro_batch})


def _with_offload(job: Job, *, allowed: bool) -> Job:
    layout = job.layout.model_copy(update={"offload": allowed})
    return job.model_copy(update={"layout": layout})


def _peak_of(job: Job) -> str:
    matmuls = job.recipe.implementations.matmuls
    return _PEAKS[job.dtype if matmuls == "model" else matmuls]


def schedule_alone(
    job: Job, machine: Machine, chunk_tokens: int | None, caps: Caps | None = None
) -> Schedule:
    """The plan of one GPU, the same as of a machine that is asked about by itself.

    Args:
        chunk_tokens: None: the planner chooses.

    Raises:
        InfeasiblePlan: nothing fits.
    """
    step = TrainingStep(job.seq_len, job.tokens_per_step, chunk_tokens, recipe=job.recipe)
    request = PlanRequest.of(job.shape, machine, step=step, choices=_choices(job.layout))
    return Planner(steady_state).plan(replace(request, caps=caps or request.caps))


def _choices(layout: Layout) -> Choices:
    """What a layout fixes of the plans of its stages."""
    homes: dict[str, Home] = {} if layout.offload else dict.fromkeys(KINDS, "device")
    return Choices(homes=homes, recompute=RECOMPUTE_LEVELS.get(layout.recompute))


def predicted_whole(
    job: Job, schedule: Schedule, timeline: Timeline, machine: Machine, caps: Caps
) -> Prediction:
    """Return what a plan of the whole step comes to."""
    found = _Simulated(job, (job.num_microbatches,), [TimedStep.of(schedule, timeline)])
    return found.prediction(machine, caps, *_planned_bytes([schedule]))


def planned_ranks(
    job: Job, cluster: Cluster, machine: Machine, caps: Caps, choices: Choices | None = None,
    each: Each = in_turn,
) -> Schedule:  # fmt: skip
    """Every stage planned by the planner, for one rank's share of a node.

    Args:
        machine: the profile of a node.
        caps: of one rank.
        choices: what is fixed of the plans of all stages; None: what the layout says.
        each: plans stages.

    Raises:
        LayoutError: a stage does not fit, or ranks cannot run it.
    """
    share = share_of(machine, _on_node(cluster, job.layout.num_gpus))
    with gc_paused():
        document = plan_pipeline(job, share, caps, choices or _choices(job.layout), each)
    ref = MachineRef(name=cluster.name, content_hash=cluster.name)
    return document.model_copy(update={"machine": ref})
