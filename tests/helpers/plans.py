"""Plans of tiny chains at many caps, and what tests look for in a plan."""

from collections.abc import Iterator
from functools import cache

from tests.helpers.planning import plan_chain
from tests.helpers.tiny_chains import tiny_chain
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.infeasible import InfeasiblePlan, Shortage
from twinstream.planner.policies import plan_by_rule
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import Compute, Copy

MACHINE = load_machine("cpu")


def planned(chain: Chain, machine: Machine, caps: Caps, policy: str) -> RankSchedule:
    """A plan; of a rule without the proofs and the lower bound of `plan_chain`."""
    if policy == "optimal":
        return plan_chain(chain, machine, caps, policy)
    return plan_by_rule(chain, machine, caps, policy)


def shortage_of(chain: Chain, caps: Caps, policy: str) -> Shortage:
    """What an infeasible plan says."""
    try:
        planned(chain, MACHINE, caps, policy)
    except InfeasiblePlan as error:
        return error.shortage
    raise AssertionError(f"{caps} is enough for '{policy}'")


def enough_device_bytes(chain: Chain, policy: str, host_bytes: int | None = None) -> int:
    """The smallest cap that does; of `optimal` one that was tried."""
    found = shortage_of(chain, Caps(device_bytes=0, host_bytes=host_bytes), policy)
    assert found.enough_device_bytes is not None
    return found.enough_device_bytes


def enough_host_bytes(chain: Chain, policy: str, device_bytes: int | None = None) -> int:
    found = shortage_of(chain, Caps(device_bytes=device_bytes, host_bytes=0), policy)
    assert found.enough_host_bytes is not None
    return found.enough_host_bytes


def caps_lattice(chain: Chain, policy: str) -> Iterator[Caps]:
    """Plenty, less and the least device cap named, each with plenty and little of the host."""
    smallest = enough_device_bytes(chain, policy)
    for device_bytes in (None, smallest * 5 // 4, smallest):
        yield Caps(device_bytes=device_bytes)
        if policy != "optimal":  # it is slower, and its smallest caps are those of `streaming`
            least = enough_host_bytes(chain, policy, device_bytes)
            yield Caps(device_bytes=device_bytes, host_bytes=least)
    least = enough_host_bytes(chain, policy, smallest)
    yield Caps(device_bytes=smallest, host_bytes=least * 21 // 20)


@cache
def tiny_plans(workload: str, preset: str, policy: str) -> tuple[tuple[Chain, RankSchedule], ...]:
    """Different plans of a tiny chain, over the lattice of caps."""
    chain = tiny_chain(workload, preset)
    found: dict[tuple[object, ...], RankSchedule] = {}
    for caps in caps_lattice(chain, policy):
        schedule = planned(chain, MACHINE, caps, policy)
        assert schedule.caps == caps
        found.setdefault((schedule.ops, schedule.slots), schedule)
    return tuple((chain, schedule) for schedule in found.values())


def recompute_levels(schedule: RankSchedule) -> set[str | None]:
    return {
        op.label.level
        for op in schedule.ops
        if isinstance(op, Compute) and op.label.kind == "block_recompute"
    }


def copied_tensors(schedule: RankSchedule, queue: str) -> list[str]:
    return [op.tensor for op in schedule.ops if isinstance(op, Copy) and op.stream.queue == queue]
