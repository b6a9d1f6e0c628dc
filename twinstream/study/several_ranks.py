"""A training step on ranks that twinstream runs as a query: the fastest pipeline and replicas."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from twinstream.clusters.choosing import (
    ChosenLayout,
    RanksQuestion,
    rank_caps,
    workloads_of_ranks,
)
from twinstream.clusters.kernel_sets import recipe_refusal, why_not_here
from twinstream.clusters.search.question import OPEN, value_fault
from twinstream.clusters.shared_machine import Place, cores_here, place_here
from twinstream.hardware_profiles.clusters.loader import machine_of, place_names
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.metrics import Summary, summarize
from twinstream.measures.uncertainty import Uncertainty
from twinstream.models.parallel.layout import RUN_PIPELINES, Layout, LayoutError
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.planner.planner import gc_paused
from twinstream.planner.request import PlanRequest, TrainingStep
from twinstream.schedule.document import Schedule
from twinstream.schedule.timeline import Timeline
from twinstream.schedule.workload import MachineRef
from twinstream.study.layouts import ChoiceOfLayouts, LayoutAnswer
from twinstream.study.one_device import DeviceQuery
from twinstream.study.query import (
    MEMORY_CAPS,
    STEP_COUNTS,
    Answer,
    Loader,
    Property,
    StudyError,
    Subject,
    Values,
)

_LAYOUT = ("pp", "dp", "virtual_stages", "zero", "reduction", "pipeline", "recompute")
_PLACE = ("model", "machine", "cluster", "ranks")
_OF_DEVICE = (
    *STEP_COUNTS, *MEMORY_CAPS, "kernels", "attention", "optimizer_state", "gradients", "lora",
    "freeze", "base", "optim", "loss",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RanksStep(LayoutAnswer):
    """The layout that was chosen, where it is predicted, and its schedule of all ranks."""

    spec: ModelSpec
    recipe: Recipe
    chosen: ChosenLayout
    place: Place
    schedule: Schedule
    summary: Summary

    @property
    def place_names(self) -> tuple[str, ...]:
        return self.place.cluster.name, *place_names(self.place.machine)

    @property
    def timeline(self) -> Timeline:
        """What is predicted of every class of ranks."""
        return self.chosen.predicted

    @property
    def why_not_here(self) -> str | None:
        """What stands in the way of running it on this machine; None where nothing does."""
        return why_not_here(self.spec, self.recipe, self.chosen.layout)

    @property
    def uncertainty(self) -> Uncertainty:
        assert self.summary.uncertainty is not None, "it is predicted"
        return self.summary.uncertainty

    @property
    def figures(self) -> dict[str, Any]:
        chosen = self.chosen
        return self.figures_of(_LAYOUT) | {
            "host_bytes": self.host_bytes,
            "recompute_fraction": self.summary.recompute_fraction,
            "rounds_per_step": chosen.workload.rounds_per_step // chosen.layout.dp,
            "chunks_per_round": chosen.workload.chunks_per_round,
            "planned_chunk_tokens": chosen.workload.chunk_tokens,
        }


@dataclass(frozen=True)
class RanksQuery(ChoiceOfLayouts[RanksStep]):
    """Which layout of so many ranks is the fastest of those that run here.

    Args:
        request: what is asked of one rank, with the machine that it is on; its caps are a rank's.
        cluster: whose nodes the ranks are on; None: all on one machine, whose links are assumed.
        fixed: fields of the layout that are not open.
    """

    request: PlanRequest
    num_ranks: int
    cluster: Cluster | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)

    names = (*_PLACE, *_OF_DEVICE, *_LAYOUT)
    required = ("model", "seq_len", "ranks")
    columns = (
        "layout", "step_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "memory_bytes",
        "host_bytes", "room_bytes", "compute_share", "communication_share", "bubble_share",
        "bound_s", "gap", "recompute_fraction", "rounds_per_step", "chunks_per_round",
        "planned_chunk_tokens", "expected_error_mean", "expected_error_kind",
        *(f"layout.{name}" for name in _LAYOUT),
    )  # fmt: skip
    resources = DeviceQuery.resources

    @staticmethod
    def asked(
        request: PlanRequest, num_ranks: int, cluster: Cluster | None, fixed: Mapping[str, Any],
        caps: tuple[str | None, str | None] = (None, None),
    ) -> "RanksQuery":  # fmt: skip
        """The query of a request for one device, whose caps are then a rank's share or those given.

        Raises:
            LayoutError: the recipe is not one that ranks train with.
            SizeError: a cap cannot be read, or is more than that share.
        """
        if (why := recipe_refusal(request.recipe)) is not None:
            raise LayoutError(f"ranks cannot run this: {why}")
        found = RanksQuery(request, num_ranks, cluster, fixed)
        own = rank_caps(request.machine, found._on_node, *caps)
        return replace(found, request=replace(request, caps=own))

    @classmethod
    def of(cls, values: Values, load: Loader) -> "RanksQuery":
        if ("machine" in values) == ("cluster" in values):
            raise StudyError("ranks need machine (of one rank), or cluster with its nodes")
        cluster = load.cluster(str(values["cluster"])) if "cluster" in values else None
        own = {
            name: values[name] for name in _OF_DEVICE if name in values and name not in MEMORY_CAPS
        }
        machine: Machine = (
            load.machine(str(values["machine"])) if cluster is None else machine_of(cluster)
        )
        spec = load.any_model(str(values["model"]), int(values["seq_len"]))
        base = PlanRequest.of(spec, machine, step=TrainingStep(int(values["seq_len"])))
        numbers = {name: value for name, value in values.items() if name.startswith("machine.")}
        request = DeviceQuery(base).changed({**own, **numbers}).request
        caps = [str(values[name]) if name in values else None for name in MEMORY_CAPS]
        fixed = {n: values[n] for n in _LAYOUT if values.get(n, OPEN) != OPEN}
        return cls.asked(request, int(values["ranks"]), cluster, fixed, (caps[0], caps[1]))

    @classmethod
    def full_name(cls, name: str) -> str:
        return name if name in cls.names else DeviceQuery.full_name(name)

    @classmethod
    def fault(cls, name: str, value: object) -> str | None:
        if name == "ranks":
            several = isinstance(value, int) and not isinstance(value, bool) and value >= 2
            return None if several else f"needs a whole number from 2, got {value!r}"
        if name == "pipeline":
            return None if value in RUN_PIPELINES else f"needs one of {', '.join(RUN_PIPELINES)}"
        if name in _LAYOUT:
            return value_fault(name, value)
        if name == "cluster":
            return None if isinstance(value, str) else f"needs a text in quotes, got {value!r}"
        return DeviceQuery.fault(name, value)

    @property
    def subject(self) -> Subject:
        asked = self.request
        where = asked.machine.name if self.cluster is None else self.cluster.name
        return Subject(
            model=asked.spec.name, cluster=where, num_gpus=self.num_ranks,
            tokens_per_step=asked.step.tokens_per_step,
        )  # fmt: skip

    @property
    def content(self) -> dict[str, Any]:
        cluster = None if self.cluster is None else self.cluster.model_dump(mode="json")
        layout = {"ranks": self.num_ranks, "fixed": dict(self.fixed), "cluster": cluster}
        return DeviceQuery(self.request).content | layout

    @property
    def properties(self) -> list[Property]:
        """Those of one rank's device, as the lower bound has no price of them: `price_of` is None;
        and the ranks."""
        found = [replace(one, price_of=None) for one in DeviceQuery(self.request).properties]
        return [*found, Property("ranks", ("ranks",), (self.num_ranks,), "", 1, (2.0,))]

    def changed(self, values: Values) -> "RanksQuery":
        own = {name: value for name, value in values.items() if name not in ("ranks", *_LAYOUT)}
        if "cluster" in own:
            raise StudyError("a query of ranks has its cluster for good: ask another query")
        fixed = {**self.fixed, **{name: values[name] for name in _LAYOUT if name in values}}
        return replace(
            self,
            request=DeviceQuery(self.request).changed(own).request,
            num_ranks=int(values.get("ranks", self.num_ranks)),
            fixed={name: value for name, value in fixed.items() if value != OPEN},
        )

    @property
    def _place(self) -> Place:
        machine = self.request.machine
        if self.cluster is not None:
            return Place(self.cluster, machine)
        return place_here(machine, self.num_ranks, cores_here())

    @property
    def _on_node(self) -> int:
        return min(self._place.cluster.count("gpus_per_node"), self.num_ranks)

    def fastest(self, progress: Callable[[str], None] = lambda text: None) -> RanksStep:
        return self._answer(self.fixed, progress, is_known=False)

    def kept(self, answer: Answer) -> RanksStep:
        if answer.layout is None:
            raise StudyError("a plan of one device is no layout of ranks")
        return self.laid_out(answer.layout)

    def laid_out(self, layout: Layout) -> RanksStep:
        """Planned for what there is now; replicas are as many as there are ranks for."""
        replicas, left = divmod(self.num_ranks, layout.pp)
        if left:
            raise LayoutError(f"{self.num_ranks} ranks are no pipelines of {layout.pp} stages")
        kept = {name: getattr(layout, name) for name in _LAYOUT}
        return self._answer({**kept, **self.fixed, "dp": replicas}, is_known=True)

    def _answer(
        self, fixed: Mapping[str, Any], progress: Callable[[str], None] = lambda text: None, *,
        is_known: bool,
    ) -> RanksStep:  # fmt: skip
        request, place = self.request, self._place
        spec = request.decoder
        workloads = workloads_of_ranks(spec, request.step, request.machine, self.num_ranks)
        question = RanksQuestion(
            spec, request.recipe, workloads, self.num_ranks, fixed, place.cluster, place.machine,
            request.caps, request.choices,
        )  # fmt: skip
        with gc_paused():
            chosen = question.answer(progress)
        schedule = chosen.schedule
        if self.cluster is not None:
            made_for = MachineRef(name=place.cluster.name, content_hash=place.cluster.name)
            schedule = schedule.model_copy(update={"machine": made_for})
        summary = summarize(schedule, chosen.predicted, place.machine)
        return RanksStep(
            step_s=summary.step_time_s, tokens_per_s=summary.tokens_per_s, mfu=summary.mfu,
            device_bytes=summary.device_peak_bytes, host_bytes=summary.host_peak_bytes,
            room_bytes=(request.caps.device_bytes, request.caps.host_bytes),
            num_gpus=self.num_ranks, bound_s=None, gap=None, shares=summary.mean_fraction,
            layout=chosen.layout, is_known=is_known, spec=spec,
            recipe=request.recipe, chosen=chosen, place=place, schedule=schedule, summary=summary,
        )  # fmt: skip
