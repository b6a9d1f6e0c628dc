"""Every tuned number of the search, in one place."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchLimits:
    """What the search tries, and when it stops; each with its unit.

    The evidence beside each is from `python -m benchmarks.quality.limits`.
    """

    # How a step is cut.
    chunk_tokens: int = 8192  # tokens of the preferred chunk
    slice_tokens: int = 1024  # tokens of the smallest slice of a sequence
    chunks_per_round: int = 8  # chunks that one round has at the most, of short sequences
    blocks: int = 20_000  # blocks of the few rounds of a cut that is bounded
    cuts: int = 2  # cuts that are planned
    worth_a_plan: float = 1.004  # x the bound of a cut that is planned, below the best plan
    long_tasks: int = 1500  # tasks; longer chains take minutes
    worth_a_long_plan: float = 1.04  # the same, of a longer chain
    slow: float = 1.2  # x the tasks alone: from there on smaller chunks are bounded, too

    # The programs: tasks are taken together until they have no more segments.
    rough_segments: int = 300  # of the first bound of a cut
    bound_segments: int = 450  # of the bound that is stated
    guide_segments: int = 900  # of the program that decides

    # Room for copies in flight.
    room_blocks: float = 0.5  # what both directions copy beside so many of the longest tasks
    room_share: float = 0.25  # of the device, at the most
    room_units: int = 3  # of the largest activations, at the most
    less_room: int = 3  # less room is the room over this
    ahead_blocks: float = 4.0  # longest tasks by which a load comes before its use at the most

    # Turns of deciding again after a simulation.
    turns: int = 3  # of a cut; twice as many while they gain and are far
    near: float = 1.002  # x the bound: nearer than this nothing more is tried
    far: float = 1.04  # x the bound: farther than this, more is tried
    behind: float = 1.02  # x the best plan of other cuts: from there on a cut is left
    gain: float = 0.998  # x the time before, that a turn has to come to
    homes_cost: float = 1.0012  # x the time, that having all state at home may cost
    waits_per_room: float = 0.5  # waits over cost of room, below which less room is tried
    zeal: float = 1.3  # x what was waited for, that a link gets less
    least_share: float = 0.3  # of a link, however much was waited for

    # The wider search, of short steps of one round.
    short_tasks: int = 320  # tasks of a short step
    wider_tasks: int = 4000  # tasks judged in all
    wider_rooms: tuple[float, ...] = (1.5, 2.0, 3.0, 4.0)  # x the room before
    wider_shares: tuple[float, ...] = (0.9, 0.8, 0.7, 0.6)  # of both links

    # Packing.
    repairs: int = 8  # times that less is kept where something sticks out
    less_kept: float = 0.85  # x what is alive, when nothing else helped
    steps_per_item: int = 20  # of moving items about, and 1000 at the most

    # Host memory.
    host_tries: int = 5  # programs with ever less of the host


LIMITS = SearchLimits()
