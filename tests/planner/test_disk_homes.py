"""Plans whose frozen base is in part at home on a disk: proven, bounded, and as if there were none
where all has room."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.helpers.disk_plans import (
    disk_plan,
    disk_request,
    machine_with_disk,
    of_rounds,
    without_disk,
)
from tests.helpers.schedule_oracle import problems
from twinstream.hardware_profiles.cost import cost_alone_ns
from twinstream.hardware_profiles.errors import MissingNumberError
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.recipes.recipe import KernelChoice, Recipe
from twinstream.planner.choices import ChoiceError
from twinstream.planner.evaluate.evaluation import evaluation_of
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.planner import Planner
from twinstream.planner.request import caps_of, with_drive
from twinstream.schedule.derived.flush import flush_of
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Copy
from twinstream.schedule.proof.verify import verify_rank
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.sizes import SizeError
from twinstream.schedule.tensors import DISK, HOST
from twinstream.simulator.replay import steady_state


def reads_of(plan: RankSchedule) -> list[Copy]:
    return [op for op in plan.ops if isinstance(op, Copy) and op.stream.queue == "disk_read"]


@pytest.mark.parametrize(
    ("device_mem", "host_mem"), [("500KiB", "300KiB"), ("700KiB", "500KiB"), ("1MiB", "300KiB")]
)
def test_what_has_no_room_on_the_host_is_read_from_the_disk(device_mem: str, host_mem: str) -> None:
    request = disk_request(device_mem, host_mem)
    plan = disk_plan(device_mem, host_mem)
    assert problems(plan) == set()
    assert arena_bytes(plan, HOST) <= request.caps.host_bytes
    on_disk = {c.tensor for c in plan.carried if c.slot.startswith("disk.")}
    assert on_disk and all(name.startswith("param.") and "lora" not in name for name in on_disk)
    carried_by_host = {c.tensor for c in plan.carried if c.slot.startswith("host.")}
    assert not on_disk & carried_by_host
    # each read is followed by the copy of the same bytes to the device
    copied = Counter(op.source for op in plan.ops if isinstance(op, Copy))
    assert all(copied[read.destination] for read in reads_of(plan))
    assert {read.tensor for read in reads_of(plan)} <= on_disk
    assert plan.bound is not None
    assert steady_state(plan, request.machine).step_ns >= plan.bound.step_s * 1e9


def test_reads_go_ahead_of_their_copies_by_the_slots_of_the_ring() -> None:
    """A read is issued right behind the copy that empties its slot, two loads before its own."""
    plan = disk_plan()
    position = {op.op_id: at for at, op in enumerate(plan.ops)}
    read_slots = {read.destination for read in reads_of(plan)}
    copies = [op for op in plan.ops if isinstance(op, Copy) and op.source in read_slots]
    ahead = [
        sum(position[read.op_id] < position[copy.op_id] for read in reads_of(plan)) - done
        for done, copy in enumerate(copies)
    ]
    assert max(ahead) == 2 and ahead.count(2) > len(ahead) / 2


def test_with_room_for_all_nothing_is_read() -> None:
    request = disk_request(host_mem="2MiB")
    planner = Planner(steady_state)
    with_disk, without = (planner.plan(one).only for one in (request, without_disk(request)))
    assert not reads_of(with_disk)
    times = [steady_state(plan, request.machine).step_ns for plan in (with_disk, without)]
    assert times[0] <= 1.01 * times[1]


def test_a_disk_plans_what_is_refused_without() -> None:
    request = disk_request("500KiB", "300KiB")
    assert reads_of(Planner(steady_state).plan(request).only)
    with pytest.raises(InfeasiblePlan) as refused:
        Planner(steady_state).plan(without_disk(request))
    assert "--disk-mem 1TB, of a run --disk PATH" in str(refused.value)
    assert refused.value.shortage.drive == "read"


def test_the_bound_with_a_disk_is_between_no_host_limit_and_the_drives_time() -> None:
    """By arithmetic: a step is no shorter than what it must read at the drive's rate, and with a
    drive as fast as can be as long as with all of the host."""
    slow, fast = (disk_plan("500KiB", "300KiB", rate, chunk_tokens=32) for rate in (2e5, 1e12))
    roomy = disk_plan("500KiB", "2MiB", chunk_tokens=32)
    assert slow.bound is not None and fast.bound is not None and roomy.bound is not None
    assert fast.bound.step_s == pytest.approx(roomy.bound.step_s, rel=1e-6)
    assert slow.bound.step_s > 1.5 * fast.bound.step_s
    assert "disk" in slow.bound.limits and slow.bound.link_s_per_gb_per_s["disk"] > 0
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in slow.tensors}
    read_s = sum(sizes[read.tensor] for read in reads_of(slow)) / 2e5
    assert steady_state(slow, machine_with_disk(2e5)).step_ns >= read_s * 1e9
    assert slow.bound.step_s < read_s  # the bound moves fractions, and reads no more than it must


def test_the_price_of_the_drive_is_what_a_faster_one_saves() -> None:
    slow = disk_plan("500KiB", "300KiB", 2.0e5, chunk_tokens=32)
    faster = disk_plan("500KiB", "300KiB", 2.02e5, chunk_tokens=32)
    assert slow.bound is not None and faster.bound is not None
    saved_s = slow.bound.step_s - faster.bound.step_s
    assert saved_s == pytest.approx(slow.bound.link_s_per_gb_per_s["disk"] * 2e-6, rel=0.1)


def test_many_rounds_take_turns_in_the_same_slots() -> None:
    plan = disk_plan("500KiB", tokens=384, chunk_tokens=64)
    rounds = plan.workload.rounds_per_step
    assert rounds > 4 and reads_of(plan)
    assert verify_rank(plan) == []
    _, second, third, fourth, *_ = of_rounds(plan, "disk_read")
    assert second == third == fourth != []


def test_a_flush_and_an_evaluation_bring_back_what_only_a_disk_has() -> None:
    """A pass that begins with updates leaves the first layers on the device; both overwrite them,
    and a disk has no link to there."""
    request = disk_request("500KiB", "300KiB")
    recipe = request.step.recipe.model_copy(
        update={"clips": True, "optimizer": "device_before_next_use"}
    )
    request = replace(request, step=replace(request.step, recipe=recipe))
    plan = Planner(steady_state).plan(request, name_caps=False).only
    flush, evaluation = flush_of(plan), evaluation_of(plan)
    assert flush is not None
    for derived in (flush, evaluation):
        assert verify_rank(derived) == []
        restored = [op for op in derived.ops if op.op_id.startswith("restore.param.embedding")]
        assert [op.stream.queue for op in restored] == ["disk_read", "h2d"]


def test_a_disk_that_is_too_small_is_no_help() -> None:
    request = disk_request("500KiB", "300KiB", disk_mem="4KiB")
    with pytest.raises(InfeasiblePlan):
        Planner(steady_state).plan(request, name_caps=False)
    plan = Planner(steady_state).plan(disk_request("500KiB", "300KiB")).only
    assert arena_bytes(plan, DISK) <= 2**30


def test_where_a_disk_is_of_no_use_is_said() -> None:
    request = disk_request()
    full = replace(request, step=replace(request.step, recipe=Recipe(kernels=KernelChoice())))
    for wrong, why in (
        (full, "all are trained"),
        (replace(request, policy="streaming"), "policy 'streaming'"),
        (replace(request, machine=load_machine("gb10")), "one memory"),
    ):
        with pytest.raises(ChoiceError, match=why):
            wrong.allowed()
    lacking = replace(request, machine=load_machine("cpu"))
    with pytest.raises(MissingNumberError, match="disk_read_bytes_per_s"):
        Planner(steady_state).plan(lacking)


def test_a_drive_is_given_by_its_rate() -> None:
    machine = with_drive(load_machine("rtx4090"), "7GB/s")
    assert machine.number("disk_read_bytes_per_s") == 7e9
    assert machine.number("disk_latency_ns") == 1e5
    assert caps_of(machine, None, None, disk_mem="2TB").disk_bytes == 2 * 10**12
    assert caps_of(machine, None, None).disk_bytes is None
    assert cost_alone_ns((), machine) == 0.0
    with pytest.raises(SizeError, match="fast"):
        with_drive(machine, "fast")
