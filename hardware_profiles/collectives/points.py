"""Measured collectives: one point each, and what they are called."""

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from twinstream.hardware_profiles.clusters.curves import COLLECTIVES, Collective
from twinstream.hardware_profiles.errors import CollectiveTableError
from twinstream.hardware_profiles.profile_files import Text
from twinstream.schedule.errors import did_you_mean
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import PositiveCount, PositiveSize

_ALSO_CALLED: dict[str, Collective] = {
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
}
_TimeUs = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]


class CollectivePoint(Node):
    """The time of one collective of one size; `in_place_us` where that was measured too.

    `size_bytes` is nccl-tests' size: the larger of what a rank gives and what it receives.
    """

    gpu: str
    collective: Collective
    ranks: PositiveCount
    ranks_per_node: PositiveCount
    dtype: Text | None
    size_bytes: PositiveSize
    time_us: _TimeUs
    in_place_us: _TimeUs | None = None


def collective_named(name: str, where: str) -> Collective:
    """The collective of a name, as nccl-tests calls it too (`alltoall`, `sendrecv`).

    >>> collective_named("AllToAll", "here")
    'all_to_all'

    Raises:
        CollectiveTableError: there is none.
    """
    plain = name.strip().lower().replace("-", "_")
    for known in COLLECTIVES:
        if plain == known:
            return known
    if plain in _ALSO_CALLED:
        return _ALSO_CALLED[plain]
    hint = did_you_mean(plain, COLLECTIVES) or f"known: {', '.join(COLLECTIVES)}"
    raise CollectiveTableError(f"{where}: unknown collective '{name.strip()}': {hint}")


def chosen(points: Iterable[CollectivePoint], gpu: str | None) -> tuple[CollectivePoint, ...]:
    """The points of one kind of GPU; without a name there must be only one.

    Raises:
        CollectiveTableError: there are several, or none of that name.
    """
    points = tuple(points)
    kinds = sorted({point.gpu for point in points})
    if gpu is None and len(kinds) <= 1:
        return points
    found = [kind for kind in kinds if gpu is not None and kind.lower() == gpu.lower()]
    if not found:
        problem = "there are several kinds of GPU" if gpu is None else f"no rows are of '{gpu}'"
        raise CollectiveTableError(
            f'{problem}; say which: --only "gpu_type=...", one of {", ".join(kinds)}'
        )
    return tuple(point for point in points if point.gpu == found[0])
