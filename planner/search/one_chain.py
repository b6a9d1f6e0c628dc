"""Plan a chain as it is: it is not cut further, and all of it is one round."""

from dataclasses import dataclass, field
from itertools import islice

from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.bound.lower_bound import BoundProgram, ProgramKind
from twinstream.planner.bound.relaxation import Relaxation
from twinstream.planner.choices import NO_RECOMPUTE, OPEN, Choices
from twinstream.planner.emit.emission import Emitted
from twinstream.planner.evaluator import Evaluator
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.lifetimes.view import ChainView
from twinstream.planner.limits import LIMITS, SearchLimits
from twinstream.planner.rules.full_recompute import full_recompute_plan
from twinstream.planner.rules.resident import pooled_resident_plan
from twinstream.planner.rules.streaming import streaming_plan
from twinstream.planner.search.cut_planner import CutPlanner
from twinstream.planner.search.cuts import StepCut
from twinstream.planner.search.knobs import Attempt
from twinstream.planner.search.tuning import fastest, tuning_path
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps
from twinstream.schedule.workload import Workload


@dataclass(frozen=True)
class OneChain:
    """The only cut of a chain that is planned as it is, as `CutPlanner` asks for cuts."""

    chain: Chain
    machine: Machine
    caps: Caps
    choices: Choices = OPEN
    limits: SearchLimits = LIMITS
    is_frozen: bool = False
    _view: list[ChainView] = field(default_factory=list)
    _programs: dict[ProgramKind, BoundProgram] = field(default_factory=dict)

    def view(self, workload: Workload, most_rounds: int) -> ChainView:
        """Return the view of the chain, which has one round."""
        if not self._view:
            self._view.append(ChainView(self.chain))
        return self._view[0]

    def program(self, workload: Workload, kind: ProgramKind) -> BoundProgram:
        """Return the program of the chain's bound, or one that guides its plans."""
        if kind not in self._programs:
            view = self.view(workload, 1)
            self._programs[kind] = BoundProgram(view, self.machine, None, kind)
        return self._programs[kind]

    @property
    def _kind(self) -> ProgramKind:
        with_disk = self.caps.disk_bytes is not None
        return ProgramKind(self.choices, self.limits.guide_segments, True, with_disk)

    def bound(self) -> Relaxation | None:
        """Return the lower bound of a pass; None where nothing fits the caps."""
        return self.program(self.chain.workload, self._kind).bound(self.caps)

    def least_bytes(self) -> tuple[float | None, float | None]:
        """Return the least cap of either memory that the program allows, the other as it is."""
        program = self.program(self.chain.workload, self._kind)
        return (
            program.least_cap_bytes(self.caps, "device"),
            program.least_cap_bytes(self.caps, "host"),
        )


def plan_of_chain(source: OneChain, evaluator: Evaluator, most_attempts: int) -> Emitted | None:
    """Return the fastest plan that is found; None where none is.

    Args:
        source: the chain, of one round.
        evaluator: a simulator.
        most_attempts: as many as are simulated.
    """
    homes = set(source.choices.homes.values())
    if source.choices.recompute in (None, NO_RECOMPUTE) and homes <= {"device"}:
        quick = pooled_resident_plan(source.chain, source.machine, source.caps)
        if quick is not None:
            return quick
    bound = source.bound()
    if bound is None:
        return None
    planner = CutPlanner(source, StepCut(source.chain.workload, bound), evaluator)
    # The first attempt goes on solving from the bound.
    tried = [Attempt(source.chain.workload, planner.first_knobs(source.choices, 0), bound)]
    for knobs in islice(tuning_path(planner, tried, None), most_attempts):
        if knobs.rule is full_recompute_plan and not source.chain.recomputes:
            tried.append(Attempt(source.chain.workload, knobs))  # as `resident`, before it
        else:
            tried.append(planner.attempt(knobs, tried, None))
    best = fastest(tried)
    if best is not None and best.simulated is not None:
        return best.simulated.emitted
    try:
        return streaming_plan(source.chain, source.machine, source.caps)
    except InfeasiblePlan:
        return None
