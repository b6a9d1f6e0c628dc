"""`optimal`: decisions from the lower bound's program, rounded, repaired, judged by simulation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from twinstream.hardware_profiles.cost import cost_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.bound import fewest_copies
from twinstream.planner.emission import Placement, emit, host_bytes
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.judge import Judge
from twinstream.planner.margins import QueueModel
from twinstream.planner.policies.resident import plan_resident
from twinstream.planner.policies.streaming import plan_streaming
from twinstream.planner.residency import TaskClock, chosen_stays
from twinstream.planner.rounding import Decisions
from twinstream.planner.rounds import PROGRAM_ROUNDS, Folding, pack_folded, with_rounds
from twinstream.planner.sequence import with_recomputes
from twinstream.planner.uses import Unit, UnitMap, uses_by_unit
from twinstream.schedule.chain import Chain, Task
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Compute

_JUDGED_ROUNDS = 4
_LONGEST_IN_BLOCKS = (4.0, 1.0)
_REPAIRS = 6

Maker = Callable[[Chain], Schedule]
Policy = Callable[[Chain, Machine, Caps], Schedule]


def plan_optimal(
    chain: Chain, machine: Machine, caps: Caps, judge: Judge | None = None
) -> Schedule:
    """The fastest schedule found within the caps, by the judge.

    The program behind the lower bound says which content stays over which gap, what is offloaded
    and what is recomputed; its caps are lowered until the rounded decisions, with room for copies
    in flight, fit. Several allowances for copies are tried, beside `resident` and `streaming`;
    the simulator decides.

    Raises:
        TwinstreamError: there is no judge.
        InfeasiblePlan: nothing fits the caps; what would is that of `streaming`.
    """
    if judge is None:
        raise TwinstreamError("policy 'optimal' needs a simulator as its judge; pass one")
    search = _Search(chain, machine, caps, judge)
    for make in search.makers_by_time():
        try:
            return make(chain).model_copy(update={"policy": "optimal"})
        except InfeasiblePlan:
            continue
    return plan_streaming(chain, machine, caps)  # raises, with what would do


@dataclass(frozen=True)
class _Candidate:
    decisions: Decisions
    longest_ns: float


class _Search:
    def __init__(self, chain: Chain, machine: Machine, caps: Caps, judge: Judge) -> None:
        self.machine, self.caps, self.judge = machine, caps, judge
        self.num_rounds = len(chain.round_starts)
        self.small = with_rounds(chain, PROGRAM_ROUNDS)
        self.judged = with_rounds(chain, _JUDGED_ROUNDS)
        self.call_ns = {name: cost_alone_ns(c.cost, machine) for name, c in chain.calls.items()}
        self.block_ns = max(self.call_ns[task.call] for task in self.small.tasks)

    def makers_by_time(self) -> list[Maker]:
        """What makes a schedule of any number of rounds, the fastest first."""
        judged: list[tuple[float, int, Maker]] = []
        for make in self._makers():
            try:
                schedule = make(self.judged)
            except InfeasiblePlan:
                continue
            judged.append((self._step_ns(schedule), len(judged), make))
        return [make for _, _, make in sorted(judged, key=lambda found: found[:2])]

    def _makers(self) -> Iterator[Maker]:
        for policy in (plan_resident, plan_streaming):
            yield partial(_plain, policy, self.machine, self.caps)
        for blocks in _LONGEST_IN_BLOCKS:
            candidate = self._fitting(blocks * self.block_ns)
            if candidate is not None:
                yield partial(self.schedule, candidate)

    def schedule(self, candidate: _Candidate, chain: Chain) -> Schedule:
        """The candidate's decisions as a schedule of a chain of any number of rounds."""
        placement, _ = self._place(chain, candidate)
        return emit(placement, self.machine, self.caps, "optimal")

    def _fitting(self, longest_ns: float) -> _Candidate | None:
        """Decisions that fit both caps, as the program's caps are lowered by what is missing."""
        arenas = self.caps.arena_bytes("device"), self.caps.arena_bytes("host")
        device, host = arenas
        units = UnitMap(self.small)
        for _ in range(_REPAIRS):
            caps = _caps_of_arenas(self.caps, device, host)
            solved = fewest_copies(self.small, self.machine, caps, num_rounds=self.num_rounds)
            if solved is None:
                return None
            candidate = _Candidate(Decisions.of(solved, self.small, units), longest_ns)
            placement, extent = self._place(self.judged, candidate)
            over = _over(extent, arenas[0]), _over(host_bytes(placement), arenas[1])
            if not any(over):
                return candidate
            device = None if device is None else device - over[0]
            host = None if host is None else host - over[1]
        return None

    def _place(self, chain: Chain, candidate: _Candidate) -> tuple[Placement, int]:
        units, decisions = UnitMap(chain), candidate.decisions
        tasks = with_recomputes(chain, decisions.recomputes(chain))
        chain_index = {task.task_id: i for i, task in enumerate(chain.tasks)}
        before = {r.task.task_id: chain_index[r.before] for r in chain.recomputes}
        index = [chain_index.get(t.task_id, before.get(t.task_id, 0)) for t in tasks]
        chain_folding = Folding.of(chain, chain.tasks)

        def keep(unit: Unit, earlier: int, later: int) -> bool:
            low, high = index[earlier], index[later]
            crosses = (high <= low and later <= earlier) or (
                chain_folding.round_of(low) != chain_folding.round_of(high)
            )
            places = chain_folding.place(low), chain_folding.place(high)
            return decisions.keeps(unit, *places, crosses=crosses)

        clock = TaskClock(self._durations_ns(tasks, index, chain_folding, decisions))
        stays = chosen_stays(uses_by_unit(tasks, units), units, keep, len(tasks))
        queues = QueueModel(chain, units, self.machine, candidate.longest_ns)
        stays = queues.widened(stays, clock)
        offsets, extent = pack_folded(
            stays, units, Folding.of(chain, tasks), enough=self.caps.arena_bytes("device")
        )
        return Placement(chain, tasks, units, stays, offsets), extent

    def _durations_ns(
        self, tasks: Sequence[Task], index: Sequence[int], folding: Folding, decisions: Decisions
    ) -> list[float]:
        """Each task's slot in the program; a recompute takes its own time out of its task's."""
        alone = [self.call_ns[task.call] for task in tasks]
        found: list[float] = []
        for i, task_ns in enumerate(alone):
            slot_ns = decisions.slot_ns[folding.place(index[i])]
            recomputed = i > 0 and index[i - 1] == index[i]
            before_its_task = i + 1 < len(index) and index[i + 1] == index[i]
            spent_ns = alone[i - 1] if recomputed else 0.0
            found.append(task_ns if before_its_task else max(task_ns, slot_ns - spent_ns))
        return found

    def _step_ns(self, schedule: Schedule) -> float:
        """Step time on a few rounds, and what each further middle round adds."""
        timeline = self.judge(schedule)
        more = self.num_rounds - len(self.judged.round_starts)
        if more <= 0:
            return timeline.step_ns
        spans = timeline.passes[-1]
        end_of_round: dict[int, int] = {}
        for op, end_ns in zip(schedule.ops, spans.end_ns, strict=True):
            if isinstance(op, Compute) and op.label.round is not None:
                end_of_round[op.label.round] = end_ns
        return timeline.step_ns + more * (end_of_round[2] - end_of_round[1])


def _plain(policy: Policy, machine: Machine, caps: Caps, chain: Chain) -> Schedule:
    return policy(chain, machine, caps)


def _over(needed_bytes: int, cap_bytes: int | None) -> int:
    """By how much the cap of a program is to be lowered: what is missing, and a little more."""
    missing = 0 if cap_bytes is None else max(0, needed_bytes - cap_bytes)
    return missing + missing // 16


def _caps_of_arenas(caps: Caps, device_arena: int | None, host_arena: int | None) -> Caps:
    """Caps whose arenas have these sizes."""
    reserve = caps.device_reserve_bytes
    return caps.model_copy(
        update={
            "device_bytes": None if device_arena is None else max(0, device_arena) + reserve,
            "host_bytes": None if host_arena is None else max(0, host_arena),
        }
    )
