"""`streaming`: all state has its home on the host, and windows of it are on the device."""

from bisect import bisect_left
from dataclasses import dataclass
from functools import partial

from twinstream.hardware_profiles.cost import copy_alone_ns, cost_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.arena_caps import with_library_memory
from twinstream.planner.emit.emission import Emitted, emitted
from twinstream.planner.emit.unrolling import repeated
from twinstream.planner.infeasible import InfeasiblePlan, Shortage
from twinstream.planner.lifetimes.live_bytes import live_peak
from twinstream.planner.lifetimes.recomputes import with_recomputes
from twinstream.planner.lifetimes.residencies import (
    Margins,
    TaskClock,
    residency_intervals,
    streaming_residencies,
)
from twinstream.planner.lifetimes.uses import Unit, UnitMap, uses_by_unit
from twinstream.planner.pack.placement import Placement
from twinstream.planner.rules.fitting import RulePlacement
from twinstream.planner.rules.levels import LevelChoice, saved_blocks
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, RankSchedule

_MARGINS_IN_BLOCKS = (2.0, 1.0, 0.5, 0.0)


@dataclass(frozen=True)
class _Windows:
    """What sizes the windows on the device.

    Saved activations of a block stay when backward comes within `activation_gap_ns` (last in,
    first kept), everything else over gaps up to `state_gap_ns`. Loads are issued `margin_ns` of
    compute ahead, and offloads get as long before their bytes go to others.
    """

    activation_gap_ns: float = 0.0
    state_gap_ns: float = 0.0
    margin_ns: float = 0.0


@dataclass(frozen=True)
class _Candidate:
    """`device_bytes` is the packed extent; before packing, the live peak, hardly ever more."""

    placement: Placement
    device_bytes: int
    host_bytes: int


def plan_streaming(chain: Chain, machine: Machine, caps: Caps) -> RankSchedule:
    """Stream parameters, gradients, optimizer state and saved activations through the device.

    Every unit of state has its home in host memory. It is fetched ahead of its use in order of
    need, and written back as soon as it is final. What is used again soon stays: the windows grow
    until the device cap is reached. Saved activations that leave the device are offloaded at the
    highest level whose copies hide under the block's forward, lowered from the first layer on
    until the host cap holds; the rest is recomputed.

    Raises:
        InfeasiblePlan: no window sizes satisfy both caps.
    """
    return repeated(partial(streaming_plan, machine=machine, caps=caps), chain)


def streaming_plan(chain: Chain, machine: Machine, caps: Caps) -> Emitted:
    """Plan a few rounds as `plan_streaming` does; it raises the same."""
    return emitted(_streaming_placement(chain, machine, caps), machine, caps, "streaming")


def _streaming_placement(chain: Chain, machine: Machine, caps: Caps) -> Placement:
    planner = _StreamingPlanner(chain, machine, caps)
    gap_ns = planner.smallest_activation_gap_ns()
    for blocks in _MARGINS_IN_BLOCKS:
        windows = _Windows(activation_gap_ns=gap_ns, margin_ns=blocks * planner.block_ns)
        candidate = planner.candidate(windows)
        if planner.fits(candidate):
            return planner.grown(candidate, windows).placement
    return planner.packed_bare(gap_ns).placement


class _StreamingPlanner:
    def __init__(self, chain: Chain, machine: Machine, caps: Caps) -> None:
        self.chain, self.machine = chain, machine
        self.caps = with_library_memory(caps, chain)
        self.units = UnitMap(chain)
        # In whole ns the same span of every round is equally long, to the last bit.
        self.call_ns = {
            name: round(cost_alone_ns(call.cost, machine)) for name, call in chain.calls.items()
        }
        self.blocks = saved_blocks(chain, self.units, self.call_ns)
        self.gaps_ns = sorted({-1.0, *(block.gap_ns for block in self.blocks)})
        self.block_ns = max((block.forward_ns for block in self.blocks), default=0.0)
        self._bare: dict[float, _Candidate] = {}
        self._packed_bare: dict[float, _Candidate] = {}

    def candidate(self, windows: _Windows) -> _Candidate:
        choice = LevelChoice(self.blocks)
        choice.keep(lambda block: block.gap_ns <= windows.activation_gap_ns)
        choice.offload_what_hides(lambda size: copy_alone_ns(size, "d2h", self.machine))
        candidate = self._placed(choice, windows)
        cap = self.caps.host_bytes
        # A recompute between two backwards sends to the host what they would have handed over.
        while cap is not None and candidate.host_bytes > cap:
            if not choice.lower_by(candidate.host_bytes - cap):
                break
            candidate = self._placed(choice, windows)
        return self._packed(candidate) if self._fits_device(candidate) else candidate

    def bare(self, gap_ns: float) -> _Candidate:
        """Return the placement that keeps the least on the device, not yet packed."""
        if gap_ns not in self._bare:
            choice = LevelChoice(self.blocks)
            choice.keep(lambda block: block.gap_ns <= gap_ns)
            self._bare[gap_ns] = self._placed(choice, _Windows(gap_ns))
        return self._bare[gap_ns]

    def packed_bare(self, gap_ns: float) -> _Candidate:
        if gap_ns not in self._packed_bare:
            self._packed_bare[gap_ns] = self._packed(self.bare(gap_ns))
        return self._packed_bare[gap_ns]

    def fits(self, candidate: _Candidate) -> bool:
        return self._fits_device(candidate) and self._fits_host(candidate)

    def grown(self, best: _Candidate, windows: _Windows) -> _Candidate:
        """Keep content over ever longer gaps while both caps hold."""
        longest_ns = self.gaps_ns[-1]
        steps = [gap for gap in self.gaps_ns if gap > 0.0] + [1.5 * longest_ns, 3.0 * longest_ns]
        low, high = 0, len(steps)
        while low < high:
            middle = (low + high) // 2
            kept_ns = max(windows.activation_gap_ns, steps[middle])
            wider = self.candidate(_Windows(kept_ns, steps[middle], windows.margin_ns))
            if self.fits(wider):
                best, low = wider, middle + 1
            else:
                high = middle
        return best

    def smallest_activation_gap_ns(self) -> float:
        """Return the shortest time, in ns, for which activations are kept so that both caps hold.

        Keeping them longer takes less host memory and more live bytes on the device. The packed
        extent need not grow with these, so that a longer gap may fit where a shorter one does not.

        Raises:
            InfeasiblePlan: no gap lets both caps hold.
        """
        needed = 0
        if not self._fits_host(self.bare(self.gaps_ns[0])):
            needed = bisect_left(
                self.gaps_ns, True, key=lambda gap_ns: self._fits_host(self.bare(gap_ns))
            )
        for gap_ns in self.gaps_ns[needed:]:
            if not self._fits_device(self.bare(gap_ns)):
                break
            if self._fits_device(self.packed_bare(gap_ns)):
                return gap_ns
        raise self._infeasible(needed)

    def _least_device(self, first: int) -> _Candidate | None:
        """The bare candidate with the smallest extent of those from the gap `first` on."""
        best: _Candidate | None = None
        for gap_ns in self.gaps_ns[first:]:
            if best is not None and self.bare(gap_ns).device_bytes >= best.device_bytes:
                break
            found = self.packed_bare(gap_ns)
            if best is None or found.device_bytes < best.device_bytes:
                best = found
        return best

    def _least_host(self) -> _Candidate | None:
        """The bare candidate with the longest gap of those that fit the device."""
        beyond = bisect_left(
            self.gaps_ns, True, key=lambda gap_ns: not self._fits_device(self.bare(gap_ns))
        )
        fitting = (self.packed_bare(gap_ns) for gap_ns in reversed(self.gaps_ns[:beyond]))
        return next((found for found in fitting if self._fits_device(found)), None)

    def _infeasible(self, needed: int) -> InfeasiblePlan:
        """Say which cap is short, and the smallest one on either side that would do.

        From the gap `needed` on the host cap holds.
        """
        caps, reserve = self.caps, self.caps.outside_arena_bytes
        enough = self._least_device(needed)
        smallest_device = None if enough is None else enough.device_bytes + reserve
        fullest = self._least_host()
        if fullest is None:
            barest = self._least_device(0)
            assert barest is not None and caps.device_bytes is not None
            task = barest.placement.tasks[self._peak(barest)].task_id
            shortage = Shortage(
                "streaming", "device", caps.device_bytes, barest.device_bytes + reserve, task,
                smallest_device, None, caps.library_bytes,
            )  # fmt: skip
            return InfeasiblePlan(shortage)
        assert caps.host_bytes is not None
        task = fullest.placement.host_overflow_task(caps.host_bytes)
        shortage = Shortage(
            "streaming", "host", caps.host_bytes, fullest.host_bytes, task, smallest_device,
            fullest.host_bytes,
        )  # fmt: skip
        return InfeasiblePlan(shortage)

    def _placed(self, choice: LevelChoice, windows: _Windows) -> _Candidate:
        tasks = with_recomputes(self.chain, choice.levels)
        clock = TaskClock([self.call_ns[task.call] for task in tasks])
        kept = choice.kept_units

        def keep(unit: Unit, gap_ns: float) -> bool:
            return unit.unit_id in kept or gap_ns <= windows.state_gap_ns

        margins = Margins(lead_ns=windows.margin_ns, drain_ns=windows.margin_ns)
        residencies = streaming_residencies(
            uses_by_unit(tasks, self.units), self.units, clock, keep, margins
        )
        placement = Placement(self.chain, tasks, self.units, residencies, offsets=())
        live_bytes, _ = live_peak(residency_intervals(self.units, residencies))
        return _Candidate(placement, live_bytes, placement.host_bytes)

    def _packed(self, candidate: _Candidate) -> _Candidate:
        bare = candidate.placement
        packed = RulePlacement.of(self.chain, bare.tasks, self.units, bare.residencies)
        return _Candidate(packed.placement, packed.device_bytes, candidate.host_bytes)

    def _peak(self, candidate: _Candidate) -> int:
        """Position of the task at which most device bytes are alive."""
        return live_peak(residency_intervals(self.units, candidate.placement.residencies))[1]

    def _fits_device(self, candidate: _Candidate) -> bool:
        cap = self.caps.arena_bytes("device")
        return cap is None or candidate.device_bytes <= cap

    def _fits_host(self, candidate: _Candidate) -> bool:
        cap = self.caps.host_bytes
        return cap is None or candidate.host_bytes <= cap
