"""A step on one device as an answer: a schedule, and what it comes to by the simulator."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from twinstream.hardware_profiles.clusters.loader import place_names
from twinstream.hardware_profiles.cost import call_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.explanation import Explanation, explain, limits_of
from twinstream.measures.metrics import Summary, summarize
from twinstream.measures.uncertainty import Uncertainty, uncertainty_of
from twinstream.planner.request import PlanRequest
from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import Compute
from twinstream.schedule.timeline import Timeline
from twinstream.simulator.replay import simulate
from twinstream.study.query import Answer, StudyError


@dataclass(frozen=True, kw_only=True)
class PlannedStep(Answer):
    """A schedule and its prediction on a machine; `asked` is what its query asked for."""

    machine: Machine
    schedule: Schedule
    timeline: Timeline
    summary: Summary
    asked: PlanRequest

    @staticmethod
    def predicted(schedule: Schedule, asked: PlanRequest, *, is_known: bool) -> "PlannedStep":
        """The schedule on the machine of a request, whatever it was planned for."""
        machine, caps, bound = asked.machine, schedule.caps, schedule.bound
        timeline = simulate(schedule, machine)
        found = summarize(schedule, timeline, machine)
        limits = () if bound is None or found.lower_bound_s is None else limits_of(bound)
        return PlannedStep(
            step_s=found.step_time_s, tokens_per_s=found.tokens_per_s, mfu=found.mfu,
            device_bytes=found.device_peak_bytes, host_bytes=found.host_peak_bytes,
            room_bytes=(caps.device_bytes, caps.host_bytes), bound_s=found.lower_bound_s,
            gap=found.gap, limits=limits, shares={}, is_known=is_known,
            can_be_refined=asked.choices.effort == "quick", machine=machine, schedule=schedule,
            timeline=timeline, summary=found, asked=asked,
        )  # fmt: skip

    @property
    def place_names(self) -> tuple[str, ...]:
        return place_names(self.machine)

    @property
    def uncertainty(self) -> Uncertainty:
        return uncertainty_of(self.machine, self.schedule)

    @cached_property
    def explanation(self) -> Explanation:
        """Why the step takes as long as it does."""
        return explain(self.schedule, self.timeline, self.machine)

    @property
    def compute_waits(self) -> float:
        return sum(self.explanation.compute_idle_fraction.values())

    @property
    def figures(self) -> dict[str, Any]:
        work, schedule = self.schedule.workload, self.schedule
        uncertainty = self.uncertainty
        return {
            **self.summary.model_dump(),
            "model_tflop_per_s": schedule.model_flops / self.step_s / 1e12,
            "limits": "; ".join(self.limits),
            "idle_fraction": self.compute_waits,
            "rounds_per_step": work.rounds_per_step,
            "chunks_per_round": work.chunks_per_round,
            "planned_chunk_tokens": work.chunk_tokens,
            "expected_error_mean": uncertainty.mean,
            "expected_error_kind": uncertainty.kind,
        }

    def compute_limit(self) -> float:
        """Tokens/s if compute never waited and nothing were recomputed: all tasks, each alone."""
        schedule, machine = self.schedule, self.machine
        alone_ns = {name: call_alone_ns(call, machine) for name, call in schedule.calls.items()}
        total_ns = sum(
            alone_ns[op.call]
            for op in schedule.ops
            if isinstance(op, Compute)
            and op.label.kind != "block_recompute"
            and schedule.calls[op.call].processor == "device"
        )
        if not total_ns:
            raise StudyError(
                f"computing takes no time on machine '{machine.name}', so that it limits nothing: "
                "state its peak_bf16_flop_per_s"
            )
        return schedule.workload.tokens_per_step / total_ns * 1e9
