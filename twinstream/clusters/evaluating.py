"""Derive from the schedule that ranks train by the one that evaluates, between two passes."""

from twinstream.clusters.assembling import in_one_order
from twinstream.clusters.conforms import require_conforming, workload_of_rounds
from twinstream.clusters.pipeline import layout_in
from twinstream.models.lowering.lower import lower
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.planner.evaluate.evaluation import forward_of
from twinstream.schedule.cluster.verify import require_safe
from twinstream.schedule.document import RankClass, RankSchedule, Schedule


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
