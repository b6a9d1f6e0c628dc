"""Pipelines of models that twinstream runs: every stage planned, messages beside its kernels."""

from collections.abc import Mapping
from dataclasses import dataclass

from twinstream.clusters.layout import Layout, LayoutError
from twinstream.clusters.lowering.lower import in_one_order
from twinstream.clusters.orders import actions_of
from twinstream.clusters.stages import stages_of
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.lowering.stage import COMMUNICATE, StageCut, lower_stage
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.planner.search.one_chain import OneChain, plan_of_chain
from twinstream.schedule.chain import Chain
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule, RankClass
from twinstream.schedule.cluster.mesh import Axis, Mesh
from twinstream.schedule.derived.waits import derive_waits
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.ops import Communicate, Compute, Op, Stream
from twinstream.schedule.workload import MachineRef, Workload
from twinstream.simulator.replay import steady_state

_MOST_ATTEMPTS = 4


@dataclass(frozen=True)
class Stages:
    """What is laid out: a model that runs, each replica's step, and how it is trained."""

    spec: ModelSpec
    workload: Workload
    recipe: Recipe
    layout: Layout


def executable(
    stages: Stages, machine: Machine, caps: Mapping[int, Caps] | Caps | None = None
) -> ClusterSchedule:
    """A cluster's schedule that ranks can run: pipelines, and replicas of them.

    Each stage's chain is planned by the ordinary planner within its caps, offload and recompute
    included; communication is then taken out of the compute stream and onto its own.

    Args:
        machine: of one rank.
        caps: of every rank, or by stage; None: what the machine has.

    Raises:
        LayoutError: the layout is not one that can be run yet, or a stage does not fit.
    """
    layout = stages.layout
    _require_executable(layout)
    axes = [Axis(name="pp", size=layout.pp)]
    axes += [Axis(name="dp", size=layout.dp)] if layout.dp > 1 else []
    schedules, classes = {}, []
    for stage in range(layout.pp):
        name = f"stage {stage}"
        own = caps.get(stage) if isinstance(caps, Mapping) else caps
        schedules[name] = _planned(name, _chain(stages, stage), machine, own or Caps())
        classes.append(RankClass(name=name, schedule=name, cells={"pp": (stage,)}))
    document = ClusterSchedule(
        mesh=Mesh(axes=tuple(axes), ranks_per_node=layout.pp * layout.dp),
        classes=tuple(classes),
        schedules=schedules,
        order=(),
        model=stages.spec.model_dump(mode="json", exclude_none=True),
        layout=layout.model_dump(mode="json"),
        seq_len=stages.workload.seq_len,
        global_batch=stages.workload.sequences_per_step * layout.dp,
        model_flops=schedules["stage 0"].model_flops * layout.dp,
        machine=MachineRef(name=machine.name, content_hash=machine.content_hash),
    )
    return in_one_order(document)


def _require_executable(layout: Layout) -> None:
    wrong = []
    if layout.tp * layout.cp * layout.ep > 1:
        wrong.append(f"tp {layout.tp}, cp {layout.cp}, ep {layout.ep}: all of them need to be 1")
    if layout.zero and layout.dp > 1:
        wrong.append(f"ZeRO {layout.zero}: replicas need to be whole (zero 0)")
    if layout.pipeline == "zero_bubble":
        wrong.append("zero-bubble: kernels make both gradients at once")
    if wrong:
        raise LayoutError(f"ranks cannot run {'; nor '.join(wrong)} yet")


def _chain(stages: Stages, stage: int) -> Chain:
    layout = stages.layout
    spans = stages_of(layout, stages.spec.num_layers)
    chunks = range(layout.virtual_stages)
    actions = actions_of(layout, stage, stages.workload.rounds_per_step)
    cut = StageCut(
        spans=tuple(spans[c * layout.pp + stage] for c in chunks),
        places=tuple(c * layout.pp + stage for c in chunks),
        num_places=len(spans),
        actions=tuple((one.phase, one.chunk, one.microbatch) for one in actions),
        replicas=("dp",) if layout.dp > 1 else (),
    )
    return lower_stage(stages.spec, stages.workload, stages.recipe, cut)


def _planned(name: str, chain: Chain, machine: Machine, caps: Caps) -> Schedule:
    emitted = plan_of_chain(OneChain(chain, machine, caps), steady_state, _MOST_ATTEMPTS)
    if emitted is None:
        raise LayoutError(f"{name} does not fit {caps.device_bytes} bytes of device memory")
    return with_communication(emitted.schedule)


def with_communication(schedule: Schedule) -> Schedule:
    """The schedule with its communication on streams of its own; waits are derived anew."""
    counts: dict[tuple[object, ...], int] = {}
    found = [_as_communicate(op, schedule, counts) for op in schedule.ops]
    ops = tuple(op for op in found if op is not None)
    calls = {name: call for name, call in schedule.calls.items() if call.kernel != COMMUNICATE}
    waiting = derive_waits(ops, schedule.tensors, schedule.slots)
    return schedule.model_copy(update={"ops": waiting, "calls": calls})


def _as_communicate(op: Op, schedule: Schedule, counts: dict[tuple[object, ...], int]) -> Op | None:
    if not isinstance(op, Compute) or schedule.calls[op.call].kernel != COMMUNICATE:
        return op
    told = schedule.calls[op.call].attributes
    if told["collective"] == "none":
        return None
    axes = tuple(str(told["axes"]).split())
    shift = int(told.get("shift", 0))  # type: ignore[arg-type]
    key = (axes, shift, told["collective"]) if shift else (axes, told["queue"])
    counts[key] = counts.get(key, -1) + 1
    return Communicate(
        op_id=op.op_id,
        stream=Stream(queue=str(told["queue"])),
        collective=told["collective"],  # type: ignore[arg-type]
        axes=axes,
        shift=shift,
        sequence=counts[key],
        operands=op.operands,
        reduction=told.get("reduction", "library"),  # type: ignore[arg-type]
        label=op.label,
    )
