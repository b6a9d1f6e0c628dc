"""Every tuned number of planning, in one place."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchLimits:
    """How much planning tries and when it stops; each number has its unit and its reason.

    What it costs to change each is in docs/benchmarks/quality.md.
    """

    # How a step is cut.
    chunk_tokens: int = 8192  # tokens of the preferred chunk; slices are no smaller than an eighth
    chunks_per_round: int = 8  # chunks that one round has at the most, of short sequences; or as
    flops_per_byte: float = 3600  # many as hide the parameters: 180 TFLOP/s over a link of 50 GB/s
    blocks: int = 20_000  # blocks of the few rounds of a cut that is bounded
    cuts: int = 2  # cuts that are planned
    frozen_cuts: int = 4  # the same with frozen parameters: bounds of many cuts are nearly equal
    near_equal: float = 1.015  # x the bound: what a further cut may gain has to be more
    slow: float = 1.2  # x the tasks alone: from there on smaller chunks are bounded, too

    # The programs.
    bound_segments: int = 450  # tasks are taken together until a bound has no more
    guide_segments: int = 900  # the same, of the program that decides
    copy_cost: float = 0.4  # ms of a step that decisions may lose to save copying a GiB
    least_pressure: float = 0.05  # what a copy costs at least, of what both directions cost

    # Room for copies in flight.
    room_blocks: float = 0.5  # as much as both directions copy beside so many longest tasks
    room_of_device: float = 0.25  # of the device, at the most
    less_room: int = 3  # less room is the room over this
    waits_per_room: float = 0.5  # waits over cost of room, below which less room is tried
    ahead_blocks: float = 4.0  # longest tasks by which a load comes before its use at the most

    # Attempts on one cut.
    turns: int = 3  # in which what was waited for is learned; twice as many while they gain
    near: float = 1.002  # x the bound: nearer than this nothing more is tried
    far: float = 1.04  # x the bound: farther than this more is tried
    behind: float = 1.02  # x the best plan of other cuts: from there on a cut is left
    homes_cost: float = 1.0012  # x the time, that having all state at home may cost
    zeal: float = 1.3  # x what was waited for, that a link gets less
    least_share: float = 0.3  # of a link, however much was waited for

    # The wider search, of short steps of one round.
    short_tasks: int = 320  # tasks of a short step
    wider_tasks: int = 4000  # tasks simulated in all
    wider_rooms: tuple[float, ...] = (1.5, 2.0, 3.0, 4.0)  # x the room before
    wider_shares: tuple[float, ...] = (0.9, 0.8, 0.7, 0.6)  # of both links

    # Fitting both memories.
    tries: int = 8  # times that less is kept, or less of the host used, where something sticks out
    less_kept: float = 0.85  # x what is alive, where nothing else helped
    moves: int = 1000  # of items about the device, and one more for each item
    host_step: float = 0.002  # of the host, that it is used less by where that is short


LIMITS = SearchLimits()
