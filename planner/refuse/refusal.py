"""What caps would do where `optimal` finds no plan: tried, not guessed."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from twinstream.planner.infeasible import InfeasiblePlan, Shortage
from twinstream.planner.library_memory import with_library_memory
from twinstream.planner.refuse.last_resort import LastResort
from twinstream.planner.refuse.roomy import RoomyPlans
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps

_UNIT = 2**20
_MOST_DOUBLINGS = 8
_SMALL_UNIT = 2**8  # for caps under 64 MiB


def refused(
    chain: Chain, caps: Caps, streaming: InfeasiblePlan, resort: LastResort, *, search: bool
) -> InfeasiblePlan:
    """The error for a chain that does not fit the caps.

    The caps that `streaming` names would do, because its plan is among those tried; and so would
    what a plan with little on the host takes of it. Smaller ones, and a device cap where
    `streaming` has none, are searched only if wanted; that takes many plans.

    Args:
        chain: whose task with the most operands is named.
        caps: that do not fit.
        streaming: what it says of the same caps.
        resort: what the program finds within caps.
        search: for smaller caps; of very long chains they are searched anyway.
    """
    named = streaming.shortage
    if resort.roomy is not None and (search or not resort.packs_tight):
        return _refused_roomily(chain, caps, resort, resort.roomy, named)
    device, host = named.smallest_device_bytes, _less(caps, named.smallest_host_bytes, resort)
    if search:
        enough = resort.fits, resort.takes_no_more
        device = _smallest(caps, "device_bytes", device or _doubled(caps, resort), *enough)
        host = _smallest(caps, "host_bytes", host, *enough)
    return _error(chain, caps, device, host, named)


def refused_as_fixed(chain: Chain, caps: Caps, resort: LastResort) -> InfeasiblePlan:
    """The error where homes or levels are fixed: only the program says what would do.

    A device cap is doubled until it does; of the host, what a plan takes that has little there.
    """
    nothing = refused_unnamed(chain, caps).shortage
    if resort.roomy is not None:
        return _refused_roomily(chain, caps, resort, resort.roomy, nothing)
    enough = resort.fits, resort.takes_no_more
    device = _smallest(caps, "device_bytes", _doubled(caps, resort), *enough)
    host = _smallest(caps, "host_bytes", _less(caps, None, resort), *enough)
    return _error(chain, caps, device, host, nothing)


def refused_unnamed(chain: Chain, caps: Caps) -> InfeasiblePlan:
    """The error where nobody asks what would do."""
    have = caps.device_bytes or 0
    return InfeasiblePlan(
        Shortage("optimal", "device", have, have, _largest_task(chain), None, None, smallest=False)
    )


def with_smallest(
    error: InfeasiblePlan, caps: Caps, fits: Callable[[Caps], bool]
) -> InfeasiblePlan:
    """The refusal with the smallest caps that would do, where it names some that do.

    One unit less does not; the unit is that of `_smallest`.

    Args:
        error: of the caps.
        caps: that do not fit.
        fits: whether there is a plan within caps; it is asked about ten to twenty times for each.
    """
    short = error.shortage
    if short.smallest_device_bytes is short.smallest_host_bytes is None:
        return error
    device = _smallest(caps, "device_bytes", short.smallest_device_bytes, fits)
    host = _smallest(caps, "host_bytes", short.smallest_host_bytes, fits)
    needed = device if short.cap == "device" else host
    return InfeasiblePlan(
        replace(
            short, needed_bytes=needed or short.needed_bytes, smallest_device_bytes=device,
            smallest_host_bytes=host, smallest=True,
        )
    )  # fmt: skip


def _refused_roomily(
    chain: Chain, caps: Caps, resort: LastResort, plans: RoomyPlans, known: Shortage
) -> InfeasiblePlan:
    """Of a long chain: caps that would do with some of them to spare."""
    device = plans.smallest(caps, "device_bytes", known.smallest_device_bytes)
    little = _less(caps, known.smallest_host_bytes, resort)
    host = plans.smallest(caps, "host_bytes", little)
    return _error(chain, caps, device, host, known)


def _error(
    chain: Chain, caps: Caps, device: int | None, host: int | None, otherwise: Shortage
) -> InfeasiblePlan:
    """The device is short where more of it would do, else the host; `otherwise` if neither.

    A whole search may fit less.
    """
    task, names = _largest_task(chain), (device, host)
    if device is not None:
        library, have = with_library_memory(caps, chain).library_bytes, caps.device_bytes or 0
        return InfeasiblePlan(
            Shortage("optimal", "device", have, device, task, *names, library, smallest=False)
        )
    if host is not None:
        have = caps.host_bytes or 0
        return InfeasiblePlan(Shortage("optimal", "host", have, host, task, *names, smallest=False))
    return InfeasiblePlan(replace(otherwise, policy="optimal", task=task, smallest=False))


def _less(caps: Caps, host: int | None, resort: LastResort) -> int | None:
    """A host cap that would do, or less if a plan with little on the host takes less."""
    taken = None if caps.host_bytes is None else resort.host_bytes(caps)
    enough = [size for size in (host, taken) if size is not None]
    return min(enough, default=None)


def _doubled(caps: Caps, resort: LastResort) -> int | None:
    """A device cap that would do, the host's as given: as often doubled as it takes."""
    given = caps.device_bytes
    if given is None:
        return None
    for doubled in range(1, _MOST_DOUBLINGS + 1):
        larger = caps.model_copy(update={"device_bytes": given << doubled})
        if resort.takes_no_more(larger) or resort.fits(larger):
            return given << doubled
    return None


def _smallest(
    caps: Caps, field: str, would_do: int | None, *enough: Callable[[Caps], bool]
) -> int | None:
    """The smallest cap that would do, the other as given; None if none is known.

    Of what says whether caps are enough, each only looks below what those before it found.
    """
    given = getattr(caps, field)
    if given is None or would_do is None:
        return None
    unit = _UNIT if would_do >= 64 * _UNIT else _SMALL_UNIT

    def enough_of(size: int, fits: Callable[[Caps], bool]) -> bool:
        return fits(caps.model_copy(update={field: size * unit}))

    low, top = given // unit, -(-would_do // unit)
    for fits in enough:
        top = _first(low, top, partial(enough_of, fits=fits))
    return min(would_do, top * unit)


def _first(low: int, top: int, enough: Callable[[int], bool]) -> int:
    """A size above `low` that is enough, as `top` is, while one below is not."""
    while top - low > 1:
        middle = (low + top) // 2
        if enough(middle):
            top = middle
        else:
            low = middle
    return top


def _largest_task(chain: Chain) -> str:
    """The task whose operands take the most bytes."""
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in chain.tensors}
    largest = max(chain.tasks, key=lambda t: sum(sizes[o.tensor] for o in t.operands))
    return largest.task_id
