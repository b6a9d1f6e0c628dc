"""A cluster's profile from ranks that ran here: kernels fitted, exchanges as measured."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from twinstream.fidelity.timeline_fit import MeasuredRun, fit_timelines
from twinstream.hardware_profiles.calibration.fitting import Fit
from twinstream.hardware_profiles.clusters.curves import Collective, CollectiveCurve, Sums
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.hardware_profiles.schema import Machine, Number
from twinstream.schedule.analysis.comparison import by_rank
from twinstream.schedule.document import RankClass, RankSchedule, Schedule
from twinstream.schedule.ops import Communicate, Compute
from twinstream.schedule.timeline import PassSpans, RankTimeline, Timeline
from twinstream.simulator.network_costs import sums_of
from twinstream.simulator.replay import simulate_rank

_RATES = ("peak_bf16_flop_per_s", "peak_fp32_flop_per_s", "hbm_bytes_per_s", "launch_latency_ns")
MeasuredRanks = tuple[Schedule, Timeline]
_Series = tuple[Collective, int, Sums | None]  # what is said, among how many ranks, who sums


@dataclass(frozen=True)
class RanksFit:
    """The fit of the kernels, the node's profile with them, and the cluster of such nodes."""

    kernels: Fit
    machine: Machine
    cluster: Cluster


def fit_ranks(base: Machine, runs: Sequence[MeasuredRanks], name: str, told: str) -> RanksFit:
    """The profile of one node whose processes were the ranks.

    Kernels and copies are fitted to what they took while all ranks ran, so that a core which
    several share is in their times. An exchange takes the median from when its last side had come
    until its last was through; of each size its own, so other sizes are read off a line between.

    Args:
        base: the profile to start from; `probe` measures one.
        told: what was measured and when, for the source of each number.

    Raises:
        CalibrationError: runs are of different numbers of ranks, or there is none.
        TimelineMismatch: a timeline is of another schedule.
    """
    sizes = sorted({schedule.mesh.size for schedule, _ in runs})
    if len(sizes) != 1:
        raise CalibrationError(
            f"runs of {', '.join(map(str, sizes)) or 'no'} ranks: cores are shared otherwise with "
            "each number of ranks, so a profile is of one"
        )
    cut = [by_rank(schedule, timeline) for schedule, timeline in runs]
    silent = [
        _silent(schedule.of(one), timeline.classes[one.name])
        for schedule, timeline in cut
        for one in schedule.classes
    ]
    (size,) = sizes
    factor = _share_of_cores(base, silent)
    fit = fit_timelines(_slowed(base, factor, f"{told}: {size} ranks share the cores"), silent)
    machine = _node(fit.machine(f"{name}_node", told), size)
    cluster = Cluster(
        name=name,
        description=f"One machine whose {size} processes are the ranks, kernels {factor:.2f} times "
        f"as long as by profile '{base.name}'",
        machine=machine.name,
        gpus_per_node=Number(value=size, kind="measured", source=told),
        most_nodes=Number(value=1, kind="measured", source=told),
        compute_lost=Number(
            value=0,
            kind="assumed",
            source="kernels were timed while ranks spoke: it is in their times",
        ),
        curves=measured_curves(cut, told),
    )
    return RanksFit(fit, machine, cluster)


def measured_curves(runs: Sequence[MeasuredRanks], told: str) -> tuple[CollectiveCurve, ...]:
    """A table for each collective, number of ranks and maker of sums, of medians by size.

    Args:
        runs: on one machine, each with a class for each rank.
        told: what was measured and when, for the source of each curve.
    """
    return tuple(
        CollectiveCurve(
            collective=collective, ranks=ranks, ranks_per_node=ranks, sums=sums,
            points=tuple((size, float(median(times))) for size, times in sorted(by_size.items())),
            least_bytes=min(by_size), most_bytes=max(by_size), kind="measured",
            source=f"{told}: medians from the last side's coming to the end",
        )
        for (collective, ranks, sums), by_size in sorted(exchange_times(runs).items(), key=str)
    )  # fmt: skip


def curve_told(curve: CollectiveCurve) -> str:
    """A curve's points on one line.

    >>> curve_told(CollectiveCurve(collective="all_reduce", ranks=2, ranks_per_node=2,
    ...     sums="library", points=((4096, 2500.0),), least_bytes=4096, most_bytes=4096,
    ...     kind="measured", source="an example"))
    'all-reduce of 2 ranks (library): 4,096 bytes 2 us'
    """
    points = ", ".join(f"{size:,.0f} bytes {ns / 1e3:,.0f} us" for size, ns in curve.points)
    sums = "" if curve.sums is None else f" ({curve.sums.replace('_', ' ')})"
    return f"{curve.collective.replace('_', '-')} of {curve.ranks} ranks{sums}: {points}"


def _share_of_cores(base: Machine, runs: Sequence[MeasuredRun]) -> float:
    """Return how many times as long all kernels together took as the profile says."""
    took = alone = 0.0
    for schedule, timeline in runs:
        predicted = simulate_rank(schedule, base).passes[-1]
        for at, op in enumerate(schedule.ops):
            if isinstance(op, Compute):
                alone += predicted.end_ns[at] - predicted.start_ns[at]
                took += median(one.end_ns[at] - one.start_ns[at] for one in timeline.passes)
    if not alone or not took:
        raise CalibrationError("no rank computes anything: kernels cannot be fitted")
    return took / alone


def _slowed(machine: Machine, factor: float, source: str) -> Machine:
    """Kernels take so many times as long; the fit begins there."""
    changes = {}
    for field in _RATES:
        number = getattr(machine, field)
        if number is not None and number.value is not None:
            value = number.value * factor if field == "launch_latency_ns" else number.value / factor
            changes[field] = number.model_copy(
                update={"value": value, "kind": "fitted", "source": source}
            )
    return machine.model_copy(update=changes)


def _node(machine: Machine, num_ranks: int) -> Machine:
    """Return the node: host DRAM as one of the ranks saw it, times their number."""
    number = machine.host_dram_bytes_per_s
    if number is None or number.value is None:
        return machine
    whole = number.model_copy(
        update={
            "value": number.value * num_ranks,
            "source": f"{number.source}; as one of {num_ranks} ranks sees it, times {num_ranks}",
        }
    )
    return machine.model_copy(update={"host_dram_bytes_per_s": whole})


def _silent(schedule: RankSchedule, timeline: RankTimeline) -> tuple[RankSchedule, RankTimeline]:
    """Both without what is said to other ranks."""
    kept = [at for at, op in enumerate(schedule.ops) if not isinstance(op, Communicate)]
    names = {schedule.ops[at].op_id for at in kept}
    ops = [
        op.model_copy(
            update={
                "waits": tuple(wait for wait in op.waits if wait in names),
                "waits_previous": tuple(wait for wait in op.waits_previous if wait in names),
            }
        )
        for op in (schedule.ops[at] for at in kept)
    ]

    def spans(one: PassSpans) -> PassSpans:
        return PassSpans(
            start_ns=tuple(one.start_ns[at] for at in kept),
            end_ns=tuple(one.end_ns[at] for at in kept),
        )

    line = timeline.model_copy(
        update={
            "op_ids": tuple(op.op_id for op in ops),
            "passes": tuple(map(spans, timeline.passes)),
            "cold": spans(timeline.cold),
        }
    )
    return schedule.model_copy(update={"ops": tuple(ops)}), line


def exchange_times(runs: Sequence[MeasuredRanks]) -> dict[_Series, dict[int, list[int]]]:
    """Ns of every time, by bytes, of everything that is said."""
    found: dict[_Series, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for schedule, timeline in runs:
        classes = {one.name: one for one in schedule.classes}
        for exchange in schedule.order:
            name, op_id = exchange.sides[0]
            op = _op(schedule, classes[name], op_id)
            kind: Collective = "send_recv" if op.shift else op.collective  # type: ignore[assignment]
            ranks = 2 if kind == "send_recv" else len(exchange.sides)
            if ranks < 2:
                continue
            times = found[kind, ranks, sums_of(op)][_size_bytes(schedule.of(classes[name]), op)]
            lines = [timeline.classes[side] for side, _ in exchange.sides]
            at = [
                line.op_ids.index(side[1]) for line, side in zip(lines, exchange.sides, strict=True)
            ]
            for spans in zip(*(line.passes for line in lines), strict=True):
                begun = max(one.start_ns[i] for one, i in zip(spans, at, strict=True))
                ended = max(one.end_ns[i] for one, i in zip(spans, at, strict=True))
                times.append(max(1, ended - begun))
    return found


def _op(schedule: Schedule, one: RankClass, op_id: str) -> Communicate:
    (found,) = (op for op in schedule.of(one).ops if op.op_id == op_id)
    assert isinstance(found, Communicate), "an exchange's side says something"
    return found


def _size_bytes(schedule: RankSchedule, op: Communicate) -> int:
    """The larger of what is given and what is received, as nccl-tests counts."""
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in schedule.tensors}
    given = sum(sizes[o.tensor] for o in op.operands if o.mode != "write")
    made = sum(sizes[o.tensor] for o in op.operands if o.mode != "read")
    return max(given, made)
