"""The flush of a schedule: the updates alone, in its slots, proven as every document."""

from functools import cache

import pytest

from tests.helpers.machines_for_plans import slow_link_machine
from tests.helpers.plans import MACHINE, enough_device_bytes, planned
from tests.helpers.tiny_chains import tiny_chain
from twinstream.models.lowering.lower import lower_again
from twinstream.models.recipe import Recipe
from twinstream.schedule.derived.flush import flush_of
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import Compute, Copy, Feed, Op
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.verify import verify_rank
from twinstream.schedule.proof.violations import (
    CarriedNotValid,
    ConsumedDiffers,
    PersistentNotCarried,
    TaskMissing,
    Violation,
    WrongContent,
)

RECIPE = Recipe(clips=True, optimizer="device_before_next_use")
POLICIES = ("resident", "streaming", "optimal")


@cache
def plan_of(policy: str, workload: str, preset: str, quarters: int) -> RankSchedule:
    """Within so many quarters of the least device cap that will do."""
    chain = tiny_chain(workload, preset, RECIPE)
    least = enough_device_bytes(chain, "streaming")
    caps = Caps() if policy == "resident" else Caps(device_bytes=least * quarters // 4)
    machine = slow_link_machine() if policy == "optimal" else MACHINE
    return planned(chain, machine, caps, policy)


def flush(schedule: RankSchedule) -> RankSchedule:
    found = flush_of(schedule)
    assert found is not None
    return found


def kinds_without(schedule: RankSchedule, op: Op) -> set[type[Violation]]:
    """What is wrong when an op is left out, and nobody waits for it."""
    ops = tuple(
        each.model_copy(update={"waits": tuple(w for w in each.waits if w != op.op_id)})
        for each in schedule.ops
        if each is not op
    )
    return {type(v) for v in verify_rank(schedule.model_copy(update={"ops": ops}))}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("workload", "preset", "quarters"),
    [("packed", "tiny", 4), ("sliced", "tiny-qwen3", 6), ("one chunk", "tiny", 5)],
)
def test_it_is_proven_and_only_updates(policy, workload, preset, quarters):
    schedule = plan_of(policy, workload, preset, quarters)
    found = flush(schedule)
    assert verify_rank(schedule) == verify_rank(found) == conforms(found, lower_again(found)) == []
    assert {op.label.kind for op in found.ops if isinstance(op, Compute)} == {"optimizer_step"}
    assert [op.source for op in found.ops if isinstance(op, Feed)] == ["update_state"]
    assert found.slots == schedule.slots
    assert set(found.carried) | set(found.consumed) == set(schedule.carried)
    left = {item.tensor.split(".")[0] for item in found.consumed}
    assert left == {"grad", "grad_norm"}


def test_what_was_carried_on_the_device_is_put_back_there():
    found = flush(plan_of("optimal", "packed", "tiny", 6))
    on_device = [c for c in found.carried if c.slot.startswith("device")]
    assert on_device
    restored = [op for op in found.ops if op.op_id.startswith("restore")]
    assert restored
    for op in restored:
        assert CarriedNotValid in kinds_without(found, op), op.op_id


def test_no_copy_of_it_is_idle():
    found = flush(plan_of("streaming", "sliced", "tiny-qwen3", 4))
    for op in found.ops:
        if isinstance(op, Copy):
            assert kinds_without(found, op) & {WrongContent, CarriedNotValid}, op.op_id


@pytest.mark.parametrize("place", ["device", "device_after_backward"])
def test_there_is_none_where_a_pass_makes_all_its_updates(place):
    chain = tiny_chain("packed", recipe=Recipe(optimizer=place))
    assert flush_of(planned(chain, MACHINE, Caps(), "streaming")) is None


def test_one_of_a_flush_is_none():
    assert flush_of(flush(plan_of("streaming", "packed", "tiny", 4))) is None


def test_a_flush_that_forgets_something_is_no_flush():
    found = flush(plan_of("streaming", "packed", "tiny", 4))
    chain = lower_again(found)
    update = next(op for op in found.ops if isinstance(op, Compute))
    for changes, violation in (
        ({"ops": tuple(op for op in found.ops if op is not update)}, TaskMissing),
        ({"consumed": found.consumed[1:]}, ConsumedDiffers),
        ({"carried": found.carried[1:]}, PersistentNotCarried),
    ):
        broken = found.model_copy(update=changes)
        assert violation in {type(v) for v in conforms(broken, chain)}


def test_what_is_consumed_is_there_before_the_pass_and_need_not_be_after():
    found = flush(plan_of("streaming", "packed", "tiny", 4))
    missing = found.model_copy(update={"consumed": ()})
    assert WrongContent in {type(v) for v in verify_rank(missing)}
    tight = flush(plan_of("optimal", "packed", "tiny", 6))
    assert any(item.slot.startswith("device") for item in tight.consumed)
    kept = tight.model_copy(update={"consumed": (), "carried": (*tight.carried, *tight.consumed)})
    assert CarriedNotValid in {type(v) for v in verify_rank(kept)}
