"""Plans of tiny chains at many caps, and what tests look for in a plan."""

from collections.abc import Iterator
from functools import cache

from tests.helpers.tiny_chains import tiny_chain
from twinstream.hardware_profiles.loader import load_machine
from twinstream.planner.infeasible import InfeasiblePlan, Shortage
from twinstream.planner.plan import plan_chain
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.ops import Compute, Copy

MACHINE = load_machine("cpu")


def shortage_of(chain: Chain, caps: Caps, policy: str) -> Shortage:
    """What an infeasible plan says."""
    try:
        plan_chain(chain, MACHINE, caps, policy)
    except InfeasiblePlan as error:
        return error.shortage
    raise AssertionError(f"{caps} is enough for '{policy}'")


def smallest_device_bytes(chain: Chain, policy: str, host_bytes: int | None = None) -> int:
    found = shortage_of(chain, Caps(device_bytes=0, host_bytes=host_bytes), policy)
    assert found.smallest_device_bytes is not None
    return found.smallest_device_bytes


def smallest_host_bytes(chain: Chain, policy: str, device_bytes: int | None = None) -> int:
    found = shortage_of(chain, Caps(device_bytes=device_bytes, host_bytes=0), policy)
    assert found.smallest_host_bytes is not None
    return found.smallest_host_bytes


def caps_lattice(chain: Chain, policy: str) -> Iterator[Caps]:
    """From the smallest device cap to none, each with host caps from the smallest to none."""
    smallest = smallest_device_bytes(chain, policy)
    for device_bytes in (None, smallest * 2, smallest * 5 // 4, smallest):
        least = smallest_host_bytes(chain, policy, device_bytes)
        for host_bytes in (None, least * 21 // 20, least):
            yield Caps(device_bytes=device_bytes, host_bytes=host_bytes)


@cache
def tiny_plans(workload: str, preset: str, policy: str) -> tuple[tuple[Chain, Schedule], ...]:
    """Different plans of a tiny chain, over the lattice of caps."""
    chain = tiny_chain(workload, preset)
    found: dict[tuple[object, ...], Schedule] = {}
    for caps in caps_lattice(chain, policy):
        schedule = plan_chain(chain, MACHINE, caps, policy)
        assert schedule.caps == caps
        found.setdefault((schedule.ops, schedule.slots), schedule)
    return tuple((chain, schedule) for schedule in found.values())


def recompute_levels(schedule: Schedule) -> set[str | None]:
    return {
        op.label.level
        for op in schedule.ops
        if isinstance(op, Compute) and op.label.kind == "block_recompute"
    }


def copied_tensors(schedule: Schedule, queue: str) -> list[str]:
    return [op.tensor for op in schedule.ops if isinstance(op, Copy) and op.stream.queue == queue]
