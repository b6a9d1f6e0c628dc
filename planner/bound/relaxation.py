"""An optimum of the bound's linear program: seconds per step, prices, and fractions."""

from dataclasses import dataclass, field

from twinstream.planner.bound.gaps import Element, Gap
from twinstream.planner.bound.program import Basis
from twinstream.schedule.document import StepBound


@dataclass(frozen=True)
class GapFractions:
    """Fractions of one gap's content: kept on the device, and loaded.

    `between_middles`: the gap stands for those between two middle rounds, of more than three.
    """

    element: Element
    gap: Gap
    between_middles: bool
    kept: float
    loaded: float


@dataclass(frozen=True)
class Relaxation:
    """The optimum: seconds per step, what limits it, and the fractions of every gap.

    Solved without a cost for copies, `step_s` is a proven lower bound. Prices are the seconds that
    one more unit saves: a GiB of device or host memory, a GB/s of a link direction. `limits` are
    the resources without which it would take less. Positions in `fractions`, `recomputed` (by
    recompute task) and `interval_ms` (by task, from the start of the recompute before it) are
    segments of tasks. `on_host` has the host's share of each update that is there or may be.
    `basis` is what the solver needs to go on from there.
    """

    step_s: float
    device_s_per_gib: float
    host_s_per_gib: float
    link_s_per_gb_per_s: dict[str, float]
    limits: tuple[str, ...]
    fractions: tuple[GapFractions, ...]
    recomputed: dict[str, float]
    interval_ms: tuple[float, ...]
    segment_of_task: tuple[int, ...]
    basis: Basis | None = field(default=None, compare=False, repr=False)
    on_host: dict[str, float] = field(default_factory=dict)

    def as_step_bound(self, family_step_s: float | None = None) -> StepBound:
        """Return the bound as schedules carry it, with the least one of a family of chains."""
        return StepBound(
            step_s=self.step_s,
            device_s_per_gib=self.device_s_per_gib,
            host_s_per_gib=self.host_s_per_gib,
            link_s_per_gb_per_s=self.link_s_per_gb_per_s,
            limits=self.limits,
            family_step_s=family_step_s,
        )
