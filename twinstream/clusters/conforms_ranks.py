"""Prove that the ranks of an executable cluster's schedule train the model that it names.

Each class's chain is lowered again from the document's model, layout and recipe; its schedule has
to compute exactly that (`conforms`), and to say what the chain says, with the same operands.
"""

from collections.abc import Iterator

from pydantic import ValidationError

from twinstream.clusters.executable import Stages, chain_of_stage, layout_in
from twinstream.clusters.layout import Layout
from twinstream.models.lowering.communication_tasks import COMMUNICATE
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.schedule.chain import Chain, Task
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule, RankClass
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Communicate, TaskOperand
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.violations import (
    CallDiffers,
    OperandsDiffer,
    TaskMissing,
    TaskUnexpected,
    Violation,
    WorkDiffers,
)
from twinstream.schedule.workload import Workload

_MOST_TOLD = 20


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
    yield from _said(one, part, chain)


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


def _said(one: RankClass, part: Schedule, chain: Chain) -> Iterator[Violation]:
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
