"""One memory of CPU and GPU: a plan has a tensor in it once, and moves nothing out of it."""

import pytest

from twinstream.hardware_profiles.loader import load_machine
from twinstream.planner.planner import Planner
from twinstream.planner.request import PlanRequest, TrainingStep, caps_of
from twinstream.schedule.ops import Compute, Copy
from twinstream.schedule.sizes import SizeError
from twinstream.simulator.replay import steady_state

GIB = 2**30


@pytest.mark.parametrize("name", ["gb10", "strix_halo"])
def test_both_caps_are_of_one_memory(name: str) -> None:
    machine = load_machine(name)
    pool = machine.pool_bytes
    assert pool is not None
    caps = caps_of(machine, None, None)
    assert caps.device_bytes is not None and caps.host_bytes is not None
    assert caps.device_bytes + caps.host_bytes == int(0.8 * pool)
    assert caps.host_bytes == 256 * 2**20
    assert caps_of(machine, "110GiB", "1GiB").device_bytes == 110 * GIB
    with pytest.raises(SizeError, match="one memory"):
        caps_of(machine, "110GiB", "20GiB")
    with pytest.raises(SizeError, match="more than"):
        caps_of(machine, "200GiB", None)


def test_a_plan_within_one_memory_copies_nothing_but_its_inputs() -> None:
    """At a tenth of it, too: there it computes again, since to move away would free nothing."""
    request = PlanRequest.of(
        "1b", "gb10", step=TrainingStep(seq_len=2048, tokens_per_step=65_536), device_mem="15GiB"
    )
    schedule = Planner(steady_state).plan(request)
    tensors = {tensor.tensor_id: tensor for tensor in schedule.tensors}
    copied = {tensors[op.tensor].role for op in schedule.ops if isinstance(op, Copy)}
    assert copied <= {"input", "loss"}
    levels = {op.label.level for op in schedule.ops if isinstance(op, Compute)}
    assert levels - {None}, "it computes some of it again"
