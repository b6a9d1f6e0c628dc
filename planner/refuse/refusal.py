"""Why there is no plan within the caps: what any needs, and caps that were tried and do."""

from collections.abc import Callable
from math import inf

from twinstream.planner.arena_caps import with_library_memory
from twinstream.planner.bound.lower_bound import ProgramKind, Side
from twinstream.planner.infeasible import InfeasiblePlan, Shortage
from twinstream.planner.lifetimes.rounds import PROGRAM_ROUNDS
from twinstream.planner.search.chunking import of_few_blocks
from twinstream.planner.search.cuts import Cuts
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps
from twinstream.schedule.workload import Workload

_MOST_BLOCKS = 5_000  # of a cut that is tried here
_TRIED = (1.1, 1.25, 1.5, 2.0, 4.0, 8.0)  # x the cap, or x what is needed where that is more


def smallest_workload(cuts: Cuts) -> Workload:
    """The cut that takes the least memory: small rounds, then small chunks."""
    workloads = of_few_blocks(cuts.spec, cuts.workloads, PROGRAM_ROUNDS, _MOST_BLOCKS)
    return min(workloads, key=_size)


def refusal(
    cuts: Cuts, fits: Callable[[Caps], bool], streaming: InfeasiblePlan | None
) -> InfeasiblePlan:
    """The error for a step of which no plan was found.

    Args:
        cuts: of the step, within the caps.
        fits: whether a plan is found within other caps.
        streaming: what the policy of that name says of the same caps, where it may stand in; the
            caps that it names would do.
    """
    caps, least = cuts.caps, smallest_workload(cuts)
    proven = {side: _proven_bytes(cuts, side) for side in ("device", "host")}
    named = None if streaming is None else streaming.shortage
    enough = {
        "device": None if named is None else named.enough_device_bytes,
        "host": None if named is None else named.enough_host_bytes,
    }
    enough = {side: size or _tried(caps, side, proven[side], fits) for side, size in enough.items()}
    short = next((s for s in proven if proven[s] > (_cap(caps, s) or inf)), None)
    short = short or next((s for s in enough if enough[s] is not None), "device")
    chain = cuts.view(least, PROGRAM_ROUNDS).chain
    library = with_library_memory(caps, chain).library_bytes
    needed = {side: None if size == inf else round(size) for side, size in proven.items()}
    return InfeasiblePlan(
        Shortage(
            "optimal", "host" if short == "host" else "device", _cap(caps, short) or 0,
            needed[short] or 0, _largest_task(chain), enough["device"], enough["host"], library,
            proven=(needed["device"], needed["host"]),
        )
    )  # fmt: skip


def unnamed_refusal(cuts: Cuts) -> InfeasiblePlan:
    """The error where nobody asks what would do."""
    have = cuts.caps.device_bytes or 0
    chain = cuts.view(smallest_workload(cuts), PROGRAM_ROUNDS).chain
    return InfeasiblePlan(
        Shortage(
            "optimal", "device", have, have, _largest_task(chain), None, None, proven=(None, None)
        )
    )


def _proven_bytes(cuts: Cuts, side: Side) -> float:
    """What any plan of any cut takes of a memory at least, with the other cap as it is.

    Two rounds take no more than many. Infinite where no size of that memory would do.
    """
    kind = ProgramKind(cuts.choices, cuts.limits.bound_segments)
    least = inf
    for workload in cuts.smallest:
        rounds = min(workload.rounds_per_step, 2)
        two = workload.model_copy(update={"rounds_per_step": rounds})
        found = cuts.program(two, kind).least_cap_bytes(cuts.caps, side)
        least = min(least, inf if found is None else found)
    return least


def _tried(caps: Caps, side: str, needed: float, fits: Callable[[Caps], bool]) -> int | None:
    """A cap within which a plan is found, the other as given; None if none is."""
    given = _cap(caps, side)
    if given is None or needed == inf:
        return None
    for times in _TRIED:
        size = round(times * max(given, needed))
        if fits(caps.model_copy(update={f"{side}_bytes": size})):
            return size
    return None


def _cap(caps: Caps, side: str) -> int | None:
    return caps.device_bytes if side == "device" else caps.host_bytes


def _size(workload: Workload) -> tuple[int, int]:
    """Of a round and a chunk: the smaller, the less memory a step takes."""
    return workload.chunk_tokens * workload.chunks_per_round, workload.chunk_tokens


def _largest_task(chain: Chain) -> str:
    """The task whose operands take the most bytes."""
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in chain.tensors}
    largest = max(chain.tasks, key=lambda t: sum(sizes[o.tensor] for o in t.operands))
    return largest.task_id
