"""From a cell's plan and its runs to what it found."""

from collections.abc import Sequence

from benchmarks.gpu.cells.compact import compact_timelines
from benchmarks.gpu.cells.floors import kind_times
from benchmarks.gpu.cells.plans import PlannedCell, Short, extended_s, extended_spread_s
from benchmarks.gpu.device.requests import RanSchedules, RunSchedules
from benchmarks.gpu.jobs.results import CellFound, WholeFound
from twinstream.executor.probe.process import JobFailed
from twinstream.hardware_profiles.cost import PEAK_OF_DTYPE
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.files import read_document
from twinstream.schedule.timeline import RankTimeline

_MOST_PASSES, _FEWEST_PASSES = 5, 2
_LONG_S = 30.0  # of all passes of both schedules
_OVERHEAD_S = {"cpu": 4.0, "cuda": 9.0}  # proof and filling of one schedule


def runs_of(planned: PlannedCell) -> RunSchedules:
    """The short schedules: one cold pass, one whose ops are timed, and between as many as there is
    time for, whose spread is that of the step."""
    short_s = sum(short.step_s for short in planned.shorts)
    passes = max(_FEWEST_PASSES, min(_MOST_PASSES, int(_LONG_S / short_s)))
    return RunSchedules(tuple((short.schedule, passes) for short in planned.shorts))


def whole_run_of(whole: Short) -> RunSchedules:
    """The whole step, cold and once more."""
    return RunSchedules(((whole.schedule, _FEWEST_PASSES),))


def expected_s(runs: RunSchedules, parts: Sequence[Short], backend: str) -> float:
    """What the runs of these parts should take, by the prediction."""
    passes = [num_passes for _, num_passes in runs.runs]
    predicted = sum(n * part.step_s for n, part in zip(passes, parts, strict=True))
    return 1.15 * predicted + _OVERHEAD_S[backend] * len(parts)


def whole_found(ran: RanSchedules) -> WholeFound:
    """
    Raises:
        JobFailed: a loss is not finite, so that nothing that was timed counts.
    """
    _require_losses(ran)
    (run,) = ran.runs
    return WholeFound(step_s=run.timeline.step_ns / 1e9, losses=run.losses, states=run.states)


def _require_losses(ran: RanSchedules) -> None:
    if not all(0.0 < loss < 1e3 for run in ran.runs for loss in run.losses):
        raise JobFailed(f"losses are {[run.losses for run in ran.runs]}: the run is wrong")


def cell_found(
    planned: PlannedCell, ran: RanSchedules, machine: Machine
) -> tuple[CellFound, dict[str, object]]:
    """What the cell found, and the compact timelines of its longer short pass.

    Raises:
        JobFailed: a loss is not finite, or more rounds took no longer, so that nothing that was
            timed counts.
    """
    _require_losses(ran)
    few, more = ran.runs
    losses = [run.losses[0] for run in ran.runs]
    first, second = planned.shorts
    rounds = first.rounds, second.rounds
    seconds = few.timeline.step_ns / 1e9, more.timeline.step_ns / 1e9
    if seconds[1] <= seconds[0] and planned.whole is None:
        raise JobFailed(
            f"{rounds[1]} rounds took {seconds[1]:.3g} s and {rounds[0]} took {seconds[0]:.3g} s: "
            "what disturbed the machine is larger than a round, and the step cannot be extended "
            "from these"
        )
    spreads = few.timeline.spread_ns / 1e9, more.timeline.spread_ns / 1e9
    whole_rounds = planned.workload.rounds_per_step
    measured_s = extended_s(whole_rounds, rounds, seconds) if seconds[1] > seconds[0] else None
    schedule = read_document(RankSchedule, second.schedule)
    predicted = read_document(RankTimeline, second.predicted)
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
        extended_step_s=measured_s,
        extended_spread_s=extended_spread_s(whole_rounds, rounds, spreads)
        if any(spreads)
        else None,
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
        states=(*few.states, *more.states),
    )
    return cell, compact_timelines(schedule, predicted, more.timeline)
