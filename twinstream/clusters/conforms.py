"""Prove that the stages of a cluster's schedule together train the whole model, and nothing else.

`verify` and `verify_cluster` prove that every op finds what it names. Here it is proven that the
ops are those of the layout: every class has the tasks and the communication of its stage, as they
come out when the document's own model, layout and batch are lowered again; and, without a look at
that, that over all stages every layer runs every microbatch forward and backward once and every
group of parameters is updated once.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator

from pydantic import ValidationError

from twinstream.clusters.job import Job
from twinstream.clusters.layout import Layout
from twinstream.clusters.lowering.lower import lower
from twinstream.clusters.pipeline import Stages, chain_of_stage, layout_in
from twinstream.clusters.refusals import refusals_of
from twinstream.models.recipe import Recipe, megatron_recipe
from twinstream.models.spec import ModelSpec
from twinstream.schedule.chain import COMMUNICATE, Chain, Task
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule, RankClass
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError, require
from twinstream.schedule.ops import Communicate, Compute, TaskOperand
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.violations import (
    CallDiffers,
    OperandsDiffer,
    TaskMissing,
    TaskUnexpected,
    UnsafeSchedule,
    Violation,
    WorkDiffers,
)
from twinstream.schedule.workload import Workload

_MOST_TOLD = 20


def conforms_cluster(schedule: ClusterSchedule) -> list[Violation]:
    """All differences found, at most 20 of each class; an empty list is a proof."""
    require("schedule", schedule, ClusterSchedule)
    if is_executable(schedule):
        return conforms_ranks(schedule)
    try:
        job = _job_of(schedule)
    except ValidationError as error:
        return [
            CallDiffers(f"the document's model and layout are none: {error.errors()[0]['msg']}")
        ]
    if why := refusals_of(job, schedule.mesh.size):
        return [CallDiffers(f"the document's layout cannot be: {why[0]}")]
    again = lower(job, schedule.mesh.ranks_per_node, schedule.machine)
    if again.mesh.axes != schedule.mesh.axes:
        return [CallDiffers("the mesh is not that of the document's layout")]
    found: list[Violation] = []
    for one in schedule.classes:
        stages = one.cell("pp", schedule.mesh.length("pp"))
        if len(stages) > 1:
            found.append(TaskUnexpected(f"class '{one.name}' is of {len(stages)} stages at once"))
            continue
        expected = again.schedules[again.classes[stages[0]].schedule]
        found += list(_differences(one, schedule.of(one), expected))[:_MOST_TOLD]
    return [*found, *list(_uncovered(schedule, job))[:_MOST_TOLD]]


def require_conforming_cluster(schedule: ClusterSchedule) -> None:
    """Raise UnsafeSchedule unless `conforms_cluster` finds nothing."""
    if found := conforms_cluster(schedule):
        raise UnsafeSchedule(found)


def _job_of(schedule: ClusterSchedule) -> Job:
    """The job that the document says it was lowered from; earlier ones do not tell the recipe."""
    recipe = dict(schedule.of(schedule.classes[0]).recipe)
    if not recipe:
        in_model_dtype = schedule.layout.get("gradient_dtype") == "bfloat16"
        recipe = megatron_recipe(
            schedule.attention, schedule.precision, "model" if in_model_dtype else "float32"
        ).model_dump(mode="json")
    fields = {"shape": schedule.model, "layout": schedule.layout, "recipe": recipe}
    counts = {"seq_len": schedule.seq_len, "global_batch": schedule.global_batch}
    return Job.model_validate_json(json.dumps(fields | counts))  # strict: tuples from text alone


def _differences(one: RankClass, given: Schedule, expected: Schedule) -> Iterator[Violation]:
    """Tasks and communication of a class against those of its stage, whatever their order."""
    have, want = _by_id(given), _by_id(expected)
    for op_id in want.keys() - have.keys():
        yield TaskMissing(f"class '{one.name}' lacks '{op_id}'", (op_id,))
    for op_id in have.keys() - want.keys():
        yield TaskUnexpected(f"class '{one.name}' has '{op_id}', which its stage has not", (op_id,))
    for op_id in want.keys() & have.keys():
        op, wanted = have[op_id], want[op_id]
        if _said(op) != _said(wanted):
            yield CallDiffers(f"class '{one.name}': '{op_id}' is not what its stage does", (op_id,))
        elif _content(op) != _content(wanted):
            yield OperandsDiffer(
                f"class '{one.name}': '{op_id}' works on other tensors or versions", (op_id,)
            )
        elif isinstance(op, Compute) and given.calls[op.call] != expected.calls[op.call]:
            yield CallDiffers(f"class '{one.name}': call '{op.call}' is another", (op_id,))


def _by_id(schedule: Schedule) -> dict[str, Compute | Communicate]:
    return {op.op_id: op for op in schedule.ops if isinstance(op, Compute | Communicate)}


def _said(op: Compute | Communicate) -> tuple[object, ...]:
    """What an op does, apart from operands."""
    if isinstance(op, Compute):
        return ("compute", op.call, op.label)
    return (op.collective, op.axes, op.shift, op.sequence, op.reduction, op.stream.queue)


def _content(op: Compute | Communicate) -> list[tuple[object, ...]]:
    return [(o.name, o.tensor, o.version, o.mode, o.num_parts) for o in op.operands]


def _uncovered(schedule: ClusterSchedule, job: Job) -> Iterator[Violation]:
    """Layers times microbatches, forward and backward, over one class of each stage."""
    stages = {
        one.cell("pp", schedule.mesh.length("pp")): schedule.of(one) for one in schedule.classes
    }
    passes = {"forward": Counter[tuple[int, int]](), "backward": Counter[tuple[int, int]]()}
    updates = Counter[str]()
    for part in stages.values():
        for op in part.ops:
            if isinstance(op, Compute):
                _count(op, passes, updates)
    every = {
        (layer, j) for layer in range(job.shape.num_layers) for j in range(job.num_microbatches)
    }
    for phase, counted in passes.items():
        yield from _not_once(phase, counted, every)
    groups = [str(layer) for layer in range(job.shape.num_layers)]
    if job.shape.experts is not None:
        groups += [f"{name}.experts" for name in groups]
    for name in [*groups, "embedding", "head"]:
        if updates[name] != 1:
            yield TaskMissing(f"parameters of {name} are updated {updates[name]} times, not once")


def _not_once(
    phase: str, counted: Counter[tuple[int, int]], every: Iterable[tuple[int, int]]
) -> Iterator[Violation]:
    for layer, j in every:
        times = counted[layer, j]
        if times != 1:
            kind = TaskUnexpected if times else TaskMissing
            yield kind(f"layer {layer} runs microbatch {j} {phase} {times} times, not once")


def _count(op: Compute, passes: dict[str, Counter[tuple[int, int]]], updates: Counter[str]) -> None:
    """A layer runs where its attention (or all of it) reads its parameters."""
    kind, j = op.label.kind, op.label.round
    if kind == "optimizer":
        name, _, part = op.task.removeprefix("update.").partition(".part")
        updates[name] += part in ("", "0")  # that the others are there is seen op by op
    if j is None or ".again" in op.task:
        return
    for phase, counted in passes.items():
        if kind in (f"layer_{phase}", f"attention_{phase}", f"attention_before_{phase}"):
            for operand in op.operands:
                name = operand.name.removeprefix("parameters.")
                if name != operand.name and name.isdigit():
                    counted[int(name), j] += 1


def is_executable(schedule: ClusterSchedule) -> bool:
    """Whether a document's stages were planned for kernels that twinstream has."""
    return all(part.recipe and _vector(part) != "megatron" for part in schedule.schedules.values())


def _vector(part: Schedule) -> object:
    kernels = part.recipe.get("kernels")
    return kernels.get("vector") if isinstance(kernels, dict) else None


def conforms_ranks(schedule: ClusterSchedule) -> list[Violation]:
    """All differences found, at most 20 of each class; an empty list is a proof."""
    spec = ModelSpec.model_validate(schedule.model)
    try:
        layout = layout_in(schedule)
    except ValidationError as error:
        return [CallDiffers(f"the document's layout is none: {error.errors()[0]['msg']}")]
    if {"pp": layout.pp, "dp": layout.dp} != _degrees(schedule):
        return [CallDiffers("the mesh is not that of the document's layout")]
    found: list[Violation] = []
    for one in schedule.classes:
        places = one.cell("pp", layout.pp)
        if len(places) > 1:
            found.append(TaskUnexpected(f"class '{one.name}' is of {len(places)} stages at once"))
            continue
        found += list(_of_class(schedule, one, spec, layout))[:_MOST_TOLD]
    return found


def _degrees(schedule: ClusterSchedule) -> dict[str, int]:
    lengths = {axis.name: axis.size for axis in schedule.mesh.axes}
    return {"pp": 1, "dp": 1} | lengths


def _of_class(
    schedule: ClusterSchedule, one: RankClass, spec: ModelSpec, layout: Layout
) -> Iterator[Violation]:
    part, (stage,) = schedule.of(one), one.cell("pp", layout.pp)
    own, workload = part.workload, workload_of_rounds(part, layout)
    if workload is None or own.seq_len != schedule.seq_len:
        yield WorkDiffers(
            f"class '{one.name}' has {own.sequences_per_step} sequences, which are not rounds of "
            f"{layout.micro_batch} in whole chunks"
        )
        return
    try:
        recipe = Recipe.model_validate(part.recipe)
        chain = chain_of_stage(Stages(spec, workload, recipe, layout), stage)
    except (ValidationError, TwinstreamError) as error:
        yield CallDiffers(f"class '{one.name}' cannot be lowered again: {error}")
        return
    for violation in conforms(part, _silent(chain)):
        yield type(violation)(f"class '{one.name}': {violation.message}")
    yield from _communications(one, part, chain)


def workload_of_rounds(part: Schedule, layout: Layout) -> Workload | None:
    """A class has all microbatches as chunks of one round; here each is a round.

    None where they are not rounds of whole chunks.
    """
    own = part.workload
    rounds, left = divmod(own.sequences_per_step, layout.micro_batch)
    if left or not rounds or own.chunks_per_round % rounds:
        return None
    each = own.chunks_per_round // rounds
    return own.model_copy(update={"chunks_per_round": each, "rounds_per_step": rounds})


def _is_said(chain: Chain, task: Task) -> bool:
    return chain.calls[task.call].kernel == COMMUNICATE


def _silent(chain: Chain) -> Chain:
    """The chain without what it says to other ranks."""
    tasks = tuple(task for task in chain.tasks if not _is_said(chain, task))
    return chain.model_copy(update={"tasks": tasks})


def _communications(one: RankClass, part: Schedule, chain: Chain) -> Iterator[Violation]:
    """Each thing that the chain says is said once, of the same tensors, to the same ranks."""
    wanted = {task.task_id: task for task in chain.tasks if _is_said(chain, task)}
    given = {op.op_id: op for op in part.ops if isinstance(op, Communicate)}
    for name in wanted.keys() - given.keys():
        yield TaskMissing(f"class '{one.name}' lacks '{name}'", (name,))
    for name in given.keys() - wanted.keys():
        yield TaskUnexpected(f"class '{one.name}' has '{name}', which its stage has not", (name,))
    for name in sorted(wanted.keys() & given.keys()):
        op, task = given[name], wanted[name]
        told = chain.calls[task.call].attributes
        axes, shift = tuple(str(told["axes"]).split()), int(str(told.get("shift", 0)))
        same = (op.collective, op.axes, op.shift, op.stream.queue, op.reduction) == (
            told["collective"], axes, shift, told["queue"], told.get("reduction", "library"),
        )  # fmt: skip
        if not same:
            yield CallDiffers(f"class '{one.name}': '{name}' is not what its stage says", (name,))
        if [*map(_what, op.operands)] != [*map(_what, task.operands)]:
            yield OperandsDiffer(
                f"class '{one.name}': '{name}' is of other tensors or versions", (name,)
            )


def _what(operand: TaskOperand) -> tuple[str, str, int, str, int | None]:
    return operand.name, operand.tensor, operand.version, operand.mode, operand.num_parts
