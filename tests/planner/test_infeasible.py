"""What a rule that does not fit says is true: the caps it names would do, nothing smaller would."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.plans import (
    MACHINE,
    enough_device_bytes,
    enough_host_bytes,
    planned,
    shortage_of,
)
from tests.helpers.tiny_chains import small, tiny_chain
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.lowering.lower import lower
from twinstream.planner.infeasible import InfeasiblePlan, Shortage
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps
from twinstream.schedule.workload import Workload

POLICIES = ["resident", "streaming"]
RESERVE = 1000


def fits(chain: Chain, policy: str, device_bytes: int | None, host_bytes: int | None) -> bool:
    caps = Caps(
        device_bytes=device_bytes, host_bytes=host_bytes, device_reserve_bytes=RESERVE
    )  # fmt: skip
    try:
        planned(chain, MACHINE, caps, policy)
    except InfeasiblePlan:
        return False
    return True


def check(chain: Chain, policy: str, device_bytes: int, host_bytes: int | None) -> Shortage | None:
    """Whatever these caps give, what it says of other caps holds."""
    caps = Caps(
        device_bytes=device_bytes, host_bytes=host_bytes, device_reserve_bytes=RESERVE
    )  # fmt: skip
    try:
        planned(chain, MACHINE, caps, policy)
        return None
    except InfeasiblePlan as error:
        found = error.shortage
    cap_bytes = {"device": device_bytes, "host": host_bytes}[found.cap]
    assert found.cap_bytes == cap_bytes < found.needed_bytes
    if (device := found.enough_device_bytes) is None:
        assert not fits(chain, policy, None, host_bytes)
    else:
        assert device > device_bytes
        assert fits(chain, policy, device, host_bytes)
        assert not fits(chain, policy, device - 1, host_bytes)
    if (host := found.enough_host_bytes) is None:
        assert host_bytes is None or not fits(chain, policy, device_bytes, None)
    else:
        assert host_bytes is not None and host > host_bytes
        assert fits(chain, policy, device_bytes, host)
        assert not fits(chain, policy, device_bytes, host - 1)
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("workload", "preset"), [("packed", "tiny"), ("sliced", "tiny-qwen3")]
)  # fmt: skip
def test_the_smallest_caps_would_do_and_one_byte_less_would_not(workload, preset, policy):
    chain = tiny_chain(workload, preset)
    least_device = enough_device_bytes(chain, policy)
    least_host = enough_host_bytes(chain, policy)
    short = set()
    for device_bytes in (0, least_device, least_device * 5 // 4, least_device * 3):
        for host_bytes in (None, 0, least_host * 21 // 20):
            if found := check(chain, policy, device_bytes, host_bytes):
                short.add((found.cap, found.enough_device_bytes is None))
    assert short >= {("device", False), ("device", True), ("host", True)}


@st.composite
def small_models(draw) -> tuple[ModelSpec, Workload]:
    spec = small(
        draw(st.sampled_from(["tiny", "tiny-qwen3"])),
        num_layers=draw(st.integers(1, 3)),
        d_ff=draw(st.sampled_from([16, 48, 200])),
        vocab_size=draw(st.sampled_from([16, 100, 700])),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
    )
    slices, tokens = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([8, 24, 64]))
    workload = Workload(
        seq_len=slices * tokens,
        chunk_tokens=tokens,
        chunks_per_round=slices * draw(st.integers(1, 2)),
        rounds_per_step=draw(st.integers(1, 2)),
    )
    return spec, workload


@given(small_models(), st.sampled_from(POLICIES), st.floats(0, 3), st.floats(0, 2))
@settings(max_examples=15)
def test_whatever_the_model_and_the_caps_the_advice_holds(model, policy, device, host):
    chain = lower(*model)
    device_bytes = int(device * enough_device_bytes(chain, policy))
    check(chain, policy, device_bytes, int(host * enough_host_bytes(chain, policy)))


def test_the_message_names_cap_bytes_task_and_flags():
    chain = tiny_chain("packed")
    with pytest.raises(InfeasiblePlan) as raised:
        planned(chain, MACHINE, Caps(device_bytes=2**16), "resident")
    found, message = raised.value.shortage, str(raised.value)
    assert found.cap == "device"
    needed = f"{found.needed_bytes / 2**10:.2f} KiB of device memory"
    assert f"policy 'resident' needs {needed}" in message
    assert f"{found.needed_bytes - 2**16:,} bytes" in message
    assert re.search(r"at task 'r[01]\.\w+\.[\d.]+'", message)
    assert f"'{found.task}'" in message
    assert "more than --device-mem 64.00 KiB allows" in message
    mib = next(n for n in range(10**6) if n * 2**20 >= found.needed_bytes)
    assert message.endswith(f"What would do: --device-mem {mib}MiB.")


GIB = 2**30


@pytest.mark.parametrize(
    ("device", "host", "told"),
    [
        (20 * GIB + 1, 60 * GIB, "--device-mem 20.01GiB or --host-mem 60.00GiB."),
        (None, 600 * GIB, "a machine with 600.000 GiB of host memory (this one has 512.000 GiB)."),
        (90 * GIB, 60 * GIB, "--host-mem 60.00GiB or a machine with 90.000 GiB of device memory"),
    ],
)
def test_only_caps_that_the_machine_has_are_recommended(device, host, told):
    short = Shortage("streaming", "device", 1, 2, "a task", device, host)
    assert f"What would do: {told}" in str(InfeasiblePlan(short).on(80 * GIB, 512 * GIB, ()))


def test_the_message_of_a_short_host_names_both_ways_out():
    chain = tiny_chain("packed")
    least = enough_device_bytes(chain, "streaming")
    host = enough_host_bytes(chain, "streaming", least)
    with pytest.raises(InfeasiblePlan) as raised:
        planned(chain, MACHINE, Caps(device_bytes=least, host_bytes=host - 1), "streaming")
    found, message = raised.value.shortage, str(raised.value)
    assert (found.cap, found.needed_bytes, found.cap_bytes) == ("host", host, host - 1)
    assert "of host memory" in message
    assert "1 bytes" in message
    assert "--host-mem" in message
    assert found.enough_device_bytes is not None
    assert "--device-mem" in message


def test_where_no_single_cap_would_do_the_message_says_so():
    found = shortage_of(tiny_chain("packed"), Caps(device_bytes=0, host_bytes=0), "streaming")
    assert found.enough_device_bytes is found.enough_host_bytes is None
    assert "No larger cap on one side alone would do: raise both" in str(InfeasiblePlan(found))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_task_of_a_short_device_is_where_most_bytes_are_alive(policy):
    """With a large vocabulary the head: its parameter, its gradient and its logits at once."""
    chain = tiny_chain("one chunk", vocab_size=50_000)
    assert shortage_of(chain, Caps(device_bytes=0), policy).task == "r0.head_loss.0"


@pytest.mark.parametrize("policy", POLICIES)
def test_more_memory_never_makes_a_plan_infeasible(policy):
    chain = tiny_chain("sliced", "tiny-qwen3")
    device_bytes = enough_device_bytes(chain, policy)
    host_bytes = enough_host_bytes(chain, policy, device_bytes + RESERVE)
    for more in range(0, 200_000, 24_999):
        assert fits(chain, policy, device_bytes + RESERVE + more, host_bytes)
        assert fits(chain, policy, device_bytes + RESERVE, host_bytes + more)
