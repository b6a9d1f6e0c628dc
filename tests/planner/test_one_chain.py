"""A chain that is planned as it is, whatever made it."""

import pytest

from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import tiny_chain
from twinstream.planner.search.one_chain import OneChain, plan_of_chain
from twinstream.schedule.document import Caps
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.verify import verify_rank
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, HOST
from twinstream.simulator.replay import simulate_rank, steady_state

CHAIN = tiny_chain("one chunk", num_layers=4)
ALL_BYTES = 2**30


def source(device_bytes: int, host_bytes: int = ALL_BYTES) -> OneChain:
    return OneChain(CHAIN, MACHINE, Caps(device_bytes=device_bytes, host_bytes=host_bytes))


def least_bytes() -> int:
    device, _ = source(ALL_BYTES).least_bytes()
    assert device is not None
    return round(device)


@pytest.mark.parametrize("share", [1.2, 1.6, 2.5])
def test_a_plan_is_safe_conforms_and_is_no_faster_than_the_bound(share):
    asked = source(round(share * least_bytes()))
    made = plan_of_chain(asked, steady_state, 4)
    assert made is not None
    assert verify_rank(made.schedule) == []
    assert conforms(made.schedule, CHAIN) == []
    assert arena_bytes(made.schedule, DEVICE) <= asked.caps.device_bytes
    bound = asked.bound()
    assert bound is not None
    assert simulate_rank(made.schedule, MACHINE).step_ns >= bound.step_s * 1e9


def test_with_all_the_memory_nothing_but_inputs_and_losses_has_a_home_on_the_host():
    made = plan_of_chain(source(ALL_BYTES), steady_state, 4)
    assert made is not None
    small = sum(t.size_bytes + 256 for t in CHAIN.tensors if t.role in ("input", "loss"))
    assert arena_bytes(made.schedule, HOST) <= small


def test_below_the_least_bytes_there_is_no_plan():
    least = least_bytes()
    assert source(least - 1024).bound() is None
    assert plan_of_chain(source(least - 1024), steady_state, 4) is None
    assert source(least + 1024).bound() is not None


def test_the_least_host_memory_is_what_the_device_does_not_hold():
    device = round(1.2 * least_bytes())
    _, host = source(device).least_bytes()
    assert host is not None
    assert source(device, round(host) + 1024).bound() is not None
    assert source(device, round(host) - 1024).bound() is None
