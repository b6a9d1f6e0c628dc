"""The knobs that one attempt to plan a cut turns, and what came of the attempt."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.bound.relaxation import Relaxation
from twinstream.planner.choices import Choices
from twinstream.planner.emit.emission import Emitted
from twinstream.planner.pack.packer import Packed
from twinstream.planner.search.congestion import Shares
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps
from twinstream.schedule.timeline import PassSpans
from twinstream.schedule.workload import Workload

Rule = Callable[[Chain, Machine, Caps], Emitted]


@dataclass(frozen=True)
class SimulatedPlan:
    """A schedule of a few rounds, with its simulated times.

    `step_ns` is the time of the whole step, `pass_ns` that of the few rounds, whose steady pass
    has the `spans`.
    """

    emitted: Emitted
    spans: PassSpans
    pass_ns: float
    step_ns: float


@dataclass(frozen=True)
class Knobs:
    """The settings of one attempt to plan a cut.

    Args:
        choices: what is fixed.
        room_bytes: of the device, left for copies in flight.
        shares: of each link, that the program may use beside each task.
        host_bytes: of the host, that the program may use; None: all there is.
        outlasting: whether offloads may outlast the pass, and hold their bytes in the next.
        after: an attempt whose decisions stay, with time for copies as it was simulated.
        rule: plans instead of the program, where everything may fit the device.
    """

    choices: Choices
    room_bytes: int
    shares: Shares
    host_bytes: int | None = None
    outlasting: bool = True
    after: "Attempt | None" = None
    rule: Rule | None = None


@dataclass(frozen=True)
class Attempt:
    """The result of knobs for a cut: its relaxation, how that was packed, and the simulated plan.

    Each is None where what comes before it does not fit; or is `skipped`, where its decisions come
    to more than the best plan of other cuts.
    """

    workload: Workload
    knobs: Knobs
    relaxed: Relaxation | None = None
    packed: Packed | None = None
    simulated: SimulatedPlan | None = None
    skipped: bool = False

    @property
    def step_ns(self) -> float:
        """The time of the step; infinite where there is no plan."""
        return inf if self.simulated is None else self.simulated.step_ns

    @property
    def relaxed_ns(self) -> float:
        """The time of the step by the program's decisions."""
        return inf if self.relaxed is None else self.relaxed.step_s * 1e9
