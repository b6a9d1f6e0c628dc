"""Plans that keep what is trained on a disk: proven, bounded, and with what they write told."""

from dataclasses import replace

import pytest

from tests.helpers.disk_plans import (
    UPDATES_FIRST,
    of_rounds,
    planned_with_disk,
    written_plan,
    written_request,
)
from tests.helpers.schedule_oracle import problems
from tests.helpers.small_chains import UNIT_BYTES, Sort, build_chain, link_machine
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.overrides import override
from twinstream.measures.residence import residence
from twinstream.measures.wear import wear_notes, written_bytes
from twinstream.planner.bound.lower_bound import BoundProgram, ProgramKind, lower_bound
from twinstream.planner.bound.program import LinearProgram, Terms
from twinstream.planner.evaluate.evaluation import evaluation_of
from twinstream.planner.lifetimes.view import ChainView
from twinstream.planner.planner import Planner
from twinstream.planner.request import with_drive, with_endurance
from twinstream.schedule.derived.flush import flush_of
from twinstream.schedule.document import Caps, RankSchedule, Schedule
from twinstream.schedule.ops import Copy, Mode
from twinstream.schedule.proof.verify import verify_rank
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.sizes import SizeError
from twinstream.schedule.tensors import HOST, Role
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
    assert sum(role.disk_written_bytes for role in roles.values()) == written_bytes(
        Schedule.of_rank(plan)
    )
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


@pytest.mark.parametrize(
    ("role", "uses", "num_reads"),
    [
        ("parameter", {0: ("update", 0), 2: ("read", 1), 4: ("read", 1)}, 3),
        ("optimizer_state", {0: ("update", 0)}, 1),
        ("activation", {0: ("write", 1), 2: ("read", 1), 4: ("read", 1)}, 2),
        ("activation", {0: ("write", 1), 4: ("read", 1)}, 1),
    ],
)
@pytest.mark.parametrize("overlap", [1.0, 1.25, 2.0])
def test_the_bound_reads_for_each_use_and_writes_each_version_once(
    role: Role, uses: dict[int, tuple[Mode, int]], num_reads: int, overlap: float
) -> None:
    """Where every other task needs all of the device, and the host has no room: exactly."""
    sorts = [
        Sort("x", 8, role, uses),
        Sort("full", 16, "scratch", dict.fromkeys((1, 3, 5), ("scratch", 0))),
    ]
    rates = {"disk_read_bytes_per_s": 1e9, "disk_write_bytes_per_s": 0.5e9}
    drive = rates | {"disk_overlap": overlap, "disk_latency_ns": 0.0}
    machine = override(link_machine(h2d=50.0, d2h=50.0), drive)
    caps = Caps(device_bytes=16 * UNIT_BYTES, host_bytes=0, disk_bytes=2**40)
    bound = lower_bound(build_chain(sorts, (0.5,) * 6), machine, caps)
    read_s, written_s = num_reads * 8 * UNIT_BYTES / 1e9, 8 * UNIT_BYTES / 0.5e9
    assert bound is not None
    assert bound.step_s == pytest.approx(max(read_s, written_s, (read_s + written_s) / overlap))


def test_what_is_written_to_a_drive_has_crossed_the_link_to_the_host() -> None:
    """Once a version, however often it is read: exactly, where that link is the slowest."""
    sorts = [
        Sort("x", 8, "parameter", {0: ("update", 0), 2: ("read", 1), 4: ("read", 1)}),
        Sort("full", 16, "scratch", dict.fromkeys((1, 3, 5), ("scratch", 0))),
    ]
    drive = {"disk_read_bytes_per_s": 1e9, "disk_write_bytes_per_s": 1e9}
    machine = override(
        link_machine(h2d=50.0, d2h=0.1), drive | {"disk_overlap": 1.0, "disk_latency_ns": 0.0}
    )
    caps = Caps(device_bytes=16 * UNIT_BYTES, host_bytes=0, disk_bytes=2**40)
    bound = lower_bound(build_chain(sorts, (0.5,) * 6), machine, caps)
    assert bound is not None
    # out before t1 and in before t2, t4 and t0, beside no task that needs all of the device
    out_s, in_s = 8 * UNIT_BYTES / 0.1e9, 3 * 8 * UNIT_BYTES / 50e9
    assert bound.step_s == pytest.approx(out_s + in_s, abs=6 * 0.5e-3)


@pytest.mark.parametrize("with_disk", [False, True])
def test_no_row_of_the_program_says_nothing(
    with_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a drive there are none about it, and each row holds something back."""
    sorts = [
        Sort("x", 8, "parameter", {0: ("update", 0), 2: ("read", 1), 4: ("read", 1)}),
        Sort("y", 4, "activation", {0: ("write", 1), 3: ("read", 1), 5: ("read", 1)}),
    ]
    view = ChainView(build_chain(sorts, (0.5,) * 6))
    machine = with_drive(link_machine(h2d=50.0, d2h=50.0), "1GB/s,1GB/s")
    rows: list[tuple[Terms, float]] = []
    add = LinearProgram.at_most

    def noted(self: LinearProgram, terms: Terms, right: float) -> int:
        rows.append((terms, right))
        return add(self, terms, right)

    monkeypatch.setattr(LinearProgram, "at_most", noted)
    BoundProgram(view, machine, kind=ProgramKind(with_disk=with_disk))
    assert rows and all(right < 0 or any(c > 0 for _, c in terms) for terms, right in rows)


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
    _, second, third, fourth, *_ = of_rounds(plan, "disk_write")
    assert second == third == fourth != []


def test_activations_that_are_written_in_parts_are_read_behind_all_of_them() -> None:
    """Of a layer's input the norms are final after its hidden state."""
    plan = written_plan(
        "900KiB", "1400KiB", "10MB/s,5MB/s", tokens=128, num_layers=8, chunks=2
    )  # fmt: skip
    parts = {tensor.tensor_id for tensor in plan.tensors if tensor.parent is not None}
    whole = {op.tensor for op in copies_on(plan, "disk_read")}
    in_parts = {op.tensor for op in copies_on(plan, "disk_write")} & parts
    assert any(name.startswith("hidden.") for name in in_parts)
    assert any(name.startswith("input.") for name in whole)
    assert problems(plan) == set()


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
    assert wear_notes(Schedule.of_rank(plan), load_machine("cpu"), 1.0) == []


def test_the_wear_of_a_drive_is_what_it_writes_a_day() -> None:
    plan = written_plan()
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in plan.tensors}
    written = sum(sizes[op.tensor] for op in copies_on(plan, "disk_write"))
    whole = Schedule.of_rank(plan)
    assert written_bytes(whole) == written
    machine = with_endurance(load_machine("cpu"), "2TB")
    step_s = 0.01
    days = 2e12 / (written / step_s * 86_400)
    (told,) = wear_notes(whole, machine, step_s)
    assert f"{written / step_s * 86_400 / 1e12:,.2f} TB a day" in told
    assert f"endurance of 2 TB lasts {days:,.1f} days" in told
    (assumed,) = wear_notes(whole, load_machine("cpu"), 10.0)
    assert "600 TB, assumed" in assumed and "years" in assumed


def test_a_disk_plan_is_found_where_none_was() -> None:
    request = written_request()
    caps = request.caps.model_copy(update={"disk_bytes": None})
    with pytest.raises(Exception, match="does not fit") as refused:
        Planner(steady_state).plan(replace(request, caps=caps), name_caps=False)
    assert "\n" not in str(refused.value)
