"""Predict when every op of every class of ranks runs."""

from collections.abc import Mapping

from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.errors import NoTimeError
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.analysis.periodic import PassBoundaries, StepTime
from twinstream.schedule.cluster.cluster_schedule import ClusterSchedule
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import Communicate, Compute
from twinstream.schedule.timeline import PassSpans, Provenance, Timeline
from twinstream.simulator.cluster.costs import ClusterCostModel, ClusterCosts, Demand
from twinstream.simulator.cluster.pool import SharedFlow
from twinstream.simulator.cluster.run import ClassPass, ClusterRun, Meeting, Price, Program, Step

_MOST_PASSES = 8


def simulate_cluster(
    schedule: ClusterSchedule,
    cluster: Cluster,
    machine: Machine,
    machines: Mapping[str, Machine] | None = None,
) -> ClusterTimeline:
    """Predict the timelines of all classes on a cluster.

    Args:
        machine: the profile of a node.
        machines: of classes (by name) that are not like the others: stragglers.

    Raises:
        StuckError: ranks wait for one another for ever.
        MissingNumberError, MissingNetworkNumberError: a profile lacks a number that an op needs.
    """
    return replay_cluster(
        schedule, ClusterCosts(schedule, cluster, machine, machines), cluster.name
    )


def replay_cluster(
    schedule: ClusterSchedule, costs: ClusterCostModel, where: str, num_passes: int | None = None
) -> ClusterTimeline:
    """Run passes until the step time is known, at most 8, or exactly `num_passes`."""
    run = _run_of(schedule, costs, num_passes or _MOST_PASSES)
    boundaries, spans, step = PassBoundaries(), [], None
    while step is None:
        ended = run.next_pass()
        spans.append(ended)
        ends = [end for one in ended for end in one.ends]
        step = boundaries.add(ends, _anchor_ns(schedule, ended))
        if step is None and len(spans) == (num_passes or _MOST_PASSES):
            step = _last_step(schedule, spans)
    if not step.step_ns:
        raise NoTimeError(machine=where)
    cold_ns = max(end for one in spans[0] for end in one.ends)
    provenance = Provenance(kind="simulated", where=where)
    timelines = {
        one.name: _timeline(schedule.of(one), [each[number] for each in spans], step, provenance)
        for number, one in enumerate(schedule.classes)
    }
    return ClusterTimeline.made(
        schema_version=1, classes=timelines, step_ns=step.step_ns, spread_ns=step.spread_ns,
        period_passes=step.period_passes, cold_ns=cold_ns, ranks={}, clock_error_ns=0,
        provenance=provenance,
    )  # fmt: skip


def cold_step_ns(schedule: ClusterSchedule, costs: ClusterCostModel) -> int:
    """How long one step takes from idle streams to idle streams."""
    ended = _run_of(schedule, costs, 1).next_pass()
    return max(end for one in ended for end in one.ends)


def _run_of(schedule: ClusterSchedule, costs: ClusterCostModel, num_passes: int) -> ClusterRun:
    numbering = _Numbering(schedule, costs)
    exchange_of = {
        side: number for number, exchange in enumerate(schedule.order) for side in exchange.sides
    }
    meetings = []
    for exchange in schedule.order:
        demand = costs.exchange(exchange)
        key = id(demand), tuple(name for name, _ in exchange.sides)
        if key not in numbering.exchanges:
            amounts: dict[int, float] = {}
            for (name, _), drawn in zip(exchange.sides, demand.sides, strict=False):
                for resource, amount in drawn:
                    number = numbering.number(name, resource)
                    amounts[number] = amounts.get(number, 0.0) + amount
            flow = SharedFlow(demand.alone_ns, amounts) if demand.alone_ns else None
            numbering.exchanges[key] = (demand, Price(demand.fixed_ns, flow))
        meetings.append(Meeting(len(exchange.sides), numbering.exchanges[key][1]))
    programs = [
        _program(schedule.of(one), number, one.name, numbering, exchange_of)
        for number, one in enumerate(schedule.classes)
    ]
    return ClusterRun(programs, meetings, numbering.capacity, num_passes)


class _Numbering:
    """Resources of all classes, numbered, and prices by what they were made of."""

    def __init__(self, schedule: ClusterSchedule, costs: ClusterCostModel) -> None:
        self.costs = costs
        self.capacity: list[float] = []
        self._numbers: dict[tuple[str, str], int] = {}
        for place, one in enumerate(schedule.classes):
            for resource, most in costs.capacity(place).items():
                self._numbers[one.name, resource] = len(self.capacity)
                self.capacity.append(most)
        self.exchanges: dict[tuple[int, tuple[str, ...]], tuple[object, Price]] = {}

    def number(self, name: str, resource: str) -> int:
        return self._numbers[name, resource]

    def price(self, name: str, demand: Demand) -> Price:
        flow = None
        if demand.alone_ns:
            amounts = {self.number(name, resource): amount for resource, amount in demand.amounts}
            flow = SharedFlow(demand.alone_ns, amounts)
        return Price(demand.fixed_ns, flow)


def _program(
    schedule: Schedule,
    number: int,
    name: str,
    numbering: _Numbering,
    exchange_of: Mapping[tuple[str, str], int],
) -> Program:
    position = {op.op_id: i for i, op in enumerate(schedule.ops)}
    streams: dict[str, list[Step]] = {}
    known: dict[object, Price] = {}
    for at, op in enumerate(schedule.ops):
        price = None
        exchange = -1
        if isinstance(op, Communicate):
            exchange = exchange_of[name, op.op_id]
        else:
            key = op.call if isinstance(op, Compute) else op.op_id
            price = known.get(key)
            if price is None:
                price = known[key] = numbering.price(name, numbering.costs.demand(number, op))
        waits = tuple([position[wait] for wait in op.waits])
        before = tuple([position[wait] for wait in op.waits_previous])
        steps = streams.setdefault(op.stream.queue, [])
        steps.append(Step(at, price, exchange, waits, before))
    ordered = tuple(tuple(steps) for steps in streams.values())
    return Program(ordered, len(schedule.ops), numbering.costs.wait_ns(number))


def _timeline(
    schedule: Schedule, passes: list[ClassPass], step: StepTime, provenance: Provenance
) -> Timeline:
    def spans(one: ClassPass) -> PassSpans:
        return PassSpans.model_construct(start_ns=tuple(one.starts), end_ns=tuple(one.ends))

    return Timeline.model_construct(
        op_ids=tuple(op.op_id for op in schedule.ops),
        passes=tuple(spans(one) for one in passes[-2:]),
        cold=spans(passes[0]),
        step_ns=step.step_ns,
        spread_ns=step.spread_ns,
        period_passes=step.period_passes,
        utilization={},
        provenance=provenance,
    )


def _anchor_ns(schedule: ClusterSchedule, ended: list[ClassPass]) -> int:
    """End of the last compute op of all classes."""
    return max(
        one.ends[at]
        for rank_class, one in zip(schedule.classes, ended, strict=True)
        for at, op in enumerate(schedule.of(rank_class).ops)
        if isinstance(op, Compute)
    )


def _last_step(schedule: ClusterSchedule, passes: list[list[ClassPass]]) -> StepTime:
    """From pass to pass, without a proof that it repeats; of a single pass its length."""
    anchors = [_anchor_ns(schedule, ended) for ended in passes[-2:]]
    span = anchors[-1] - anchors[0] if len(anchors) > 1 else anchors[0]
    return StepTime(float(span), 0.0, None)
