"""Predict when every op runs, on one device or for every class of ranks of a mesh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.errors import NoTimeError
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.kernel_costs.attention_limits import nondeterministic_kernels
from twinstream.schedule.analysis.periodic import MAX_PASSES, PassBoundaries, StepTime
from twinstream.schedule.document import RankSchedule, Schedule, Side
from twinstream.schedule.ops import Communicate, Compute
from twinstream.schedule.proof.verify import require_safe_rank
from twinstream.schedule.timeline import PassSpans, Provenance, RankTimeline, Timeline
from twinstream.simulator.costs import CostModel, MachineCosts, OpCost
from twinstream.simulator.engine import (
    Engine,
    OpPrice,
    PassTimes,
    RankProgram,
    Rendezvous,
    StreamOp,
    StuckError,
)
from twinstream.simulator.flows import SharedFlow
from twinstream.simulator.network_costs import ClusterCosts, MeshCosts

_KEPT_PASSES = 2
_MOST_PASSES_OF_A_MESH = 8


@dataclass(frozen=True)
class SteadyState:
    """The step time, and the last passes run: what a timeline says of the steady state."""

    step: StepTime
    passes: tuple[PassSpans, ...]

    @property
    def step_ns(self) -> float:
        """The time of one step."""
        return self.step.step_ns


def simulate_rank(schedule: RankSchedule, machine: Machine) -> RankTimeline:
    """Predict the timeline of one device's schedule on a machine.

    Raises:
        MissingNumberError: the profile lacks a number that an op of the schedule needs.
        NoTimeError: the step takes no time there.
        StuckError: ops wait for one another for ever.
    """
    provenance = Provenance(
        kind="simulated", where=machine.name, detail=f"profile {machine.content_hash}",
        nondeterministic=nondeterministic_kernels(schedule),
    )  # fmt: skip
    return replay(schedule, MachineCosts(schedule, machine), provenance)


def steady_state(schedule: RankSchedule | Schedule, machine: Machine) -> SteadyState:
    """Return the steady state of one device as `simulate` finds it, without a pass from cold.

    Raises:
        MissingNumberError, NoTimeError: as there.
        UnsafeSchedule: an op waits for what never comes about. That alone is noticed.
    """
    own = schedule.only
    try:
        return _replay_steady(own, MachineCosts(own, machine), machine.name)
    except (KeyError, StuckError):  # a wait for no op, or a circle of waits
        require_safe_rank(own)
        raise


def simulate(
    schedule: Schedule,
    machine: Machine,
    cluster: Cluster | None = None,
    machines: Mapping[str, Machine] | None = None,
) -> Timeline:
    """Predict the timelines of all classes of ranks.

    Args:
        machine: the profile of the device, or of a node of the cluster.
        cluster: by what ranks of a layout reach one another.
        machines: of classes (by name) that are not like the others: stragglers.

    Raises:
        StuckError: ranks wait for one another for ever.
        MissingNumberError, MissingNetworkNumberError: a profile lacks a number that an op needs.
        NoTimeError: the step takes no time there.
    """
    if cluster is None:
        return Timeline.of_rank(simulate_rank(schedule.only, machine))
    costs = ClusterCosts(schedule, cluster, machine, machines)
    return replay_cluster(schedule, costs, cluster.name)


def replay(schedule: RankSchedule, costs: CostModel, provenance: Provenance) -> RankTimeline:
    """Run passes until the step time is known; see `twinstream.schedule.analysis.periodic`.

    Raises:
        NoTimeError: the step takes no time.
    """
    steady = _replay_steady(schedule, costs, provenance.where)
    (cold,) = replay_passes(schedule, costs, 1)
    return RankTimeline(
        op_ids=tuple(op.op_id for op in schedule.ops),
        passes=steady.passes,
        cold=cold,
        step_ns=steady.step_ns,
        spread_ns=steady.step.spread_ns,
        period_passes=steady.step.period_passes,
        utilization=_utilization(schedule, costs, steady.step_ns),
        provenance=provenance,
    )


def replay_passes(schedule: RankSchedule, costs: CostModel, num_passes: int) -> list[PassSpans]:
    """Spans of exactly so many passes from empty streams, drained at the end."""
    engine = _engine_of_one(schedule, costs, num_passes)
    return [_spans(engine.next_pass()[0]) for _ in range(num_passes)]


def replay_cluster(
    schedule: Schedule, costs: MeshCosts, where: str, num_passes: int | None = None
) -> Timeline:
    """Run passes until the step time is known, at most 8, or exactly `num_passes`."""
    most = num_passes or _MOST_PASSES_OF_A_MESH
    step, passes = _step_of(
        _engine(schedule, costs, most), [schedule.of(one) for one in schedule.classes], most
    )
    if not step.step_ns:
        raise NoTimeError(machine=where)
    provenance = Provenance(kind="simulated", where=where)
    timelines = {
        one.name: RankTimeline.model_construct(
            op_ids=tuple(op.op_id for op in schedule.of(one).ops),
            passes=tuple(_spans(ended[number]) for ended in passes[-_KEPT_PASSES:]),
            cold=_spans(passes[0][number]),
            step_ns=step.step_ns,
            spread_ns=step.spread_ns,
            period_passes=step.period_passes,
            utilization={},
            provenance=provenance,
        )
        for number, one in enumerate(schedule.classes)
    }
    return Timeline.made(
        schema_version=1, classes=timelines, step_ns=step.step_ns, spread_ns=step.spread_ns,
        period_passes=step.period_passes, cold_ns=max(max(one.ends) for one in passes[0]),
        ranks={}, clock_error_ns=0, provenance=provenance,
    )  # fmt: skip


def cold_step_ns(schedule: Schedule, costs: MeshCosts) -> int:
    """Return the time of one step from idle streams to idle streams."""
    return max(max(one.ends) for one in _engine(schedule, costs, 1).next_pass())


def _replay_steady(schedule: RankSchedule, costs: CostModel, where: str) -> SteadyState:
    engine = _engine_of_one(schedule, costs, MAX_PASSES)
    step, passes = _step_of(engine, [schedule], MAX_PASSES)
    if step.period_passes is None:  # a queue may still grow: no step is shorter than what it takes
        step = replace(step, step_ns=max(step.step_ns, _least_ns(schedule, costs)))
    if not step.step_ns:
        raise NoTimeError(machine=where)
    return SteadyState(step, tuple(_spans(one) for (one,) in passes[-_KEPT_PASSES:]))


def _step_of(
    engine: Engine, schedules: Sequence[RankSchedule], most_passes: int
) -> tuple[StepTime, list[list[PassTimes]]]:
    """Run passes until the step time is known, at most so many; with all passes run."""
    boundaries, passes = PassBoundaries(), []
    anchors = [
        [at for at, op in enumerate(schedule.ops) if isinstance(op, Compute)]
        for schedule in schedules
    ]
    while True:
        passes.append(ended := engine.next_pass())
        computes = [one.ends[at] for one, own in zip(ended, anchors, strict=True) for at in own]
        ends = [end for one in ended for end in one.ends]
        step = boundaries.add(ends, max(computes or ends))
        if step is None and len(passes) == most_passes:
            step = boundaries.unproven()
        if step is not None:
            return step, passes


def _engine_of_one(schedule: RankSchedule, costs: CostModel, num_passes: int) -> Engine:
    numbers = {resource: number for number, resource in enumerate(costs.capacity)}
    program = _program(schedule, costs, numbers, {})
    return Engine([program], [], list(costs.capacity.values()), num_passes)


def _engine(schedule: Schedule, costs: MeshCosts, num_passes: int) -> Engine:
    numbers: dict[str, dict[str, int]] = {}
    capacity: list[float] = []
    sequence_of: dict[str, dict[str, int]] = {one.name: {} for one in schedule.classes}
    ranks = [costs.rank(number) for number in range(len(schedule.classes))]
    for one, rank in zip(schedule.classes, ranks, strict=True):
        numbers[one.name] = {name: len(capacity) + i for i, name in enumerate(rank.capacity)}
        capacity += rank.capacity.values()
    for sequence, exchange in enumerate(schedule.order):
        for name, op_id in exchange.sides:
            sequence_of[name][op_id] = sequence
    programs = [
        _program(schedule.of(one), rank, numbers[one.name], sequence_of[one.name])
        for one, rank in zip(schedule.classes, ranks, strict=True)
    ]
    return Engine(programs, _rendezvous(schedule, costs, numbers), capacity, num_passes)


def _rendezvous(
    schedule: Schedule, costs: MeshCosts, numbers: Mapping[str, Mapping[str, int]]
) -> list[Rendezvous]:
    """How many ops meet in each exchange, and what it draws of all its sides."""
    known: dict[tuple[int, tuple[str, ...]], tuple[object, OpPrice]] = {}

    def price(sides: Sequence[Side]) -> OpPrice:
        key = id(cost), tuple(name for name, _ in sides)
        if key not in known:
            amounts: dict[int, float] = {}
            for (name, _), drawn in zip(sides, cost.sides, strict=False):
                for resource, amount in drawn:
                    number = numbers[name][resource]
                    amounts[number] = amounts.get(number, 0.0) + amount
            flow = SharedFlow(cost.alone_ns, amounts) if cost.alone_ns else None
            known[key] = (cost, OpPrice(cost.fixed_ns, flow))  # kept, so that its id stays its own
        return known[key][1]

    found = []
    for exchange in schedule.order:
        cost = costs.exchange(exchange)
        found.append(Rendezvous(len(exchange.sides), price(exchange.sides)))
    return found


def _program(
    schedule: RankSchedule,
    costs: CostModel,
    numbers: Mapping[str, int],
    sequence_of: Mapping[str, int],
) -> RankProgram:
    position = {op.op_id: i for i, op in enumerate(schedule.ops)}
    streams: dict[str, list[StreamOp]] = {}
    known: dict[int, tuple[OpCost, OpPrice]] = {}
    for at, op in enumerate(schedule.ops):
        price, sequence = None, -1
        if isinstance(op, Communicate) and op.op_id in sequence_of:
            sequence = sequence_of[op.op_id]
        else:
            cost = costs.cost(op)
            if id(cost) not in known:
                known[id(cost)] = cost, _price(cost, numbers)  # kept: its id stays its own
            price = known[id(cost)][1]
        waits = tuple([position[wait] for wait in op.waits])
        before = tuple([position[wait] for wait in op.waits_previous])
        steps = streams.setdefault(str(op.stream), [])
        steps.append(StreamOp(at, price, sequence, waits, before))
    ordered = tuple(tuple(steps) for steps in streams.values())
    return RankProgram(ordered, len(schedule.ops), costs.wait_ns)


def _price(cost: OpCost, numbers: Mapping[str, int]) -> OpPrice:
    if cost.flow is None:
        return OpPrice(cost.fixed_ns, None)
    amounts = {numbers[resource]: amount for resource, amount in cost.flow.amounts}
    return OpPrice(cost.fixed_ns, SharedFlow(cost.flow.alone_ns, amounts))


def _spans(ended: PassTimes) -> PassSpans:
    return PassSpans.model_construct(start_ns=tuple(ended.starts), end_ns=tuple(ended.ends))


def _utilization(schedule: RankSchedule, costs: CostModel, step_ns: float) -> dict[str, float]:
    return {
        resource: total / (costs.capacity[resource] * step_ns)
        for resource, total in _used(schedule, costs).items()
    }


def _least_ns(schedule: RankSchedule, costs: CostModel) -> float:
    """What one pass takes any stream at least, each op alone, and any resource."""
    streams: dict[str, float] = {}
    for op in schedule.ops:
        cost, waits_ns = costs.cost(op), costs.wait_ns if op.waits or op.waits_previous else 0
        alone_ns = cost.fixed_ns + waits_ns + (cost.flow.alone_ns if cost.flow else 0.0)
        streams[str(op.stream)] = streams.get(str(op.stream), 0.0) + alone_ns
    busy_ns = (total / costs.capacity[name] for name, total in _used(schedule, costs).items())
    return max(*streams.values(), *busy_ns, 0.0)


def _used(schedule: RankSchedule, costs: CostModel) -> dict[str, float]:
    """What one pass takes of each resource."""
    used = dict.fromkeys(costs.capacity, 0.0)
    for op in schedule.ops:
        flow = costs.cost(op).flow
        for resource, amount in flow.amounts if flow else ():
            used[resource] += amount
    return used
