"""Plans of tiny chains at many caps, and what tests look for in a plan."""

from collections.abc import Iterator
from functools import cache

from tests.helpers.tiny_chains import tiny_chain
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.infeasible import InfeasiblePlan, Shortage
from twinstream.planner.plan import policies
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.ops import Compute, Copy
from twinstream.simulator.replay import simulate

MACHINE = load_machine("cpu")


def planned(chain: Chain, machine: Machine, caps: Caps, policy: str) -> Schedule:
    """The policy's own answer: `plan_chain` without its proofs and its lower bound."""
    return policies()[policy](chain, machine, caps, lambda found: simulate(found, machine))


def shortage_of(chain: Chain, caps: Caps, policy: str) -> Shortage:
    """What an infeasible plan says."""
    try:
        planned(chain, MACHINE, caps, policy)
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
    """Plenty, less and the smallest device cap, each with plenty and the smallest host cap."""
    smallest = smallest_device_bytes(chain, policy)
    for device_bytes in (None, smallest * 5 // 4, smallest):
        yield Caps(device_bytes=device_bytes)
        if policy != "optimal":  # it is slower, and its smallest caps are those of `streaming`
            least = smallest_host_bytes(chain, policy, device_bytes)
            yield Caps(device_bytes=device_bytes, host_bytes=least)
    least = smallest_host_bytes(chain, policy, smallest)
    yield Caps(device_bytes=smallest, host_bytes=least * 21 // 20)


@cache
def tiny_plans(workload: str, preset: str, policy: str) -> tuple[tuple[Chain, Schedule], ...]:
    """Different plans of a tiny chain, over the lattice of caps."""
    chain = tiny_chain(workload, preset)
    found: dict[tuple[object, ...], Schedule] = {}
    for caps in caps_lattice(chain, policy):
        schedule = planned(chain, MACHINE, caps, policy)
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
