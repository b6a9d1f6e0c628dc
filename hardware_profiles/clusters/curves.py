"""Measured times of a collective over sizes: the least of a few lines, or a table."""

from bisect import bisect_right
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from twinstream.hardware_profiles.profile_files import Text
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import PositiveCount

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send_recv"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
Sums = Literal["rank_order", "library"]
MOST_LINES = 3

_NotNegative = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]
Pair = tuple[_NotNegative, _NotNegative]


class CollectiveCurve(Node):
    """Nanoseconds of one collective over bytes, for one number of ranks and their placement.

    `lines`: pairs of alpha (ns) and beta (ns per byte); the time is the least of
    alpha + beta x bytes. `points`: pairs of bytes and ns, ascending; between two of them the time
    is on the line through both (an alpha-beta line again; straight in log-log would err by up to
    a quarter where latency hands over to bandwidth, docs/benchmarks/clusters.md). Below the first
    point it is the first's, beyond the last it goes on at the last's bytes per ns.

    Bytes are nccl-tests' size: the larger of what a rank gives and what it receives.
    `ranks_per_node` equal to `ranks` means within one node. A curve without a dtype is of any.
    `sums`: whether a transport's own sums were measured, or those that twinstream makes in an order
    of ranks or of pairs; a curve without is of both.
    """

    collective: Collective
    ranks: Annotated[int, Field(ge=2, le=2**20)]
    ranks_per_node: PositiveCount
    dtype: Text | None = None
    sums: Sums | None = None
    lines: Annotated[tuple[Pair, ...], Field(max_length=MOST_LINES)] = ()
    points: tuple[tuple[_Positive, _Positive], ...] = ()
    least_bytes: PositiveCount
    most_bytes: PositiveCount
    kind: Literal["measured", "fitted", "assumed", "hypothetical"]
    source: Text

    @model_validator(mode="after")
    def _is_one_form(self) -> Self:
        if bool(self.lines) == bool(self.points):
            raise PydanticCustomError("curve_form", "a curve has either lines or points")
        sizes = [size for size, _ in self.points]
        if sizes != sorted(set(sizes)):
            raise PydanticCustomError("curve_order", "the bytes of points must ascend")
        if any(alpha == beta == 0 for alpha, beta in self.lines):
            raise PydanticCustomError("line_of_nothing", "a line of 0 and 0 takes no time at all")
        if self.ranks % self.ranks_per_node or self.least_bytes > self.most_bytes:
            raise PydanticCustomError(
                "curve_range", "ranks must be whole nodes, least_bytes at most most_bytes"
            )
        return self

    @property
    def key(self) -> tuple[str, int, int, str, str]:
        """What a profile has one curve of: collective, ranks, ranks per node, dtype, sums."""
        return self.collective, self.ranks, self.ranks_per_node, self.dtype or "", self.sums or ""

    @property
    def within_a_node(self) -> bool:
        return self.ranks == self.ranks_per_node

    @property
    def form(self) -> str:
        """`table`, or how many lines."""
        return "table" if self.points else f"{len(self.lines)} line{'s' * (len(self.lines) > 1)}"

    def covers(self, size_bytes: int) -> bool:
        """Return whether the size is within what was measured."""
        return self.least_bytes <= size_bytes <= self.most_bytes

    def time_ns(self, size_bytes: float) -> float:
        """The time of so many bytes; beyond the measured range as the class says.

        >>> curve = CollectiveCurve(collective="all_reduce", ranks=8, ranks_per_node=8,
        ...     lines=((10.0, 2.0), (100.0, 1.0)), least_bytes=1, most_bytes=1000,
        ...     kind="assumed", source="an example")
        >>> curve.time_ns(20), curve.time_ns(200)
        (50.0, 300.0)
        """
        if self.lines:
            return min(alpha + beta * size_bytes for alpha, beta in self.lines)
        return interpolated(self.points, size_bytes)


def interpolated(points: tuple[tuple[float, float], ...], size_bytes: float) -> float:
    """Nanoseconds at a size, on the line through the two points around it."""
    sizes = [size for size, _ in points]
    after = bisect_right(sizes, size_bytes)
    if after == 0:
        return points[0][1]
    if after == len(points):
        return points[-1][1] * size_bytes / points[-1][0]
    (low, low_ns), (high, high_ns) = points[after - 1], points[after]
    return low_ns + (high_ns - low_ns) * (size_bytes - low) / (high - low)
