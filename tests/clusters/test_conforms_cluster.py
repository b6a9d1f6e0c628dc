"""The stages of a document together are the model's step, and any change is told."""

import pytest

from tests.clusters.random_jobs import job_of, lowered, random_job
from twinstream.clusters.conforms import conforms, require_conforming
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.proof.violations import UnsafeSchedule


@pytest.mark.parametrize("seed", range(12))
def test_what_is_lowered_conforms(seed):
    assert conforms(lowered(random_job(seed))) == []


def _without(kind):
    def damage(schedule: RankSchedule) -> RankSchedule:
        dropped = next(op for op in schedule.ops if op.label.kind == kind)
        ops = tuple(op for op in schedule.ops if op is not dropped)
        return schedule.model_copy(update={"ops": ops})

    return damage


def _twice(schedule: RankSchedule) -> RankSchedule:
    again = next(op for op in schedule.ops if op.label.kind == "layer_forward")
    more = again.model_copy(update={"op_id": "again", "task": "again"})
    return schedule.model_copy(update={"ops": (*schedule.ops, more)})


def _older(schedule: RankSchedule) -> RankSchedule:
    at = next(i for i, op in enumerate(schedule.ops) if op.label.kind == "optimizer")
    op = schedule.ops[at]
    operands = tuple(o.model_copy(update={"version": o.version + 1}) for o in op.operands)
    ops = list(schedule.ops)
    ops[at] = op.model_copy(update={"operands": operands})
    return schedule.model_copy(update={"ops": tuple(ops)})


def _cheaper(schedule: RankSchedule) -> RankSchedule:
    calls = {name: call.model_copy(update={"cost": ()}) for name, call in schedule.calls.items()}
    return schedule.model_copy(update={"calls": calls})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_without("layer_backward"), "task 'backward.4.0' is not carried out"),
        (_without("layer_backward"), "backward 0 times"),
        (_without("optimizer"), "updated 0 times, not once"),
        (_without("reduce_gradients"), "lacks 'reduce"),
        (_twice, "'again', which is no task of the chain"),
        (_twice, "forward 2 times, not once"),
        (_older, "has operand 'gradient' (read version"),
        (_cheaper, "is not the chain's"),
    ],
)
def test_a_damaged_stage_does_not(damage, said):
    document = lowered(job_of(4, pp=2, dp=2))
    name = document.classes[1].schedule
    schedules = {**document.schedules, name: damage(document.schedules[name])}
    found = conforms(document.model_copy(update={"schedules": schedules}))
    assert any(said in str(violation) for violation in found), [str(one) for one in found]


def test_another_layout_than_the_documents_is_told():
    document = lowered(job_of(4, pp=2, dp=2))
    other = document.model_copy(update={"layout": {**document.layout, "zero": 3}})
    with pytest.raises(UnsafeSchedule, match="is not declared as in the chain"):
        require_conforming(other)


def test_a_layout_that_cannot_be_is_told():
    document = lowered(job_of(4, pp=2, dp=2))
    other = document.model_copy(update={"layout": {**document.layout, "dp": 3}})
    (violation,) = conforms(other)
    assert "cannot be" in str(violation)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"global_batch": 4}, "global_batch is 4, and its classes have"),
        ({"model_flops": 12345}, "model_flops is 12,345, of its classes"),
        ({"precision": "fp8"}, "precision is fp8"),
        ({"attention": "unfused"}, "attention is unfused"),
    ],
)
def test_what_is_told_of_the_whole_step_is_that_of_its_classes(changes, said):
    document = lowered(job_of(4, pp=2, dp=2))
    found = conforms(document.model_copy(update=changes))
    assert any(said in str(violation) for violation in found), [str(one) for one in found]


def test_a_class_of_another_model_and_an_offload_of_nothing_are_told():
    document = lowered(job_of(4, pp=2, dp=2))
    name = document.classes[1].schedule
    part = document.schedules[name]
    spec = {**part.model.spec, "norm_eps": 0.5}
    other = part.model_copy(update={"model": part.model.model_copy(update={"spec": spec})})
    schedules = {**document.schedules, name: other}
    found = conforms(document.model_copy(update={"schedules": schedules}))
    assert any("is of model" in str(one) for one in found)
    layout = {**document.layout, "offload": True}
    found = conforms(document.model_copy(update={"layout": layout}))
    assert any("no class copies anything" in str(one) for one in found)
