"""What a pass's ops take, beside the least that their bytes and FLOPs could take."""

from benchmarks.gpu.jobs.results import KindTime
from twinstream.hardware_profiles.cost import PEAK_OF_DTYPE
from twinstream.hardware_profiles.schema import Machine, is_compute_unit
from twinstream.measures.residence import copied_sizes
from twinstream.schedule.analysis.comparison import compare_rank, kind_of
from twinstream.schedule.cost import Work
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Compute
from twinstream.schedule.timeline import RankTimeline


def kind_times(
    schedule: RankSchedule, machine: Machine, predicted: RankTimeline, measured: RankTimeline
) -> tuple[KindTime, ...]:
    """Busy time by kind of op, longest first; what the host feeds and takes is left out."""
    floors = _floors_ns(schedule, machine)
    kinds = [
        KindTime(
            name=group.name,
            num_ops=group.num_ops,
            predicted_ns=group.busy_ns.predicted,
            measured_ns=group.busy_ns.measured,
            floor_ns=floors[group.name],
        )
        for group in compare_rank(schedule, predicted, measured).kinds
        if group.name in floors
    ]
    return tuple(sorted(kinds, key=lambda kind: -kind.measured_ns))


def _floors_ns(schedule: RankSchedule, machine: Machine) -> dict[str, float]:
    per_call = {
        name: sum(work_floor_ns(work, machine) for work in call.cost)
        for name, call in schedule.calls.items()
    }
    floors: dict[str, float] = {}
    for op in schedule.ops:
        if isinstance(op, Compute):
            name = kind_of(op)
            floors[name] = floors.get(name, 0.0) + per_call[op.call]
    for copy, size_bytes in copied_sizes(schedule):
        queue = copy.stream.queue
        field = "pcie_d2h_bytes_per_s" if queue.startswith("d2h") else "pcie_h2d_bytes_per_s"
        name = kind_of(copy)
        floors[name] = floors.get(name, 0.0) + size_bytes * 1e9 / machine.rate(field)
    return floors


def work_floor_ns(work: Work, machine: Machine) -> float:
    """The longer of its FLOPs at the best matrix rate and its bytes at the rate of HBM."""
    memory_ns = work.hbm_bytes * 1e9 / machine.rate("hbm_bytes_per_s")
    if not is_compute_unit(work.unit):
        return memory_ns
    return max(memory_ns, work.flops * 1e9 / machine.rate(PEAK_OF_DTYPE[work.dtype]))
