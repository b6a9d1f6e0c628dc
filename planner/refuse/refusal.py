"""Why there is no plan within the caps: the least that any plan needs, and caps that were tried and
do.
"""

from collections.abc import Callable, Mapping
from math import inf

from twinstream.planner.arena_caps import with_library_memory
from twinstream.planner.bound.lower_bound import Side
from twinstream.planner.infeasible import InfeasiblePlan, Shortage
from twinstream.planner.lifetimes.rounds import PROGRAM_ROUNDS
from twinstream.planner.search.chunking import with_few_blocks
from twinstream.planner.search.cuts import Cuts
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps
from twinstream.schedule.workload import Workload

_MOST_BLOCKS = 5_000  # of a cut that is tried here
_SIDES: tuple[Side, ...] = ("device", "host")
_LITTLE_MORE = 1.25  # x the least memory of any cut: others of fewer blocks are sooner tried
_TRIED = (1.25, 1.5, 2.0, 3.0, 8.0)  # x the cap, or x what is needed where that is more


def smallest_workload(cuts: Cuts) -> Workload:
    """Return the cut that takes the least memory: small rounds, then small chunks."""
    workloads = with_few_blocks(cuts.spec, cuts.workloads, PROGRAM_ROUNDS, _MOST_BLOCKS)
    return min(workloads, key=_size)


def refusal(cuts: Cuts, fits: Callable[[Workload, Caps], bool]) -> InfeasiblePlan:
    """Return the error of a step for which no plan was found.

    Args:
        cuts: of the step, within the caps.
        fits: whether decisions of a cut are found that fit other caps.
    """
    caps, proven, enough = cuts.caps, dict.fromkeys(_SIDES, inf), dict[Side, int | None]()
    for side in _SIDES:
        needs = {cut: _needed_bytes(cuts, cut, side) for cut in cuts.smallest}
        proven[side] = min(needs.values())
        enough[side] = _tried(caps, side, needs, fits)
    caps_now = {side: _cap(caps, side) for side in _SIDES}
    too_small = [s for s, cap in caps_now.items() if cap is not None and proven[s] > cap]
    short = [*too_small, *(side for side in _SIDES if enough[side] is not None), "device"][0]
    chain = cuts.view(smallest_workload(cuts), PROGRAM_ROUNDS).chain
    library = with_library_memory(caps, chain).library_bytes
    needed = {side: None if size == inf else round(size) for side, size in proven.items()}
    return InfeasiblePlan(
        Shortage(
            "optimal", short, _cap(caps, short) or 0, needed[short] or 0, _largest_task(chain),
            enough["device"], enough["host"], library,
            proven=(needed["device"], needed["host"]),
            other_cap_bytes=_cap(caps, "host" if short == "device" else "device"),
        )
    )  # fmt: skip


def unnamed_refusal(cuts: Cuts) -> InfeasiblePlan:
    """The error where nobody asks what would do."""
    have = cuts.caps.device_bytes or 0
    chain = cuts.view(smallest_workload(cuts), PROGRAM_ROUNDS).chain
    return InfeasiblePlan(
        Shortage(
            "optimal",
            "device",
            have,
            have,
            _largest_task(chain),
            None,
            None,
            proven=(None, None),
            other_cap_bytes=cuts.caps.host_bytes,
        )
    )


def _needed_bytes(cuts: Cuts, cut: Workload, side: Side) -> float:
    """Return what any plan of a cut needs of a memory at least, with the other cap as it is.

    Two rounds take no more than many. Infinite where no size of that memory would do.
    """
    kind = cuts.kind(cuts.limits.bound_segments)
    two = cut.model_copy(update={"rounds_per_step": min(cut.rounds_per_step, 2)})
    found = cuts.program(two, kind).least_cap_bytes(cuts.caps, side)
    return inf if found is None else found


def _tried(
    caps: Caps,
    side: Side,
    needs: Mapping[Workload, float],
    fits: Callable[[Workload, Caps], bool],
) -> int | None:
    """Return a cap that a cut was found to fit, the other as given; None if none was.

    Of the cuts that need hardly more than the least, that of the fewest blocks is tried.
    """
    given, needed = _cap(caps, side), min(needs.values())
    if given is None or needed == inf:
        return None
    easiest = sorted(needs, key=lambda cut: (cut.chunks_per_round, -cut.chunk_tokens))
    most = _LITTLE_MORE * max(given, needed)
    cut = next(cut for cut in easiest if needs[cut] <= most)
    for times in _TRIED:
        size = round(times * max(given, needed))
        if fits(cut, caps.model_copy(update={f"{side}_bytes": size})):
            return size
    return None


def _cap(caps: Caps, side: str) -> int | None:
    return caps.device_bytes if side == "device" else caps.host_bytes


def _size(workload: Workload) -> tuple[int, int]:
    """Return the sizes of a round and a chunk: the smaller, the less memory a step takes."""
    return workload.chunk_tokens * workload.chunks_per_round, workload.chunk_tokens


def _largest_task(chain: Chain) -> str:
    """Return the task whose operands take the most bytes."""
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in chain.tensors}
    largest = max(chain.tasks, key=lambda t: sum(sizes[o.tensor] for o in t.operands))
    return largest.task_id
