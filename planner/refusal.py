"""What caps would do where `optimal` finds no plan: tried, not guessed."""

from twinstream.planner.infeasible import InfeasiblePlan, Shortage
from twinstream.planner.last_resort import LastResort
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps

_UNIT = 2**20
_MOST_DOUBLINGS = 8
_SMALL_UNIT = 2**8  # for caps under 64 MiB


def refused(
    chain: Chain, caps: Caps, streaming: InfeasiblePlan, resort: LastResort | None
) -> InfeasiblePlan:
    """The error for a chain that does not fit the caps.

    The caps that `streaming` names would do, because its plan is among those tried. Smaller ones
    are searched only where the program finds a plan just below; that takes many plans. A plan with
    any amount of host memory takes what would do, too.

    Args:
        chain: whose task with the most operands is named.
        caps: that do not fit.
        streaming: what it says of the same caps.
        resort: what the program finds within caps; None searches no smaller ones.
    """
    named = streaming.shortage
    device, host = named.smallest_device_bytes, named.smallest_host_bytes
    if resort is not None:
        device = _smallest(caps, "device_bytes", device, resort)
        host = _smallest(caps, "host_bytes", host, resort)
    task = _largest_task(chain)
    if device is None and host is not None and caps.host_bytes is not None:
        return InfeasiblePlan(Shortage("optimal", "host", caps.host_bytes, host, task, None, host))
    have = named.cap_bytes
    needed = device if device is not None else named.needed_bytes
    return InfeasiblePlan(Shortage("optimal", named.cap, have, needed, task, device, host))


def refused_as_fixed(chain: Chain, caps: Caps, resort: LastResort) -> InfeasiblePlan:
    """The error where homes or levels are fixed: only the program says what would do.

    A device cap is doubled until it does; of the host, what a plan takes that may have any amount.
    """
    device = _smallest(caps, "device_bytes", _doubled(caps, resort), resort)
    host = _smallest(caps, "host_bytes", None, resort)
    task = _largest_task(chain)
    if device is None and host is not None:
        return InfeasiblePlan(
            Shortage("optimal", "host", caps.host_bytes or 0, host, task, None, host)
        )
    have = caps.device_bytes or 0
    needed = have if device is None else device
    return InfeasiblePlan(Shortage("optimal", "device", have, needed, task, device, host))


def _doubled(caps: Caps, resort: LastResort) -> int | None:
    """A device cap that would do, the host's as given: as often doubled as it takes."""
    given = caps.device_bytes
    if given is None:
        return None
    for doubled in range(1, _MOST_DOUBLINGS + 1):
        if resort.fits(caps.model_copy(update={"device_bytes": given << doubled})):
            return given << doubled
    return None


def _smallest(caps: Caps, field: str, would_do: int | None, resort: LastResort) -> int | None:
    """The smallest cap that would do, the other as given; None if none is known."""
    given = getattr(caps, field)
    if given is None:
        return None
    taken = resort.host_bytes(caps) if field == "host_bytes" else None
    would_do = min((b for b in (would_do, taken) if b is not None), default=None)
    if would_do is None:
        return None
    unit = _UNIT if would_do >= 64 * _UNIT else _SMALL_UNIT
    high = would_do
    if high - unit <= given or not resort.fits(caps.model_copy(update={field: high - unit})):
        return high
    low, top = given // unit, high // unit
    while top - low > 1:
        middle = (low + top) // 2
        if resort.fits(caps.model_copy(update={field: middle * unit})):
            top = middle
        else:
            low = middle
    return top * unit


def _largest_task(chain: Chain) -> str:
    """The task whose operands take the most bytes."""
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in chain.tensors}
    largest = max(chain.tasks, key=lambda t: sum(sizes[o.tensor] for o in t.operands))
    return largest.task_id
