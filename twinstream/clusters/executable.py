"""Pipelines of models that twinstream runs: every stage planned, messages beside its kernels."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pydantic_core import to_json

from twinstream.clusters.held import with_held
from twinstream.clusters.layout import Layout, LayoutError
from twinstream.clusters.lowering.lower import in_one_order
from twinstream.clusters.orders import actions_of
from twinstream.clusters.stages import stages_of
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.lowering.communication_tasks import COMMUNICATE
from twinstream.models.lowering.sharding import Sharding
from twinstream.models.lowering.stage import lower_stage
from twinstream.models.lowering.stage_cut import StageCut
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.planner.search.one_chain import OneChain, plan_of_chain
from twinstream.schedule.chain import Chain, Task
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule, RankClass
from twinstream.schedule.cluster.mesh import Axis, Mesh
from twinstream.schedule.derived.waits import derive_waits
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.ops import Communicate, Compute, Op, Operand, Stream
from twinstream.schedule.tensors import DEVICE, Slot
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
    if layout.dp == 1 or not layout.dp_overlap:
        return _laid_out(stages, machine, caps)
    try:
        return _laid_out(stages, machine, caps)
    except LayoutError:
        apart = layout.model_copy(update={"dp_overlap": False})
        return _laid_out(replace(stages, layout=apart), machine, caps)


def _laid_out(
    stages: Stages, machine: Machine, caps: Mapping[int, Caps] | Caps | None
) -> ClusterSchedule:
    layout = stages.layout
    axes = [Axis(name="pp", size=layout.pp)]
    axes += [Axis(name="dp", size=layout.dp)] if layout.dp > 1 else []
    schedules, classes = {}, []
    for stage in range(layout.pp):
        name = f"stage {stage}"
        own = caps.get(stage) if isinstance(caps, Mapping) else caps
        chain = chain_of_stage(stages, stage)
        seen = with_held(chain) if layout.dp_overlap else chain
        schedules[name] = _planned(name, chain, seen, machine, own or Caps())
        classes.append(RankClass(name=name, schedule=name, cells={"pp": (stage,)}))
    document = ClusterSchedule(
        mesh=Mesh(axes=tuple(axes), ranks_per_node=layout.pp * layout.dp),
        classes=tuple(classes),
        schedules=schedules,
        order=(),
        model=stages.spec.model_dump(mode="json", exclude_none=True),
        layout=layout.model_dump(mode="json") | {"micro_batch": _micro_batch(stages.workload)},
        seq_len=stages.workload.seq_len,
        global_batch=stages.workload.sequences_per_step * layout.dp,
        model_flops=schedules["stage 0"].model_flops * layout.dp,
        machine=MachineRef(name=machine.name, content_hash=machine.content_hash),
    )
    return in_one_order(document)


def _micro_batch(workload: Workload) -> int:
    """Sequences of a round."""
    return workload.sequences_per_step // workload.rounds_per_step


def _require_executable(layout: Layout) -> None:
    wrong = []
    if layout.tp * layout.cp * layout.ep > 1:
        wrong.append(f"tp {layout.tp}, cp {layout.cp}, ep {layout.ep}: all of them need to be 1")
    if layout.zero and layout.shards != layout.dp:
        wrong.append(f"ZeRO over {layout.shards} of {layout.dp} replicas: it needs to be over all")
    if layout.pipeline == "zero_bubble":
        wrong.append("zero-bubble: kernels make both gradients at once")
    if wrong:
        raise LayoutError(f"ranks cannot run {'; nor '.join(wrong)} yet")


def layout_in(document: ClusterSchedule) -> Layout:
    """What a document says of its layout.

    Raises:
        ValidationError: it is none.
    """
    return Layout.model_validate_json(to_json(document.layout))  # strict: tuples from text alone


def sharding_of(layout: Layout) -> Sharding | None:
    """What each replica keeps of a stage; None where that is all."""
    if not layout.zero or layout.dp == 1:
        return None
    return Sharding(layout.zero, ("dp",), layout.dp)


def chain_of_stage(stages: Stages, stage: int) -> Chain:
    """What a stage computes in a step, or in an evaluation, and what it says in between."""
    layout = stages.layout
    spans = stages_of(layout, stages.spec.num_layers)
    chunks = range(layout.virtual_stages)
    cut = StageCut(
        spans=tuple(spans[c * layout.pp + stage] for c in chunks),
        places=tuple(c * layout.pp + stage for c in chunks),
        num_places=len(spans),
        actions=_actions(stages, stage),
        replicas=("dp",) if layout.dp > 1 else (),
        sharding=sharding_of(layout),
        overlaps=layout.dp_overlap,
    )
    return lower_stage(stages.spec, stages.workload, stages.recipe, cut)


def _actions(stages: Stages, stage: int) -> tuple[tuple[str, int, int], ...]:
    """What a stage runs, in order."""
    layout, workload = stages.layout, stages.workload
    if not workload.forward_only:
        actions = actions_of(layout, stage, workload.rounds_per_step)
        return tuple((one.phase, one.chunk, one.microbatch) for one in actions)
    chunks = range(layout.virtual_stages)
    ends = [("evaluate", chunks[-1], 0)] if stage == layout.pp - 1 else []
    return (*(("forward", chunk, 0) for chunk in chunks), *ends)


def _planned(name: str, chain: Chain, seen: Chain, machine: Machine, caps: Caps) -> Schedule:
    """The stage's chain without its messages planned, and these put between its tasks.

    What is sent or received has a slot of its own for the whole step, so that no message waits
    for room that another stage has to make: stages could wait so for one another.
    """
    fixed = _exchanged(chain)
    fixed_bytes = sum(slot.size_bytes + slot.tier.alignment_bytes for slot in fixed.values())
    device = None if caps.device_bytes is None else max(0, caps.device_bytes - fixed_bytes)
    lean = _without(seen, fixed)
    within = caps.model_copy(update={"device_bytes": device})
    emitted = plan_of_chain(OneChain(lean, machine, within), steady_state, _MOST_ATTEMPTS)
    if emitted is None:
        raise LayoutError(
            f"{name} does not fit {caps.device_bytes} bytes of device memory, of which messages "
            f"take {fixed_bytes}; a larger cap would do"
        )
    return _with_messages(chain, emitted.schedule, fixed).model_copy(update={"caps": caps})


def _exchanged(chain: Chain) -> dict[str, Slot]:
    """Slots of what is sent or received, by tensor, with all of which it is a part."""
    roots = {tensor.tensor_id: tensor.parent or tensor.tensor_id for tensor in chain.tensors}
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in chain.tensors}
    names = dict.fromkeys(
        roots[operand.tensor]
        for task in chain.tasks
        if _is_message(chain, task)
        for operand in task.operands
    )
    return {
        name: Slot(slot_id=f"message.{name}", tier=DEVICE, offset_bytes=0, size_bytes=sizes[name])
        for name in names
    }


def _is_message(chain: Chain, task: Task) -> bool:
    call = chain.calls[task.call]
    return call.kernel == COMMUNICATE and call.attributes["collective"] in ("send", "recv")


def _without(chain: Chain, fixed: Mapping[str, Slot]) -> Chain:
    """What the planner sees: no messages, and nothing of what they are about."""
    roots = {tensor.tensor_id: tensor.parent or tensor.tensor_id for tensor in chain.tensors}

    def lean(task: Task) -> Task:
        operands = tuple(o for o in task.operands if roots[o.tensor] not in fixed)
        return task.model_copy(update={"operands": operands})

    return chain.model_copy(
        update={
            "tensors": tuple(t for t in chain.tensors if roots[t.tensor_id] not in fixed),
            "tasks": tuple(lean(task) for task in chain.tasks if not _is_message(chain, task)),
            "recomputes": tuple(
                again.model_copy(update={"task": lean(again.task)}) for again in chain.recomputes
            ),
        }
    )


def _with_messages(chain: Chain, plan: Schedule, fixed: Mapping[str, Slot]) -> Schedule:
    """The plan's ops with all operands, messages where the chain has them, waits derived anew."""
    end = max((s.offset_bytes + s.size_bytes for s in plan.slots if s.tier == DEVICE), default=0)
    placed = {}
    for name, slot in fixed.items():
        start = -(-end // DEVICE.alignment_bytes) * DEVICE.alignment_bytes
        placed[name] = slot.model_copy(update={"offset_bytes": start})
        end = start + slot.size_bytes
    slots = (*plan.slots, *placed.values())
    ops = _Written(chain, plan, placed).ops()
    calls = {name: call for name, call in plan.calls.items() if call.kernel != COMMUNICATE}
    return plan.model_copy(
        update={
            "ops": derive_waits(ops, chain.tensors, slots),
            "slots": slots,
            "tensors": chain.tensors,
            "calls": calls,
        }
    )


class _Written:
    """Ops of a plan written out again, with the chain's messages between them."""

    def __init__(self, chain: Chain, plan: Schedule, fixed: Mapping[str, Slot]) -> None:
        self._chain, self._plan, self._fixed = chain, plan, fixed
        self._roots = {t.tensor_id: t.parent or t.tensor_id for t in chain.tensors}
        self._tasks = {task.task_id: task for task in chain.tasks}
        self._tasks |= {again.task.task_id: again.task for again in chain.recomputes}
        self._counts: dict[tuple[object, ...], int] = {}

    def ops(self) -> tuple[Op, ...]:
        """A message comes before the op of the task that follows it in the chain."""
        found: list[Op] = []
        waiting = list(self._chain.tasks)[::-1]
        numbers = {task.task_id for task in self._chain.tasks}
        for op in self._plan.ops:
            if isinstance(op, Compute) and op.task in numbers:
                while waiting[-1].task_id != op.task:
                    found.append(self._message(waiting.pop()))
                waiting.pop()
            found.append(self._written(op))
        return (*found, *(self._message(task) for task in reversed(waiting)))

    def _written(self, op: Op) -> Op:
        if not isinstance(op, Compute):
            return op
        given = {operand.tensor: operand.slot for operand in op.operands}
        operands = self._operands(self._tasks[op.task], given)
        if self._plan.calls[op.call].kernel == COMMUNICATE:
            return self._communicate(self._tasks[op.task], operands)
        return op.model_copy(update={"operands": operands})

    def _message(self, task: Task) -> Op:
        return self._communicate(task, self._operands(task, {}))

    def _operands(self, task: Task, given: Mapping[str, str]) -> tuple[Operand, ...]:
        return tuple(
            Operand(**vars(one), slot=given.get(one.tensor) or self._slot(one.tensor))
            for one in task.operands
        )

    def _slot(self, tensor: str) -> str:
        return self._fixed[self._roots[tensor]].slot_id

    def _communicate(self, task: Task, operands: tuple[Operand, ...]) -> Communicate:
        told = self._chain.calls[task.call].attributes
        axes, shift = tuple(str(told["axes"]).split()), int(str(told.get("shift", 0)))
        key = (axes, shift, told["collective"]) if shift else (axes, told["queue"])
        self._counts[key] = self._counts.get(key, -1) + 1
        return Communicate.model_validate(
            {
                "op_id": task.task_id,
                "stream": Stream(queue=str(told["queue"])),
                "collective": told["collective"],
                "axes": axes,
                "shift": shift,
                "sequence": self._counts[key],
                "operands": operands,
                "reduction": told.get("reduction", "library"),
                "label": task.label,
            }
        )
