"""Plans that keep what is trained on a disk: proven, bounded, and with what they write told."""

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.helpers.disk_plans import (
    UPDATES_FIRST,
    planned_with_disk,
    written_plan,
    written_request,
)
from tests.helpers.schedule_oracle import problems
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.overrides import override
from twinstream.measures.residence import residence
from twinstream.measures.wear import wear_notes, written_bytes
from twinstream.planner.evaluate.evaluation import evaluation_of
from twinstream.planner.planner import Planner
from twinstream.planner.request import with_drive, with_endurance
from twinstream.schedule.derived.flush import flush_of
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Compute, Copy
from twinstream.schedule.proof.verify import verify_rank
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.sizes import SizeError
from twinstream.schedule.tensors import HOST
from twinstream.simulator.replay import simulate_rank, steady_state


def copies_on(plan: RankSchedule, queue: str) -> list[Copy]:
    return [op for op in plan.ops if isinstance(op, Copy) and op.stream.queue == queue]


def test_what_is_trained_is_at_home_on_the_disk_where_the_host_is_short() -> None:
    request, plan = written_request(), written_plan()
    assert problems(plan) == set()
    assert request.caps.host_bytes is not None
    assert arena_bytes(plan, HOST) <= request.caps.host_bytes
    on_disk = {item.tensor for item in plan.carried if item.slot.startswith("disk.")}
    assert {name.partition(".")[0] for name in on_disk} >= {"opt"}
    written, offloaded = copies_on(plan, "disk_write"), copies_on(plan, "d2h_disk")
    # each write is of what was just copied to its slot of the ring
    assert [(op.tensor, op.version, op.source) for op in written] == [
        (op.tensor, op.version, op.destination) for op in offloaded
    ]
    # what persists and is changed is written once a pass
    kept = [op.tensor for op in written if op.tensor in on_disk]
    assert sorted(kept) == sorted(set(kept)) and set(kept) == on_disk
    result = residence(plan, simulate_rank(plan, request.machine))
    roles = {role.role: role for role in result.roles}
    assert sum(role.disk_written_bytes for role in roles.values()) == written_bytes(plan)
    assert roles["optimizer_state"].disk_home_bytes > 0


@pytest.mark.parametrize(("read", "write"), [(400, 200), (2000, 200)])
def test_the_bound_is_between_what_must_be_moved_and_the_plan(read: int, write: int) -> None:
    """By arithmetic: what persists and fits neither memory is read and written in every step, one
    after the other, and a drive as fast as can be costs nothing."""
    request = written_request(rates=f"{read}KB/s,{write}KB/s", num_layers=8)
    plan = planned_with_disk(request)
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in plan.tensors}
    persistent = sum(sizes[name] for name in {item.tensor for item in plan.carried})
    memory = (request.caps.device_bytes or 0) + (request.caps.host_bytes or 0)
    least_s = (persistent - memory) * (1 / read + 1 / write) / 1e3
    assert plan.bound is not None
    assert 0 < least_s <= plan.bound.step_s <= steady_state(plan, request.machine).step_ns / 1e9
    assert "drive" in plan.bound.limits


def test_a_drive_as_fast_as_can_be_costs_nothing() -> None:
    fast, roomy = written_plan(rates="1000TB/s,1000TB/s"), written_plan(host_mem="8MiB")
    assert fast.bound is not None and roomy.bound is not None
    assert fast.bound.step_s == pytest.approx(roomy.bound.step_s, rel=1e-6)


def test_a_drive_that_overlaps_both_ways_is_as_much_faster() -> None:
    """At overlap 2 each way takes its own time only; in bound and simulation."""
    plan, turns = (
        written_plan(rates="200KB/s,200KB/s"),
        written_request(rates="200KB/s,200KB/s").machine,
    )
    both = override(turns, {"disk_overlap": 2.0})
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in plan.tensors}
    read, written = (
        sum(sizes[op.tensor] for op in copies_on(plan, queue))
        for queue in ("disk_read", "disk_write")
    )
    slow_s, fast_s = (steady_state(plan, one).step_ns / 1e9 for one in (turns, both))
    assert slow_s >= (read + written) / 2e5
    assert max(read, written) / 2e5 <= fast_s < slow_s


def test_rounds_are_alike_and_a_read_waits_for_the_write_of_its_round() -> None:
    plan = written_plan(tokens=320)
    assert plan.workload.rounds_per_step > 4
    assert verify_rank(plan) == []
    begins = [
        at for at, op in enumerate(plan.ops)
        if isinstance(op, Compute) and op.label.kind == "embed_forward" and op.label.chunk == 0
    ]  # fmt: skip
    of_round = [
        [
            (op.tensor, op.source)
            for op in plan.ops[low:high]
            if isinstance(op, Copy) and op.stream.queue == "disk_write"
        ]
        for low, high in pairwise(begins)
    ]
    assert of_round[1] == of_round[2] == of_round[3] != []


def test_a_flush_and_an_evaluation_leave_the_disk_as_a_pass_does() -> None:
    """Updates that a pass leaves to the next are made, and written."""
    plan = written_plan(recipe=UPDATES_FIRST)
    flush, evaluation = flush_of(plan), evaluation_of(plan)
    assert flush is not None
    for derived in (flush, evaluation):
        assert verify_rank(derived) == []
    on_disk = {item.tensor for item in plan.carried if item.slot.startswith("disk.opt")}
    assert on_disk <= {op.tensor for op in copies_on(flush, "disk_write")}


def test_without_a_rate_of_writes_nothing_is_written_and_that_is_said() -> None:
    machine = with_drive(load_machine("cpu"), "7GB/s")
    assert machine.disk_write_bytes_per_s is None
    assert with_drive(machine, "7GB/s,5GB/s").number("disk_write_bytes_per_s") == 5e9
    with pytest.raises(Exception, match="7GB/s,5GB/s"):
        replace(written_request(), machine=machine).allowed()
    for wrong in ("7GB/s,", "7,8,9", "fast,5GB/s"):
        with pytest.raises(SizeError, match="is no rate"):
            with_drive(machine, wrong)


def test_with_room_for_all_nothing_is_written() -> None:
    plan = written_plan(host_mem="8MiB")
    assert not copies_on(plan, "disk_write") and not copies_on(plan, "disk_read")
    assert wear_notes(plan, load_machine("cpu"), 1.0) == []


def test_the_wear_of_a_drive_is_what_it_writes_a_day() -> None:
    plan = written_plan()
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in plan.tensors}
    written = sum(sizes[op.tensor] for op in copies_on(plan, "disk_write"))
    assert written_bytes(plan) == written
    machine = with_endurance(load_machine("cpu"), "2TB")
    step_s = 0.01
    days = 2e12 / (written / step_s * 86_400)
    (told,) = wear_notes(plan, machine, step_s)
    assert f"{written / step_s * 86_400 / 1e12:,.2f} TB a day" in told
    assert f"endurance of 2 TB lasts {days:,.1f} days" in told
    (assumed,) = wear_notes(plan, load_machine("cpu"), 10.0)
    assert "600 TB, assumed" in assumed and "years" in assumed


def test_a_disk_plan_is_found_where_none_was() -> None:
    request = written_request()
    caps = request.caps.model_copy(update={"disk_bytes": None})
    with pytest.raises(Exception, match="does not fit") as refused:
        Planner(steady_state).plan(replace(request, caps=caps), name_caps=False)
    assert "\n" not in str(refused.value)
