"""The answer to a question about a training step: a plan, and what it comes to by the simulator."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

from pydantic import SerializerFunctionWrapHandler, model_serializer

from twinstream.clusters.kernel_sets import why_not_here, why_schedule_not_here
from twinstream.clusters.predict import Prediction, planned_document
from twinstream.clusters.search.found import Candidate, SearchResult
from twinstream.clusters.shared_machine import Place
from twinstream.clusters.timed_step import document_of
from twinstream.cost.bill import Bill
from twinstream.hardware_profiles.clusters.loader import machine_of, place_names
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.cost import call_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.explanation import Explanation, explain, limits_of
from twinstream.measures.metrics import Summary, summarize
from twinstream.measures.uncertainty import Uncertainty, uncertainty_of, uncertainty_of_job
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.planner.request import PlanRequest
from twinstream.schedule.analysis.idle import exposed_communication
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node, facts_html
from twinstream.schedule.ops import Compute
from twinstream.schedule.sizes import gib, rate_text
from twinstream.schedule.timeline import Timeline
from twinstream.schedule.workload import MachineRef, Workload
from twinstream.simulator.replay import simulate

LAYOUT_OF_RANKS = ("pp", "dp", "virtual_stages", "zero", "reduction", "pipeline", "recompute")
LAYOUT_OF_CLUSTERS = tuple(
    name
    for name in Layout.model_fields
    if name not in ("stage_layers", "reduction", "parts", "cp_parts", "cp_exchange", "sliced_norms")
)


class StudyError(TwinstreamError):
    """A value, a name or a target that cannot be used."""


class Step(Node):
    """The figures of a step, without its plan; `layout_text` is "" of one device.

    In JSON `figures` stand beside the others.
    """

    layout: Layout | None
    layout_text: str
    step_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    memory_bytes: int
    host_bytes: int
    num_gpus: int
    shares: Mapping[str, float]
    bill: Bill | None = None
    figures: Mapping[str, Any] = {}

    @model_serializer(mode="wrap")
    def _flat(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = whole(self)
        return {**found.pop("figures"), **found}


class SimulatedStep(NamedTuple):
    """A schedule of one device or of all ranks, and what the simulator makes of it."""

    schedule: Schedule
    timeline: Timeline
    summary: Summary

    @staticmethod
    def of(schedule: Schedule, machine: Machine, cluster: Cluster | None) -> "SimulatedStep":
        """Simulate a schedule on a machine's device, or on GPUs of a cluster."""
        timeline = simulate(schedule, machine, None if schedule.is_one_device else cluster)
        return SimulatedStep(schedule, timeline, summarize(schedule, timeline, machine))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A step that was planned and predicted; bytes are those of the fullest device.

    `bound_s` is what no plan, or layout, can beat, `gap` how far above it the step is; None where
    that is not known. `limits` are what the bound hangs on, `shares` of the step, both where they
    are known; `room_bytes` what the plan may take of device and host memory. `is_known`: the answer
    was given as known. `can_be_refined`: a query with more effort may have a better one.

    `asked` is what was asked of the device, or of each; `machine` and `cluster` are where the step
    is predicted, `assumed` what nobody measured of that. Of several GPUs `candidates` are all
    layouts that were planned, or `searched` is what was looked at; a layout that was predicted
    without a plan of the whole step is a `job`.
    """

    step_s: float
    tokens_per_s: float
    mfu: float
    device_bytes: int
    host_bytes: int
    room_bytes: tuple[int | None, int | None]
    num_gpus: int = 1
    bound_s: float | None
    gap: float | None
    limits: tuple[str, ...] = ()
    shares: Mapping[str, float]
    layout: Layout | None = None
    is_known: bool
    can_be_refined: bool = False
    asked: PlanRequest
    machine: Machine
    cluster: Cluster | None = None
    assumed: str = ""
    workload: Workload | None = None
    candidates: tuple[Candidate, ...] = ()
    searched: SearchResult | None = None
    job: Job | None = None
    planned: SimulatedStep | None = None

    @staticmethod
    def of_plan(schedule: Schedule, asked: PlanRequest, *, is_known: bool) -> "Answer":
        """A schedule on the machine of a request, whatever it was planned for."""
        machine, caps, bound = asked.machine, schedule.caps, schedule.bound
        planned = SimulatedStep.of(schedule, machine, None)
        found = planned.summary
        limits = () if bound is None or found.lower_bound_s is None else limits_of(bound)
        return Answer(
            step_s=found.step_time_s, tokens_per_s=found.tokens_per_s, mfu=found.mfu,
            device_bytes=found.device_peak_bytes, host_bytes=found.host_peak_bytes,
            room_bytes=(caps.device_bytes, caps.host_bytes), bound_s=found.lower_bound_s,
            gap=found.gap, limits=limits, shares={}, is_known=is_known,
            can_be_refined=asked.choices.effort == "quick", asked=asked, machine=machine,
            workload=schedule.workload, planned=planned,
        )  # fmt: skip

    @staticmethod
    def of_prediction(
        job: Job, cluster: Cluster, found: Prediction, asked: PlanRequest, *, is_known: bool = True,
        searched: SearchResult | None = None,
    ) -> "Answer":  # fmt: skip
        """A layout on GPUs of a cluster; without a search there is no bound."""
        least_s = None if searched is None else searched.least_bound_s
        return Answer(
            step_s=found.step_s, tokens_per_s=found.tokens_per_s, mfu=found.mfu,
            device_bytes=found.memory_bytes, host_bytes=found.host_bytes,
            room_bytes=(found.room_bytes, None), num_gpus=found.num_gpus, bound_s=least_s,
            gap=found.step_s / least_s - 1 if least_s else None, shares=dict(found.shares),
            layout=job.layout, is_known=is_known, asked=asked, machine=machine_of(cluster),
            cluster=cluster, searched=searched, job=job,
        )  # fmt: skip

    @staticmethod
    def of_ranks(
        searched: SearchResult, place: Place, cluster: Cluster | None, asked: PlanRequest, *,
        is_known: bool,
    ) -> "Answer":  # fmt: skip
        """The fastest layout of ranks that run here, planned whole; a cluster that was asked for by
        name is what the schedule is for."""
        best = searched.best[0]
        assert best.schedule is not None and best.timeline is not None, "it is planned"
        schedule, bound_s = best.schedule, searched.least_bound_s or None
        if cluster is not None:
            made_for = MachineRef(name=cluster.name, content_hash=cluster.name)
            schedule = schedule.model_copy(update={"machine": made_for})
        found = summarize(schedule, best.timeline, place.machine)
        return Answer(
            step_s=found.step_time_s, tokens_per_s=found.tokens_per_s, mfu=found.mfu,
            device_bytes=found.device_peak_bytes, host_bytes=found.host_peak_bytes,
            room_bytes=(asked.caps.device_bytes, asked.caps.host_bytes), num_gpus=found.num_gpus,
            bound_s=bound_s, gap=found.step_time_s / bound_s - 1 if bound_s else None,
            shares=found.mean_fraction, layout=best.layout, is_known=is_known, asked=asked,
            machine=place.machine, cluster=place.cluster, assumed=place.assumed,
            workload=best.job.step, candidates=searched.candidates,
            planned=SimulatedStep(schedule, best.timeline, found),
        )  # fmt: skip

    @property
    def layout_text(self) -> str:
        """The layout in words; "" of one device."""
        return "" if self.layout is None else self.layout.text

    @property
    def place_names(self) -> tuple[str, ...]:
        """The names by which a price of its machine or cluster may be given."""
        if self.job is not None and self.cluster is not None:
            return place_names(self.cluster)
        of_cluster = () if self.cluster is None else (self.cluster.name,)
        return *of_cluster, *place_names(self.machine)

    @cached_property
    def simulated(self) -> SimulatedStep:
        """The plan of the whole step, made now where it was predicted without, and its timeline."""
        if self.planned is not None:
            return self.planned
        assert self.job is not None and self.cluster is not None, "it is planned, or a job"
        best = None if self.searched is None else self.searched.best[0]
        if best is not None and best.schedule is not None and best.job is self.job:
            schedule: Schedule = best.schedule
        else:
            schedule = planned_document(self.job, self.cluster, self.asked.caps)
        return SimulatedStep.of(schedule, self.machine, self.cluster)

    @property
    def schedule(self) -> Schedule:
        """The plan, of all ranks; of a single device its own."""
        return self.simulated.schedule

    def is_plan(self, schedule: Schedule) -> bool:
        """Return whether the plan is a schedule that was known before."""
        found = None if self.layout is not None else self.planned
        return found is not None and found.schedule.ops is schedule.ops

    @property
    def timeline(self) -> Timeline:
        """The simulated timeline of the plan."""
        return self.simulated.timeline

    @property
    def summary(self) -> Summary:
        """Headline figures of the plan."""
        return self.simulated.summary

    @cached_property
    def uncertainty(self) -> Uncertainty:
        """The expected error of the prediction."""
        if self.job is not None and self.cluster is not None:
            document = partial(document_of, self.job, self.cluster)
            return uncertainty_of_job(self.job, self.machine, document)
        if self.layout is None:
            return uncertainty_of(self.machine, self.schedule)
        assert self.summary.uncertainty is not None, "it is predicted"
        return self.summary.uncertainty

    @cached_property
    def explanation(self) -> Explanation:
        """Why the step of one device takes as long as it does."""
        return explain(self.schedule, self.timeline, self.machine)

    @property
    def why_not_here(self) -> str | None:
        """The reason why `run` does not run it on this machine; None where it does."""
        if self.layout is None:
            return why_schedule_not_here(self.schedule.only)
        job, asked = self.job, self.asked
        recipe = asked.recipe if job is None else job.recipe
        return why_not_here(asked.spec, recipe, self.layout)

    @property
    def compute_waits(self) -> float:
        """The share of the step in which compute waits."""
        if self.layout is None:
            return sum(self.explanation.compute_idle_fraction.values())
        return 1.0 - self.shares["compute"]

    @property
    def figures(self) -> dict[str, Any]:
        """All figures by the names of a sweep's columns."""
        error = {
            "expected_error_mean": self.uncertainty.symmetric,
            "expected_error_kind": self.uncertainty.kind,
        }
        if self.layout is not None:
            return self._of_layout(self.layout, error)
        schedule = self.schedule
        return {
            **self.summary.model_dump(),
            "model_tflop_per_s": schedule.model_flops / self.step_s / 1e12,
            "limits": "; ".join(self.limits),
            "idle_fraction": self.compute_waits,
            **self._cut,
            **error,
        }

    def _of_layout(self, layout: Layout, error: Mapping[str, Any]) -> dict[str, Any]:
        names = ("num_layouts", "num_fit", "num_simulated")
        counts = {name: getattr(self.searched, name, None) for name in names}
        of_plan: dict[str, float] = {"host_bytes": self.host_bytes}
        if self.planned is not None:
            of_plan["recompute_fraction"] = self.planned.summary.recompute_fraction
        fields = LAYOUT_OF_RANKS if self.job is None else LAYOUT_OF_CLUSTERS
        return {
            "layout": self.layout_text,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_gpu": self.tokens_per_s / self.num_gpus,
            "mfu": self.mfu,
            "memory_bytes": self.device_bytes,
            "room_bytes": self.room_bytes[0],
            "bound_s": self.bound_s,
            "gap": self.gap,
            "compute_share": self.shares["compute"],
            "communication_share": exposed_communication(self.shares),
            "bubble_share": self.shares.get("bubble", 0.0),
            **error,
            **{f"layout.{name}": getattr(layout, name) for name in fields},
            **(counts if self.job is not None else of_plan | self._cut),
        }

    @property
    def _cut(self) -> dict[str, Any]:
        """Rounds and chunks of the step of a replica."""
        work = self.workload
        replicas = 1 if self.layout is None else self.layout.dp
        return {} if work is None else {
            "rounds_per_step": work.rounds_per_step // replicas,
            "chunks_per_round": work.chunks_per_round,
            "planned_chunk_tokens": work.chunk_tokens,
        }  # fmt: skip

    def records(self) -> list[dict[str, object]]:
        """One row, with all figures."""
        return [dict(self.figures)]

    def _repr_html_(self) -> str:
        error = self.uncertainty
        bound = "not known"
        if self.bound_s is not None and self.gap is not None:
            bound = f"{self.bound_s:.4g} s; the step is {self.gap:.1%} above it"
        facts = {
            "step": f"{self.step_s:.4g} s",
            "tokens/s": f"{rate_text(self.tokens_per_s)} ({error.short}: {error.why})",
            "MFU": f"{self.mfu:.1%}",
            "bound": bound,
            "limited by": ", ".join(self.limits),
            "device, host memory": f"{gib(self.device_bytes)}, {gib(self.host_bytes)}",
        }
        where = f"{self.num_gpus:,} GPUs, {self.layout_text}" if self.layout else "one device"
        return facts_html(f"Step on {where}", facts)

    def compute_limit(self) -> float:
        """Return the tokens/s if compute never waited, and nothing were recomputed on one device.

        Raises:
            StudyError: computing takes no time.
        """
        if self.layout is not None:
            return self.tokens_per_s / self.shares["compute"]
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

    def step(self, bill: Bill | None = None, *, whole: bool = False) -> Step:
        """The figures of every step; `whole` with all that there are."""
        return Step(
            layout=self.layout, layout_text=self.layout_text, step_s=self.step_s,
            tokens_per_s=self.tokens_per_s, mfu=self.mfu,
            tokens_per_s_per_gpu=self.tokens_per_s / self.num_gpus,
            memory_bytes=self.device_bytes, host_bytes=self.host_bytes, num_gpus=self.num_gpus,
            shares=dict(self.shares), bill=bill, figures=self.figures if whole else {},
        )  # fmt: skip
