"""`streaming`: all state at home on the host, windows of it on the device."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from twinstream.hardware_profiles.cost import copy_alone_ns, cost_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.emission import Placement, emit, host_bytes, host_overflow_task
from twinstream.planner.infeasible import InfeasiblePlan, Shortage
from twinstream.planner.judge import Judge
from twinstream.planner.levels import LevelChoice, saved_blocks
from twinstream.planner.packing import live_peak, pack
from twinstream.planner.residency import Margins, TaskClock, stay_intervals, streaming_stays
from twinstream.planner.sequence import with_recomputes
from twinstream.planner.uses import Unit, UnitMap, uses_by_unit
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, Schedule

_MARGINS_IN_BLOCKS = (2.0, 1.0, 0.5, 0.0)


@dataclass(frozen=True)
class _Windows:
    """What sizes the windows on the device.

    Saved activations of a block stay when backward comes within `activation_gap_ns` (last in,
    first kept), everything else over gaps up to `state_gap_ns`. Loads are issued `margin_ns` of
    compute ahead, and offloads get as long before their bytes go to others. `bare` windows save
    activations at the lowest level.
    """

    activation_gap_ns: float = 0.0
    state_gap_ns: float = 0.0
    margin_ns: float = 0.0
    bare: bool = False


@dataclass(frozen=True)
class _Candidate:
    """`device_bytes` is the packed extent; the live peak where that alone exceeds the cap and the
    windows are not bare (then it is not packed)."""

    placement: Placement
    device_bytes: int
    host_bytes: int


def plan_streaming(
    chain: Chain, machine: Machine, caps: Caps, judge: Judge | None = None
) -> Schedule:
    """Stream parameters, gradients, optimizer state and saved activations through the device.

    Every unit of state has its home in host memory. It is fetched ahead of its use in order of
    need, and written back as soon as it is final. What is used again soon stays: the windows grow
    until the device cap is reached. Saved activations that leave the device are offloaded at the
    highest level whose copies hide under the block's forward, lowered from the first layer on
    until the host cap holds; the rest is recomputed.

    Raises:
        InfeasiblePlan: no window sizes satisfy both caps.
    """
    planner = _StreamingPlanner(chain, machine, caps)
    gap_ns = planner.smallest_activation_gap_ns()
    for blocks in _MARGINS_IN_BLOCKS:
        windows = _Windows(activation_gap_ns=gap_ns, margin_ns=blocks * planner.block_ns)
        candidate = planner.candidate(windows)
        if planner.fits(candidate):
            candidate = planner.grown(candidate, windows)
            break
    else:
        candidate = planner.bare(gap_ns)
    return emit(candidate.placement, machine, caps, "streaming")


class _StreamingPlanner:
    def __init__(self, chain: Chain, machine: Machine, caps: Caps) -> None:
        self.chain, self.machine, self.caps = chain, machine, caps
        self.units = UnitMap(chain)
        self.call_ns = {name: cost_alone_ns(c.cost, machine) for name, c in chain.calls.items()}
        self.blocks = saved_blocks(chain, self.units, self.call_ns)
        self.gaps_ns = sorted({-1.0, *(block.gap_ns for block in self.blocks)})
        self.block_ns = max((block.forward_ns for block in self.blocks), default=0.0)

    def candidate(self, windows: _Windows) -> _Candidate:
        choice = LevelChoice(self.blocks)
        choice.keep(lambda block: block.gap_ns <= windows.activation_gap_ns)
        if windows.bare:
            return self._placed(choice, windows)
        choice.offload_what_hides(lambda size: copy_alone_ns(size, "d2h", self.machine))
        candidate = self._placed(choice, windows)
        cap = self.caps.host_bytes
        # A recompute between two backwards sends to the host what they would have handed over.
        while cap is not None and candidate.host_bytes > cap:
            if not choice.lower_by(candidate.host_bytes - cap):
                break
            candidate = self._placed(choice, windows)
        return candidate

    def bare(self, activation_gap_ns: float) -> _Candidate:
        return self.candidate(_Windows(activation_gap_ns, bare=True))

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
        """How long activations must be kept, at the least, for the host cap to hold.

        Raises:
            InfeasiblePlan: no gap lets both caps hold.
        """
        needed: float | None = self.gaps_ns[0]
        if not self._fits_host(self.bare(self.gaps_ns[0])):
            needed = self._first(lambda gap_ns: self._fits_host(self.bare(gap_ns)))
        if needed is not None and self._fits_device(self.bare(needed)):
            return needed
        raise self._infeasible(needed)

    def _first(self, holds: Callable[[float], bool]) -> float | None:
        """The smallest gap for which something holds that holds for all longer ones."""
        index = bisect_left(self.gaps_ns, True, key=holds)
        return self.gaps_ns[index] if index < len(self.gaps_ns) else None

    def _infeasible(self, needed_gap_ns: float | None) -> InfeasiblePlan:
        """Say which cap is short, and the smallest one on either side that would do."""
        barest, caps = self.bare(self.gaps_ns[0]), self.caps
        smallest_device = (
            self.bare(needed_gap_ns).device_bytes if needed_gap_ns is not None else None
        )
        if smallest_device is not None:
            smallest_device += caps.device_reserve_bytes
        if caps.device_bytes is not None and not self._fits_device(barest):
            task = barest.placement.tasks[self._peak(barest)].task_id
            needed = barest.device_bytes + caps.device_reserve_bytes
            shortage = Shortage(
                "streaming", "device", caps.device_bytes, needed, task, smallest_device, None
            )
            return InfeasiblePlan(shortage)
        assert caps.host_bytes is not None
        too_long = self._first(lambda gap_ns: not self._fits_device(self.bare(gap_ns)))
        index = len(self.gaps_ns) if too_long is None else self.gaps_ns.index(too_long)
        fullest = self.bare(self.gaps_ns[index - 1])
        task = host_overflow_task(fullest.placement, caps.host_bytes)
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
        stays = streaming_stays(uses_by_unit(tasks, self.units), self.units, clock, keep, margins)
        intervals = stay_intervals(self.units, stays)
        extent, _ = live_peak(intervals)
        offsets = [0] * len(stays)
        if windows.bare or not self._exceeds_device(extent):
            offsets, extent = pack(intervals)
        placement = Placement(self.chain, tasks, self.units, stays, offsets)
        return _Candidate(placement, extent, host_bytes(placement))

    def _exceeds_device(self, arena_bytes: int) -> bool:
        cap = self.caps.arena_bytes("device")
        return cap is not None and arena_bytes > cap

    def _peak(self, candidate: _Candidate) -> int:
        """Position of the task at which most device bytes are alive."""
        return live_peak(stay_intervals(self.units, candidate.placement.stays))[1]

    def _fits_device(self, candidate: _Candidate) -> bool:
        return not self._exceeds_device(candidate.device_bytes)

    def _fits_host(self, candidate: _Candidate) -> bool:
        cap = self.caps.host_bytes
        return cap is None or candidate.host_bytes <= cap
