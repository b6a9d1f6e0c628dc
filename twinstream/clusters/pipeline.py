"""Pipelines of models that twinstream runs: every stage planned, messages beside its kernels."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol, TypeVar

from pydantic_core import to_json

from twinstream.clusters.assembling import in_one_order
from twinstream.clusters.conforms import require_conforming, workload_of_rounds
from twinstream.clusters.kernel_sets import (
    experts_refusal,
    layout_refusal,
    parts_refusal,
    slices_refusal,
)
from twinstream.clusters.planned_stage import plan_stage, without_messages
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout, LayoutError
from twinstream.models.lowering.lower import lower
from twinstream.models.lowering.parts.groups import mesh_of
from twinstream.models.recipes.recipe import Recipe
from twinstream.planner.choices import OPEN, Choices
from twinstream.planner.evaluate.evaluation import forward_of
from twinstream.planner.planner import gc_paused
from twinstream.schedule.cluster.verify import may_deadlock, require_safe
from twinstream.schedule.document import Caps, RankClass, RankSchedule, Schedule
from twinstream.schedule.sizes import gib
from twinstream.schedule.workload import MachineRef
from twinstream.simulator.replay import steady_state

_MOST_SLOWER = 1.02  # than with sums apart, both without the sums themselves

COMMUNICATION_BYTES = 2**30 + 2**28  # assumed: a handful of communicators, and sums
_Found = TypeVar("_Found")


class Each(Protocol):
    """Does a piece of work for each of several things, and yields what comes of them in order.

    The work is a module's function, which another process can be told. What is not asked for any
    more need not be done.
    """

    def __call__(
        self, work: Callable[..., _Found], asked: Sequence[tuple[Any, ...]]
    ) -> Generator[_Found]: ...


def in_turn(work: Callable[..., _Found], asked: Sequence[tuple[Any, ...]]) -> Generator[_Found]:
    """Each here, when it is asked for."""
    return (work(*one) for one in asked)


def plan_pipeline(
    job: Job,
    machine: Machine,
    caps: Mapping[int, Caps] | Caps | None = None,
    choices: Choices = OPEN,
    each: Each = in_turn,
) -> Schedule:
    """A cluster's schedule that ranks can run: pipelines, and replicas of them.

    Each stage's chain is planned by the ordinary planner within its caps, offload and recompute
    included; communication is then taken out of the compute stream and onto its own.

    Gradients are summed beside the backward pass where the layout says so, unless what that holds
    does not fit, or costs more time than sums are likely to take: the document's layout then says
    that they do not overlap.

    Args:
        machine: of one rank.
        caps: of every rank, or by stage; None: what the machine has.
        choices: what is fixed of the plans of all stages.
        each: plans stages.

    Raises:
        LayoutError: the layout is not one that can be run yet, or a stage does not fit.
    """
    job, layout = _with_kernels(job), job.layout
    _require_executable(job)
    ways = [job]
    if layout.dp * layout.cp > 1 and layout.dp_overlap:
        apart = layout.model_copy(update={"dp_overlap": False})
        ways = [job.laid_out(apart), job]

    def asked(way: Job, *, pooled: bool) -> list[tuple[Any, ...]]:
        of_stage = caps.get if isinstance(caps, Mapping) else lambda stage: caps
        stages = range(layout.pp)
        return [(way, stage, machine, of_stage(stage), choices, pooled) for stage in stages]

    first, *others = ways
    with closing(each(_stage_plan, [a for way in ways for a in asked(way, pooled=True)])) as plans:

        def laid_out(way: Job) -> _LaidOut:
            """With messages in few slots or, where stages might wait for one another's, in many."""
            found = _assembled(way, machine, plans)
            if layout.pp == 1 or not may_deadlock(found.document):
                return found
            with closing(each(_stage_plan, asked(way, pooled=False))) as in_many:
                return _assembled(way, machine, in_many)

        best = laid_out(first)
        for way in others:
            try:
                beside = laid_out(way)
            except LayoutError:
                break
            best = beside if beside.alone_ns <= _MOST_SLOWER * best.alone_ns else best
    return best.document


@dataclass(frozen=True)
class _LaidOut:
    """`alone_ns` is what its slowest stage takes if messages take no time."""

    document: Schedule
    alone_ns: float


@dataclass(frozen=True)
class _StagePlan:
    """A stage's schedule, or why it is none; `alone_ns` is what it takes without messages."""

    schedule: RankSchedule | None
    alone_ns: float = inf
    why_not: str = ""


def _stage_plan(
    job: Job, stage: int, machine: Machine, caps: Caps | None, choices: Choices, pooled: bool
) -> _StagePlan:
    chain = lower(job.shape, job.workload, job.recipe, job.layout, stage)
    within = _beside_communication(caps or Caps(), machine, job.layout)
    merged = without_messages(chain, overlaps=job.layout.dp_overlap, pooled=pooled)
    with gc_paused():
        found = plan_stage(merged, machine, within, choices)
    if found is None:
        why_not = _does_not_fit(_name_of(stage), within, merged.apart_bytes)
        return _StagePlan(None, why_not=why_not)
    return _StagePlan(found.schedule, steady_state(found.planned, machine).step_ns)


def _assembled(job: Job, machine: Machine, plans: Iterator[_StagePlan]) -> _LaidOut:
    """
    Raises:
        LayoutError: a stage does not fit; no plan of later ones is asked for.
    """
    layout, schedules, alone_ns = job.layout, dict[str, RankSchedule](), 0.0
    for stage in range(layout.pp):
        plan = next(plans)
        if plan.schedule is None:
            raise LayoutError(plan.why_not)
        schedules[_name_of(stage)] = plan.schedule
        alone_ns = max(alone_ns, plan.alone_ns)
    document = Schedule(
        mesh=mesh_of(job, layout.num_gpus),
        classes=tuple(
            RankClass(name=name, schedule=name, cells={"pp": (stage,)})
            for stage, name in enumerate(schedules)
        ),
        schedules=schedules,
        order=(),
        model=job.shape.ref().spec,
        layout=layout.model_dump(mode="json"),
        seq_len=job.seq_len,
        global_batch=job.global_batch,
        model_flops=schedules[_name_of(0)].model_flops * layout.dp,
        machine=MachineRef(name=machine.name, content_hash=machine.content_hash),
    )
    return _LaidOut(in_one_order(document), alone_ns)


def _name_of(stage: int) -> str:
    return f"stage {stage}"


def _does_not_fit(name: str, caps: Caps, messages_bytes: int) -> str:
    rooms = [("device", caps.arena_bytes("device")), ("host", caps.host_bytes)]
    room = " and ".join(f"{gib(size)} of {of} memory" for of, size in rooms if size is not None)
    messages = f", of which messages take {gib(messages_bytes)}" if messages_bytes else ""
    return f"{name} does not fit {room}{messages}; a larger --device-mem or --host-mem would do"


def _beside_communication(caps: Caps, machine: Machine, layout: Layout) -> Caps:
    """Of a GPU NCCL's buffers take some, and sums in rank order: that is no part of an arena."""
    if machine.device == "cpu" or layout.num_gpus == 1 or caps.device_bytes is None:
        return caps
    reserve = caps.device_reserve_bytes + COMMUNICATION_BYTES
    return caps.model_copy(update={"device_reserve_bytes": reserve})


def _require_executable(job: Job) -> None:
    asked = job.shape, job.recipe, job.layout
    why = layout_refusal(job.layout) or parts_refusal(*asked) or experts_refusal(*asked)
    why = why or slices_refusal(job)
    if why is not None:
        raise LayoutError(f"ranks cannot run {why} yet")


def _with_kernels(job: Job) -> Job:
    """Parts of a block, and shared experts, are ours where kernels are named: those that the recipe
    has anyway."""
    if not job.layout.in_parts and job.layout.ep == 1:
        return job
    named = job.recipe.model_copy(update={"kernels": job.recipe.implementations})
    return job.model_copy(update={"recipe": named})


def layout_in(document: Schedule) -> Layout:
    """What a document says of its layout.

    Raises:
        ValidationError: it is none.
    """
    return Layout.model_validate_json(to_json(document.layout))  # strict: tuples from text alone


def cluster_evaluation_of(training: Schedule) -> Schedule:
    """The forward of every replica's first microbatch, as a schedule of its own; proven.

    As `evaluation_of` has it of one device: every rank has the slots of its training, finds the
    state where a pass of that leaves it, and leaves it there. The last stage hands out the loss, of
    which each replica has its share.

    Raises:
        NoEvaluation: a stage has no forward of the state that it carries.
        UnsafeSchedule: the training schedule is not safe or not conforming itself.
    """
    layout = layout_in(training)
    schedules = {one.schedule: _forward_of_class(training, one) for one in training.classes}
    flops = schedules[training.classes[0].schedule].model_flops * layout.dp
    found = in_one_order(
        training.model_copy(
            update={
                "schedules": schedules,
                "order": (),
                "global_batch": layout.micro_batch * layout.dp,
                "model_flops": flops,
            }
        )
    )
    require_safe(found)
    require_conforming(found)
    return found


def _forward_of_class(training: Schedule, one: RankClass) -> RankSchedule:
    part, layout = training.of(one), layout_in(training)
    workload = workload_of_rounds(part, layout)
    assert workload is not None, "a class of ranks that train has whole rounds"
    spec, recipe = ModelSpec.model_validate(training.model), Recipe.model_validate(part.recipe)
    (stage,) = one.cell("pp", layout.pp)
    chain = lower(spec, workload.forward, recipe, layout, stage)
    return forward_of(part, chain)
