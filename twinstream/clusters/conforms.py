"""Prove that the ranks of a schedule together train the whole model, and nothing else.

`verify` proves that every op finds what it names. Here it is proven that the
ops are those of the layout: every class has the tasks and the communication of its stage, as they
come out when the document's own model, layout and batch are lowered again; and, without a look at
that, that over all stages every layer runs every microbatch forward and backward once and every
group of parameters is updated once.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator

from pydantic import ValidationError

from twinstream.clusters.refusals import refusals_of
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.lowering.lower import lower, lower_again
from twinstream.models.lowering.parts.groups import mesh_of
from twinstream.models.recipes.recipe import Recipe, megatron_recipe
from twinstream.schedule.chain import COMMUNICATE, Chain, Task
from twinstream.schedule.document import RankClass, RankSchedule, Schedule
from twinstream.schedule.errors import ArgumentError, TwinstreamError, require
from twinstream.schedule.files import DocumentError
from twinstream.schedule.ops import Communicate, Compute, TaskOperand
from twinstream.schedule.proof.conforms import conforms as conforms_to_chain
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


def conforms(schedule: Schedule, chain: Chain | None = None) -> list[Violation]:
    """Return all in which a schedule differs from the training step that it says it computes.

    An empty list is a proof that it computes that, all of it and nothing else. Of ranks of a layout
    at most 20 differences of each class are told.

    Args:
        chain: of one device, the step that it should compute; by default its own model, workload
            and recipe are lowered again, as those of a layout are for every stage.

    Raises:
        TwinstreamError: its model or recipe is not valid, or far too large for its ops.
    """
    require("schedule", schedule, Schedule)
    if schedule.is_one_device:
        own = schedule.only
        return conforms_to_chain(own, chain_of(own) if chain is None else chain)
    if chain is not None:
        raise ArgumentError("chain: a mesh has one for each stage: leave it out")
    try:
        job = _job_of(schedule)
    except ValidationError as error:
        return [
            CallDiffers(f"the document's model and layout are none: {error.errors()[0]['msg']}")
        ]
    if why := refusals_of(_with_microbatches(schedule, job), schedule.mesh.size):
        return [CallDiffers(f"the document's layout cannot be: {why[0]}")]
    if mesh_of(job, schedule.mesh.ranks_per_node).axes != schedule.mesh.axes:
        return [CallDiffers("the mesh is not that of the document's layout")]
    found = [*_of_document(schedule, job.layout), *_of_stages(schedule, job)]
    if is_executable(schedule):
        return found
    return [*found, *list(_uncovered(schedule, job))[:_MOST_TOLD]]


def chain_of(schedule: RankSchedule) -> Chain:
    """Return the chain that a schedule says it was planned for.

    Raises:
        TwinstreamError: its model or recipe is not valid, or far too large for its ops.
    """
    work, layers = schedule.workload, schedule.model.spec.get("num_layers")
    blocks = work.rounds_per_step * work.chunks_per_round * (layers if type(layers) is int else 1)
    if blocks > len(schedule.ops):  # do not lower what a slip made astronomical
        raise DocumentError(
            f"the schedule's workload and model have {blocks:,} blocks to compute, but it has only "
            f"{len(schedule.ops):,} ops; is 'workload' or 'model' damaged?"
        )
    return lower_again(schedule)


def _of_document(schedule: Schedule, layout: Layout) -> Iterator[Violation]:
    """What the document says of the whole step, which its classes give."""
    first = schedule.of(schedule.classes[0])
    replicas = layout.dp if is_executable(schedule) else 1
    flops = first.model_flops * replicas
    if schedule.model_flops != flops:
        yield WorkDiffers(f"model_flops is {schedule.model_flops:,}, of its classes {flops:,}")
    sequences = first.workload.sequences_per_step * layout.dp
    if schedule.global_batch != sequences:
        yield WorkDiffers(
            f"global_batch is {schedule.global_batch:,}, and its classes have {sequences:,}"
        )
    usual = {"precision": "bf16", "attention": "flash"}
    for field, value in usual.items() if first.recipe else ():
        if getattr(schedule, field) != value:  # the recipe says it; earlier documents had no other
            yield WorkDiffers(
                f"{field} is {getattr(schedule, field)}, where a document with a recipe has {value}"
            )
    moves = any(
        op.kind == "copy" and op.stream.queue in ("h2d", "d2h")
        for part in schedule.schedules.values() for op in part.ops
    )  # fmt: skip
    if layout.offload and not moves:
        yield WorkDiffers("the layout says that it is offloaded, and no class copies anything")
    if not layout.sequence_parallel and layout.tp == 1:
        yield WorkDiffers("sequence_parallel is false, where tp 1 splits no sequence")
    if layout.sliced_norms and (layout.tp > 1 or layout.num_parts == 1):
        yield WorkDiffers("sliced_norms is true, which is of one rank with several parts")


def require_conforming(schedule: Schedule) -> None:
    """Raise UnsafeSchedule unless `conforms` finds nothing."""
    if found := conforms(schedule):
        raise UnsafeSchedule(found)


def _job_of(schedule: Schedule) -> Job:
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


def _with_microbatches(schedule: Schedule, job: Job) -> Job:
    """The job with as many microbatches as any order needs, where it is an evaluation, of one."""
    if not schedule.of(schedule.classes[0]).workload.forward_only:
        return job
    return job.model_copy(update={"global_batch": job.global_batch * job.layout.pp})


def _of_stages(schedule: Schedule, job: Job) -> list[Violation]:
    """What differs in each class, which is to be of one stage."""
    found: list[Violation] = []
    for one in schedule.classes:
        stages = one.cell("pp", schedule.mesh.length("pp"))
        if len(stages) > 1:
            found.append(TaskUnexpected(f"class '{one.name}' is of {len(stages)} stages at once"))
            continue
        found += list(_of_class(one, schedule.of(one), job, stages[0]))[:_MOST_TOLD]
    return found


def _uncovered(schedule: Schedule, job: Job) -> Iterator[Violation]:
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
    for name in job.shape.parameter_groups:
        if name not in job.shape.untrained_groups and updates[name] != 1:
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


def is_executable(schedule: Schedule) -> bool:
    """Whether a document's stages were planned for kernels that twinstream has."""
    return all(map(_runs_here, schedule.schedules.values()))


def _runs_here(part: RankSchedule) -> bool:
    kernels = part.recipe.get("kernels")
    vector = kernels.get("vector") if isinstance(kernels, dict) else None
    return bool(part.recipe) and vector != "megatron"


def _of_class(one: RankClass, part: RankSchedule, job: Job, stage: int) -> Iterator[Violation]:
    workload, own = job.workload, part.workload
    priced, runs_here = job.with_megatron_kernels().recipe, _runs_here(part)
    if runs_here:
        rounds = workload_of_rounds(part, job.layout)
        if rounds is None or own.seq_len != job.seq_len:
            yield WorkDiffers(
                f"class '{one.name}' has {own.sequences_per_step} sequences, which are not rounds "
                f"of {job.layout.micro_batch} in whole chunks"
            )
            return
        workload = rounds
    try:
        recipe = Recipe.model_validate(part.recipe) if runs_here else priced
        chain = lower(job.shape, workload, recipe, job.layout, stage)
    except (ValidationError, TwinstreamError) as error:
        yield CallDiffers(f"class '{one.name}' cannot be lowered again: {error}")
        return
    if part.model != chain.model:
        yield WorkDiffers(
            f"class '{one.name}' is of model {part.model.name} ({part.model.content_hash}), the "
            f"document of {chain.model.name} ({chain.model.content_hash})"
        )
    for violation in conforms_to_chain(part, _silent(chain), of_mesh=True):
        yield type(violation)(f"class '{one.name}': {violation.message}")
    yield from _communications(one, part, chain)


def workload_of_rounds(part: RankSchedule, layout: Layout) -> Workload | None:
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


def _communications(one: RankClass, part: RankSchedule, chain: Chain) -> Iterator[Violation]:
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
        own = op.collective, op.axes, op.shift, op.stream.queue, op.reduction, op.last_first
        same = own == (
            told["collective"], axes, shift, told["queue"], told.get("reduction", "library"),
            told.get("last_first"),
        )  # fmt: skip
        if not same:
            yield CallDiffers(f"class '{one.name}': '{name}' is not what its stage says", (name,))
        if [*map(_what, op.operands)] != [*map(_what, task.operands)]:
            yield OperandsDiffer(
                f"class '{one.name}': '{name}' is of other tensors or versions", (name,)
            )


def _what(operand: TaskOperand) -> tuple[str, str, int, str, int | None]:
    return operand.name, operand.tensor, operand.version, operand.mode, operand.num_parts
