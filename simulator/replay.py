"""Replay a schedule in virtual time: one SimPy process per stream."""

from collections.abc import Generator, Sequence

import simpy

from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import Compute, Op
from twinstream.schedule.periodic import MAX_PASSES, PassBoundaries, StepTime
from twinstream.schedule.timeline import PassSpans, Provenance, Timeline
from twinstream.simulator.costs import CostModel, MachineCosts, OpCost
from twinstream.simulator.flows import FluidPool

_KEPT_PASSES = 2


def simulate(schedule: Schedule, machine: Machine) -> Timeline:
    """Predict the timeline of a schedule on a machine.

    Raises:
        MissingNumberError: the profile lacks a number that an op of the schedule needs.
    """
    provenance = Provenance(
        kind="simulated", where=machine.name, detail=f"profile {machine.content_hash}"
    )
    return replay(schedule, MachineCosts(schedule, machine), provenance)


def replay(schedule: Schedule, costs: CostModel, provenance: Provenance) -> Timeline:
    """Run passes until the step time is known; see `twinstream.schedule.periodic`."""
    steady = _Run(schedule, costs, MAX_PASSES)
    boundaries = PassBoundaries()
    step: StepTime | None = None
    number = 0
    while step is None:
        spans = steady.next_pass()
        step = boundaries.add(spans.end_ns, _anchor_ns(schedule, spans))
        number += 1
    cold = _Run(schedule, costs, 1)
    passes = tuple(steady.spans(i) for i in range(max(0, number - _KEPT_PASSES), number))
    return Timeline(
        op_ids=tuple(op.op_id for op in schedule.ops),
        passes=passes,
        cold=cold.next_pass(),
        step_ns=step.step_ns,
        spread_ns=step.spread_ns,
        period_passes=step.period_passes,
        utilization=_utilization(schedule, costs, step.step_ns),
        provenance=provenance,
    )


def replay_passes(schedule: Schedule, costs: CostModel, num_passes: int) -> list[PassSpans]:
    """Spans of exactly so many passes from empty streams, drained at the end."""
    run = _Run(schedule, costs, num_passes)
    return [run.next_pass() for _ in range(num_passes)]


class _Run:
    """A SimPy environment with all streams of a schedule running `num_passes` passes."""

    def __init__(self, schedule: Schedule, costs: CostModel, num_passes: int) -> None:
        self._env = simpy.Environment()
        self._num_ops = len(schedule.ops)
        self._starts: list[list[int]] = [[0] * self._num_ops for _ in range(num_passes)]
        self._ends: list[list[int]] = [[0] * self._num_ops for _ in range(num_passes)]
        self._done = [[self._env.event() for _ in schedule.ops] for _ in range(num_passes)]
        self._passed = 0
        position = {op.op_id: i for i, op in enumerate(schedule.ops)}
        pool = FluidPool(self._env, costs.capacity)
        streams: dict[str, list[tuple[int, Op]]] = {}
        for i, op in enumerate(schedule.ops):
            streams.setdefault(str(op.stream), []).append((i, op))
        for ops in streams.values():
            steps = [
                _Step(
                    i,
                    costs.cost(op),
                    [position[wait] for wait in op.waits],
                    [position[wait] for wait in op.waits_previous],
                )
                for i, op in ops
            ]
            self._env.process(self._stream(steps, pool, costs.wait_ns))

    def next_pass(self) -> PassSpans:
        """Run until the next pass is through; fails if some op never ends."""
        done = self._done[self._passed]
        self._env.run(self._env.all_of(done))
        self._passed += 1
        return self.spans(self._passed - 1)

    def spans(self, number: int) -> PassSpans:
        return PassSpans(start_ns=tuple(self._starts[number]), end_ns=tuple(self._ends[number]))

    def _stream(
        self, steps: "Sequence[_Step]", pool: FluidPool, wait_ns: int
    ) -> Generator[simpy.Event, object, None]:
        """SimPy process: one stream, in order, with event waits across streams."""
        env = self._env
        for number, done in enumerate(self._done):
            starts, ends = self._starts[number], self._ends[number]
            before = self._done[number - 1] if number else None
            for step in steps:
                waits = [done[i] for i in step.waits]
                if before is not None:
                    waits += [before[i] for i in step.waits_previous]
                pending = [event for event in waits if not event.processed]
                if pending:
                    yield env.all_of(pending)
                if waits and wait_ns:
                    yield env.timeout(wait_ns)
                starts[step.position] = int(env.now)
                if step.cost.fixed_ns:
                    yield env.timeout(step.cost.fixed_ns)
                if step.cost.flow is not None:
                    yield pool.run(step.cost.flow)
                ends[step.position] = int(env.now)
                done[step.position].succeed()


class _Step:
    """An op as its stream's process sees it."""

    __slots__ = ("cost", "position", "waits", "waits_previous")

    def __init__(
        self, position: int, cost: OpCost, waits: list[int], waits_previous: list[int]
    ) -> None:
        self.position = position
        self.cost = cost
        self.waits = waits
        self.waits_previous = waits_previous


def _anchor_ns(schedule: Schedule, spans: PassSpans) -> int:
    """End of the pass's last compute op; of its last op where it computes nothing."""
    ends = [
        end for op, end in zip(schedule.ops, spans.end_ns, strict=True) if isinstance(op, Compute)
    ]
    return max(ends or spans.end_ns)


def _utilization(schedule: Schedule, costs: CostModel, step_ns: float) -> dict[str, float]:
    used = dict.fromkeys(costs.capacity, 0.0)
    for op in schedule.ops:
        flow = costs.cost(op).flow
        for resource, amount in flow.amounts if flow else ():
            used[resource] += amount
    return {
        resource: total / (costs.capacity[resource] * step_ns) if step_ns else 0.0
        for resource, total in used.items()
    }
