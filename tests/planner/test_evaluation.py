"""The forward of a training schedule: safe, conforming, in its slots, and what it puts back."""

from functools import cache

import pytest

from tests.helpers.host_chains import tiny_chain_of
from tests.helpers.plans import MACHINE, enough_device_bytes, planned
from tests.helpers.seed_sizings import SIZINGS
from tests.helpers.tiny_chains import WORKLOADS, tiny_chain
from twinstream.fidelity.seed_system.policy import emit_seed, seed_chain
from twinstream.models.lowering.lower import lower_again
from twinstream.models.presets import load_preset
from twinstream.models.recipe import Recipe
from twinstream.planner.evaluate.errors import NoEvaluation
from twinstream.planner.evaluate.evaluation import evaluation_of
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import Compute, Copy
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.verify import verify_rank
from twinstream.schedule.workload import MachineRef
from twinstream.simulator.replay import simulate_rank

POLICIES = ("resident", "streaming", "optimal", "full_recompute", "optimizer_offload",
            "layer_offload")  # fmt: skip


@cache
def schedules(policy: str, workload: str, preset: str = "tiny-qwen3") -> list[RankSchedule]:
    """At no cap, and where the policy adapts to them at caps down to the least."""
    chain = tiny_chain_of(policy, workload, preset)
    caps = [Caps()]
    if policy in ("streaming", "optimal"):
        least = enough_device_bytes(chain, policy)
        caps += [Caps(device_bytes=least * 5 // 4), Caps(device_bytes=least)]
    return [planned(chain, MACHINE, each, policy) for each in caps]


def put_back(schedule: RankSchedule) -> list[Copy]:
    found = [op for op in schedule.ops if op.op_id.startswith("restore.")]
    return [op for op in found if isinstance(op, Copy)]


@pytest.mark.parametrize("workload", ["sliced", "unequal"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policys_forward_is_proven_and_takes_less_than_the_step(policy, workload):
    for training in schedules(policy, workload):
        found = evaluation_of(training)
        assert verify_rank(found) == []
        assert conforms(found, lower_again(found)) == []
        assert (found.slots, found.carried, found.caps) == (
            training.slots, training.carried, training.caps
        )  # fmt: skip
        times = [simulate_rank(each, MACHINE).step_ns for each in (found, training)]
        assert times[0] < times[1] / 2  # two rounds, of which a forward is a third
        assert RankSchedule.model_validate_json(found.model_dump_json()) == found


def test_the_forward_is_one_rounds_without_what_serves_the_backward():
    for training in schedules("streaming", "sliced"):
        found = evaluation_of(training)
        computes = [op for op in found.ops if isinstance(op, Compute)]
        chunks, layers = WORKLOADS["sliced"].chunks_per_round, 2
        assert len(computes) == chunks * (1 + layers + 1)
        assert {op.label.round for op in computes} == {0}
        assert not any(name.startswith(("grad", "d_")) for op in computes
                       for name in (o.tensor for o in op.operands))  # fmt: skip
        offloaded = {op.tensor for op in found.ops if op.kind == "copy" and "d2h" in op.op_id}
        fetched = {op.tensor for op in found.ops if op.kind == "copy" and "h2d" in op.op_id}
        assert offloaded - fetched == {"loss"}
        [fed] = [op for op in found.ops if op.kind == "feed" and op.source == "step_state"]
        assert fed.index == 0
        assert [op.version for op in found.ops if op.kind == "fetch"] == [chunks]


def test_what_the_training_carries_where_the_forward_writes_is_put_back():
    """The embedding waits on the device from the end of a step to the begin of the next."""
    training = schedules("optimal", "sliced")[-1]
    [copy] = put_back(evaluation_of(training))
    assert copy.tensor == "param.embedding"
    assert {copy.source, copy.destination} == {
        item.slot for item in training.carried if item.tensor == "param.embedding"
    }


def without_home(training: RankSchedule) -> RankSchedule:
    """The plan that has the embedding at home only once it has been copied there in the forward."""
    home, device = (
        next(item for item in training.carried
             if item.tensor == "param.embedding" and item.slot.startswith(kind))
        for kind in ("host", "device")
    )  # fmt: skip
    first = next(i for i, op in enumerate(training.ops) if op.kind == "compute")
    save = Copy(
        op_id="save", stream=next(op.stream for op in training.ops if op.op_id.startswith("d2h")),
        tensor="param.embedding", version=0, source=device.slot, destination=home.slot,
    )  # fmt: skip
    ops = (*training.ops[:first], save, *training.ops[first:])
    carried = tuple(item for item in training.carried if item != home)
    return training.model_copy(update={"ops": ops, "carried": carried})


def test_the_trainings_own_copy_that_saves_it_stays():
    training = without_home(schedules("optimal", "sliced")[-1])
    found = evaluation_of(training)
    assert "save" in [op.op_id for op in found.ops]
    assert [op.tensor for op in put_back(found)] == ["param.embedding"]


def test_what_nothing_saves_is_refused():
    training = without_home(schedules("optimal", "sliced", "tiny")[-1])  # its head has its own
    ops = tuple(op for op in training.ops if op.op_id != "save")
    with pytest.raises(NoEvaluation, match=r"overwrites 'param\.embedding.*saves nowhere"):
        evaluation_of(training.model_copy(update={"ops": ops}))


def test_a_forward_of_parameters_that_the_step_has_changed_before_is_refused():
    training = schedules("resident", "packed")[0]
    changed = [
        op.model_copy(update={"operands": tuple(
            o.model_copy(update={"version": 1}) if o.tensor == "param.0" else o
            for o in op.operands
        )}) if isinstance(op, Compute) else op
        for op in training.ops
    ]  # fmt: skip
    with pytest.raises(NoEvaluation, match=r"read of version 0 of 'param\.0'.*version 1"):
        evaluation_of(training.model_copy(update={"ops": tuple(changed)}))


def test_only_a_training_has_an_evaluation():
    found = evaluation_of(schedules("resident", "packed")[0])
    with pytest.raises(NoEvaluation, match="forward only already"):
        evaluation_of(found)


def test_clipping_recipes_and_wide_states_are_evaluated_too():
    for recipe in (
        Recipe(optimizer="device_after_backward", clips=True, gradients="float32"),
        Recipe(optimizer_state="8bit"),
    ):
        training = planned(tiny_chain("packed", "tiny", recipe), MACHINE, Caps(), "streaming")
        assert [op.sink for op in evaluation_of(training).ops if op.kind == "fetch"] == ["loss"]


@pytest.mark.parametrize("name", SIZINGS)
def test_the_seed_systems_schedule_is_evaluated_too(name):
    """Its slots are rings, with copies inside the device and context that comes back."""
    sizing, spec = SIZINGS[name], load_preset("tiny")
    machine = MachineRef(name="h100", content_hash="0")
    training = emit_seed(spec, seed_chain(spec, sizing.workload), sizing, machine)
    found = evaluation_of(training)
    assert verify_rank(found) == []
    assert conforms(found, lower_again(found)) == []
