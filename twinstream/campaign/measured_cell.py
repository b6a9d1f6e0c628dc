"""From a cell's plan and its runs to what it found."""

from twinstream.campaign.compact import compact_timelines
from twinstream.campaign.floors import kind_times
from twinstream.campaign.plans import PlannedCell, extended_s
from twinstream.campaign.requests import RanSchedules, RunSchedules
from twinstream.campaign.results import CellFound
from twinstream.campaign.worker import JobFailed
from twinstream.hardware_profiles.cost import PEAK_OF_DTYPE
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import read_document
from twinstream.schedule.timeline import Timeline

_MOST_PASSES, _FEWEST_PASSES = 3, 2
_LONG_S = 30.0  # passes beyond so many seconds in all are run once cold and once timed only
_OVERHEAD_S = {"cpu": 4.0, "cuda": 9.0}  # proof and filling of one schedule


def runs_of(planned: PlannedCell) -> RunSchedules:
    """The short schedules, then the whole one if it is to be run; each with one cold pass."""
    short_s = sum(short.step_s for short in planned.shorts)
    passes = _MOST_PASSES if _MOST_PASSES * short_s <= _LONG_S else _FEWEST_PASSES
    runs = [(short.schedule, passes) for short in planned.shorts]
    if planned.whole is not None:
        runs.append((planned.whole.schedule, _FEWEST_PASSES))
    return RunSchedules(tuple(runs))


def expected_s(planned: PlannedCell, backend: str) -> float:
    """What the runs should take, by the prediction."""
    parts = [*planned.shorts, *([planned.whole] if planned.whole else [])]
    passes = [num_passes for _, num_passes in runs_of(planned).runs]
    predicted = sum(n * part.step_s for n, part in zip(passes, parts, strict=True))
    return 1.15 * predicted + _OVERHEAD_S[backend] * len(parts)


def cell_found(
    planned: PlannedCell, ran: RanSchedules, machine: Machine
) -> tuple[CellFound, dict[str, object]]:
    """What the cell found, and the compact timelines of its longer short pass.

    Raises:
        JobFailed: a loss is not finite, so that nothing that was timed counts.
    """
    few, more = ran.runs[:2]
    losses = [run.losses[0] for run in ran.runs]
    if not all(0.0 < loss < 1e3 for run in ran.runs for loss in run.losses):
        raise JobFailed(f"losses are {[run.losses for run in ran.runs]}: the run is wrong")
    first, second = planned.shorts
    rounds = first.rounds, second.rounds
    seconds = few.timeline.step_ns / 1e9, more.timeline.step_ns / 1e9
    schedule = read_document(Schedule, second.schedule)
    predicted = read_document(Timeline, second.predicted)
    memory = [run.timeline.provenance.device_memory for run in ran.runs]
    used = [found.peak_bytes for found in memory if found is not None]
    host_cost = more.timeline.provenance.host_cost
    cell = CellFound(
        tokens_per_step=planned.workload.tokens_per_step,
        workload=planned.workload_line,
        policy=planned.policy,
        machine=f"{machine.name} {machine.content_hash}",
        predicted_step_s=planned.predicted_step_s,
        predicted_extended_s=planned.predicted_extended_s,
        bound_step_s=planned.bound_step_s,
        measured_step_s=extended_s(planned.workload.rounds_per_step, rounds, seconds),
        whole_step_s=ran.runs[2].timeline.step_ns / 1e9 if len(ran.runs) > 2 else None,
        rounds_measured=rounds,
        short_steps_s=seconds,
        model_flops=planned.model_flops,
        executed_flops=planned.executed_flops,
        peak_flop_per_s=machine.number(PEAK_OF_DTYPE[str(schedule.model.spec["dtype"])]),
        device_cap_bytes=planned.device_cap_bytes,
        device_used_bytes=max(used) if used else None,
        host_arena_bytes=planned.host_arena_bytes,
        host_ns_per_op=host_cost.ns_per_op if host_cost else None,
        losses=tuple(losses),
        kinds=kind_times(schedule, machine, predicted, more.timeline),
    )
    return cell, compact_timelines(schedule, predicted, more.timeline)
