"""Replay a schedule in virtual time: one SimPy process per stream."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import simpy

from twinstream.hardware_profiles.errors import NoTimeError, TooLongError
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.demand.attention_limits import nondeterministic_kernels
from twinstream.schedule.analysis.periodic import MAX_PASSES, PassBoundaries, StepTime
from twinstream.schedule.document import Schedule
from twinstream.schedule.numbers import MOST_NS
from twinstream.schedule.ops import Compute
from twinstream.schedule.proof.verify import require_safe
from twinstream.schedule.timeline import PassSpans, Provenance, Timeline
from twinstream.simulator.costs import CostModel, MachineCosts, OpCost
from twinstream.simulator.flows import FluidPool

_KEPT_PASSES = 2


@dataclass(frozen=True)
class SteadyState:
    """The step time, and the last passes run: what a timeline says of the steady state."""

    step: StepTime
    passes: tuple[PassSpans, ...]

    @property
    def step_ns(self) -> float:
        """How long a step takes."""
        return self.step.step_ns


def simulate(schedule: Schedule, machine: Machine) -> Timeline:
    """Predict the timeline of a schedule on a machine.

    Raises:
        MissingNumberError: the profile lacks a number that an op of the schedule needs.
        NoTimeError: the step takes no time there.
    """
    provenance = Provenance(
        kind="simulated", where=machine.name, detail=f"profile {machine.content_hash}",
        nondeterministic=nondeterministic_kernels(schedule),
    )  # fmt: skip
    return replay(schedule, MachineCosts(schedule, machine), provenance)


def steady_state(schedule: Schedule, machine: Machine) -> SteadyState:
    """What `simulate` finds of the steady state, without the pass from a cold start.

    Raises:
        MissingNumberError: as there.
        NoTimeError: as there.
        UnsafeSchedule: an op waits for what never comes about. That alone is noticed.
    """
    try:
        return _replay_steady(schedule, MachineCosts(schedule, machine), machine.name)
    except (KeyError, RuntimeError):  # a wait for no op, or a circle of waits
        require_safe(schedule)
        raise


def replay(schedule: Schedule, costs: CostModel, provenance: Provenance) -> Timeline:
    """Run passes until the step time is known; see `twinstream.schedule.analysis.periodic`.

    Raises:
        NoTimeError: the step takes no time.
    """
    steady = _replay_steady(schedule, costs, provenance.where)
    (cold,) = replay_passes(schedule, costs, 1)
    return Timeline(
        op_ids=tuple(op.op_id for op in schedule.ops),
        passes=steady.passes,
        cold=cold,
        step_ns=steady.step_ns,
        spread_ns=steady.step.spread_ns,
        period_passes=steady.step.period_passes,
        utilization=_utilization(schedule, costs, steady.step_ns),
        provenance=provenance,
    )


def _replay_steady(schedule: Schedule, costs: CostModel, where: str) -> SteadyState:
    run = _Run(schedule, costs, MAX_PASSES)
    boundaries = PassBoundaries()
    step: StepTime | None = None
    number = 0
    while step is None:
        spans = run.next_pass()
        step = boundaries.add(spans.end_ns, _anchor_ns(schedule, spans))
        number += 1
    if step.period_passes is None:  # a queue may still grow: no step is shorter than what it takes
        step = replace(step, step_ns=max(step.step_ns, _least_ns(schedule, costs)))
    if not step.step_ns:
        raise NoTimeError(machine=where)
    last = range(max(0, number - _KEPT_PASSES), number)
    return SteadyState(step, tuple(run.spans(i) for i in last))


def replay_passes(schedule: Schedule, costs: CostModel, num_passes: int) -> list[PassSpans]:
    """Spans of exactly so many passes from empty streams, drained at the end."""
    run = _Run(schedule, costs, num_passes)
    return [run.next_pass() for _ in range(num_passes)]


@dataclass(frozen=True, slots=True)
class _Step:
    """An op as its stream's process sees it; `waited_for` if another op waits for it."""

    position: int
    cost: OpCost
    waits: tuple[int, ...]
    waits_previous: tuple[int, ...]
    waited_for: bool


class _Pass:
    """Spans of one pass as they come, events of ops that others wait for, and one for the end."""

    def __init__(self, env: simpy.Environment, steps: Sequence[_Step]) -> None:
        self.starts = [0] * len(steps)
        self.ends = [0] * len(steps)
        self.done = {step.position: env.event() for step in steps if step.waited_for}
        self.ended = env.event()
        self._left = len(steps)

    def end(self, step: _Step, now_ns: int) -> None:
        self.ends[step.position] = now_ns
        if step.waited_for:
            self.done[step.position].succeed()
        self._left -= 1
        if not self._left:
            self.ended.succeed()


class _Run:
    """A SimPy environment with all streams of a schedule running `num_passes` passes."""

    def __init__(self, schedule: Schedule, costs: CostModel, num_passes: int) -> None:
        self._env = simpy.Environment()
        self._steps = _steps(schedule, costs)
        self._passes: list[_Pass] = []
        self._num_passes = num_passes
        self._ended = 0
        pool = FluidPool(self._env, costs.capacity)
        streams: dict[str, list[_Step]] = {}
        for op, step in zip(schedule.ops, self._steps, strict=True):
            streams.setdefault(str(op.stream), []).append(step)
        for steps in streams.values():
            self._env.process(self._stream(steps, pool, costs.wait_ns))

    def next_pass(self) -> PassSpans:
        """Run until the next pass is through; fails if some op never ends."""
        self._env.run(self._pass(self._ended).ended)
        if self._env.now > MOST_NS:
            raise TooLongError(
                f"a few passes take over {MOST_NS / 86_400e9:.0f} days on this machine: a number "
                "of its profile (a rate, an efficiency, a latency) or the step is a slip"
            )
        self._ended += 1
        return self.spans(self._ended - 1)

    def spans(self, number: int) -> PassSpans:
        found = self._passes[number]
        return PassSpans(start_ns=tuple(found.starts), end_ns=tuple(found.ends))

    def _pass(self, number: int) -> _Pass:
        while len(self._passes) <= number:
            self._passes.append(_Pass(self._env, self._steps))
        return self._passes[number]

    def _stream(
        self, steps: Sequence[_Step], pool: FluidPool, wait_ns: int
    ) -> Generator[simpy.Event, object, None]:
        """SimPy process: one stream, in order, with event waits across streams."""
        env = self._env
        for number in range(self._num_passes):
            this = self._pass(number)
            before = self._pass(number - 1) if number else None
            for step in steps:
                waits = [this.done[i] for i in step.waits]
                if before is not None:
                    waits += [before.done[i] for i in step.waits_previous]
                for event in waits:
                    if not event.processed:
                        yield event
                if waits and wait_ns:
                    yield env.timeout(wait_ns)
                this.starts[step.position] = int(env.now)
                if step.cost.fixed_ns:
                    yield env.timeout(step.cost.fixed_ns)
                if step.cost.flow is not None:
                    yield pool.run(step.cost.flow)
                this.end(step, int(env.now))


def _steps(schedule: Schedule, costs: CostModel) -> list[_Step]:
    position = {op.op_id: i for i, op in enumerate(schedule.ops)}
    waited_for = {wait for op in schedule.ops for wait in (*op.waits, *op.waits_previous)}
    return [
        _Step(
            i,
            costs.cost(op),
            tuple(position[wait] for wait in op.waits),
            tuple(position[wait] for wait in op.waits_previous),
            op.op_id in waited_for,
        )
        for i, op in enumerate(schedule.ops)
    ]


def _anchor_ns(schedule: Schedule, spans: PassSpans) -> int:
    """End of the pass's last compute op; of its last op where it computes nothing."""
    ends = [
        end for op, end in zip(schedule.ops, spans.end_ns, strict=True) if isinstance(op, Compute)
    ]
    return max(ends or spans.end_ns)


def _utilization(schedule: Schedule, costs: CostModel, step_ns: float) -> dict[str, float]:
    return {
        resource: total / (costs.capacity[resource] * step_ns)
        for resource, total in _used(schedule, costs).items()
    }


def _least_ns(schedule: Schedule, costs: CostModel) -> float:
    """What one pass takes any stream at least, each op alone, and any resource."""
    streams: dict[str, float] = {}
    for op in schedule.ops:
        cost, waits_ns = costs.cost(op), costs.wait_ns if op.waits or op.waits_previous else 0
        alone_ns = cost.fixed_ns + waits_ns + (cost.flow.alone_ns if cost.flow else 0.0)
        streams[str(op.stream)] = streams.get(str(op.stream), 0.0) + alone_ns
    busy_ns = (total / costs.capacity[name] for name, total in _used(schedule, costs).items())
    return max(*streams.values(), *busy_ns, 0.0)


def _used(schedule: Schedule, costs: CostModel) -> dict[str, float]:
    """What one pass takes of each resource."""
    used = dict.fromkeys(costs.capacity, 0.0)
    for op in schedule.ops:
        flow = costs.cost(op).flow
        for resource, amount in flow.amounts if flow else ():
            used[resource] += amount
    return used
