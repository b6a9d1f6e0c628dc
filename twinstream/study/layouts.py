"""A training step on several GPUs as a query: the fastest layout of all, or of those that run."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf, isinf
from typing import Any

from twinstream.clusters.kernel_sets import with_kernels
from twinstream.clusters.predict import predict
from twinstream.clusters.refusals import require_possible
from twinstream.clusters.search.cuts import cuts_of_ranks, jobs_of_ranks
from twinstream.clusters.search.found import SearchResult
from twinstream.clusters.search.search import search_layouts
from twinstream.clusters.search.space import RunsHere
from twinstream.clusters.shared_machine import Place, cores_here, place_here
from twinstream.hardware_profiles.clusters.loader import machine_of
from twinstream.hardware_profiles.clusters.published_memory import memory_of_runs
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.clusters.what_if import with_numbers
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout, LayoutError
from twinstream.models.recipes.recipe import (
    MATMULS_OF_PRECISION,
    KernelChoice,
    Recipe,
    narrow_units,
)
from twinstream.options.plan_options import KEPT
from twinstream.planner.planner import Planner, gc_paused
from twinstream.planner.request import PlanRequest, caps_of
from twinstream.schedule.errors import TwinstreamError
from twinstream.study.answer import LAYOUT_OF_RANKS, Answer, StudyError
from twinstream.study.one_device import DeviceQuery, changed_caps, changed_request
from twinstream.study.query import Loader, Property, Query, Subject
from twinstream.study.values import (
    CLUSTER_NUMBER,
    DEVICE_MEMORY,
    LAYOUT_NAMES,
    MACHINE_NUMBER,
    MEMORY_CAPS,
    OPEN,
    Kind,
    Value,
    Values,
    numbers_among,
)

_IN_TOKENS = {"tokens_per_step": "global_batch", "chunk_tokens": "micro_batch"}
_NOT_CONTENT = ("name", "description", "machine", "machine_changes")


@dataclass(frozen=True)
class LayoutQuery(Query):
    """Which layout of several GPUs is the fastest.

    Args:
        request: what is asked of each: the model, the step of all together, the machine and its
            caps. With `runs_here` the step may be open, and chunks be slices of sequences.
        cluster: whose nodes they are on; None: all on one machine, whose links are assumed.
        fixed: fields of the layout that are not open.
        runs_here: whether layouts are only those that twinstream's own kernels run.
        any_kernels: whether the kernels that the recipe names may be others where they do not
            compute a layout.
        keep: so many of the best layouts are simulated whole, where all are searched.
    """

    request: PlanRequest
    num_gpus: int
    cluster: Cluster | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    runs_here: bool = True
    any_kernels: bool = True
    keep: int = KEPT

    @property
    def kind(self) -> Kind:
        return "ranks" if self.runs_here else "cluster"

    @property
    def subject(self) -> Subject:
        request = self.request
        where = request.machine.name if self.cluster is None else self.cluster.name
        return Subject(
            model=request.spec.name, cluster=where, num_gpus=self.num_gpus,
            tokens_per_step=request.step.tokens_per_step,
        )  # fmt: skip

    @property
    def content(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            **DeviceQuery(self.request).content, "gpus": self.num_gpus, "fixed": dict(self.fixed),
            "runs_here": self.runs_here, "any_kernels": self.any_kernels,
        }  # fmt: skip
        if self.cluster is not None:
            named = {} if self.runs_here else dict.fromkeys(_NOT_CONTENT, True)
            cluster = self.cluster.model_dump(mode="json", exclude=set(named))
            machine = machine_of(self.cluster).model_dump(mode="json", exclude=set(named))
            found |= {"cluster": cluster, "node": machine}
            if not self.runs_here:
                del found["machine"]  # by its name, too
        return found

    @property
    def job(self) -> Job:
        """The model and its step in whole sequences, as all layouts are searched.

        Raises:
            NotExecutableError: the model is a traced module.
        """
        step = self.request.step
        assert step.tokens_per_step is not None, "a search of all layouts has its step"
        return Job(
            shape=self.request.decoder, layout=Layout(), recipe=step.recipe, seq_len=step.seq_len,
            global_batch=step.tokens_per_step // step.seq_len, any_kernels=self.any_kernels,
        )  # fmt: skip

    @property
    def place(self) -> Place:
        """The cluster of the GPUs, and the profile of each."""
        machine = self.request.machine
        if self.cluster is not None:
            return Place(self.cluster, machine)
        return place_here(machine, self.num_gpus, cores_here())

    @property
    def _nodes(self) -> Cluster:
        assert self.cluster is not None, "all layouts are searched on a cluster"
        return self.cluster

    # --- what can be changed

    @property
    def properties(self) -> list[Property]:
        """Return properties of a rank's device, without prices of the lower bound, or links, HBM,
        compute and memory of a cluster, of a single node without the network; and how many GPUs
        there are."""
        if self.runs_here:
            found = [replace(one, price_of=None) for one in DeviceQuery(self.request).properties]
            return [*found, Property("ranks", ("ranks",), (self.num_gpus,), "", 1, (2.0,))]
        matmuls = self.request.step.recipe.implementations.matmuls
        peaks = ["peak_bf16_flop_per_s"]
        if matmuls != "model":  # what is not a product of linear layers stays in bf16
            peaks.insert(0, f"peak_{matmuls}_flop_per_s")
        memory = "device_mem" if self._is_capped else DEVICE_MEMORY
        fields: list[tuple[str, tuple[str, ...], str, float]] = [
            ("network", ("cluster.nic_bytes_per_s",), "GB/s", 1e9),
            ("links in a node", ("cluster.node_bytes_per_s",), "GB/s", 1e9),
            ("HBM", ("machine.hbm_bytes_per_s",), "GB/s", 1e9),
            ("compute peak", tuple(f"machine.{peak}" for peak in peaks), "TFLOP/s", 1e12),
            ("device memory", (memory,), "GiB", 2.0**30),
        ]
        alone = self.num_gpus <= self._nodes.count("gpus_per_node")
        found = []
        for name, names, unit, size in fields:
            values = tuple(self._number(one) for one in names)
            if all(values) and not any(map(isinf, values)) and not (alone and name == "network"):
                factors = (0.5, 2.0) if name == "device memory" else (2.0,)
                found.append(Property(name, names, values, unit, size, factors))
        return [*found, Property("GPUs", ("gpus",), (self.num_gpus,), "", 1, (2.0,))]

    @property
    def _is_capped(self) -> bool:
        ranks = _ranks_on_host(self.cluster, self.num_gpus)
        return self.request.caps != caps_of(self.request.machine, None, None, ranks)

    def _number(self, name: str) -> float:
        """0 where the profile does not state it."""
        if name == "device_mem":
            return float(self.request.caps.device_bytes or 0)
        is_of_cluster = name.startswith(CLUSTER_NUMBER)
        profile = self._nodes if is_of_cluster else self.request.machine
        own = name.removeprefix(CLUSTER_NUMBER).removeprefix(MACHINE_NUMBER)
        return profile.number(own) if getattr(profile, own) is not None else 0.0

    def changed(self, values: Values) -> "LayoutQuery":
        names = (*LAYOUT_NAMES, *LAYOUT_OF_RANKS)
        given = dict(values) if self.runs_here else self._in_sequences(values)
        fixed = {**self.fixed, **{name: given.pop(name) for name in names if name in given}}
        fixed = {name: value for name, value in fixed.items() if value != OPEN}
        num_gpus = int(given.pop("ranks" if self.runs_here else "gpus", self.num_gpus))
        if self.runs_here:
            if "cluster" in given:
                raise StudyError("a query of ranks has its cluster for good: ask another query")
            hosts = tuple(_ranks_on_host(self.cluster, n) for n in (self.num_gpus, num_gpus))
            request = changed_request(self.request, given, Loader(), (hosts[0], hosts[1]))
            return replace(self, request=request, num_gpus=num_gpus, fixed=fixed)
        return self._on_changed_cluster(given, num_gpus, fixed)

    def _on_changed_cluster(
        self, given: dict[str, Value], num_gpus: int, fixed: Mapping[str, Any]
    ) -> "LayoutQuery":
        cluster, numbers, was = self._nodes, numbers_among(given), self.request
        if "cluster" in given:
            cluster = Loader().cluster(str(given.pop("cluster")))
        cluster = with_numbers(cluster, numbers) if numbers else cluster
        batch = given.pop("global_batch", self.job.global_batch)
        tokens = int(given.get("seq_len", was.step.seq_len)) * int(batch)
        recipe = _with_precision(was.step.recipe, str(given.pop("precision", "")), self.any_kernels)
        if (units := given.pop("precision_units", None)) is not None:
            recipe = _with_units(recipe, str(units))
        machine = machine_of(cluster)
        was = replace(was, machine=machine, step=replace(was.step, recipe=recipe))
        caps = {name: given.pop(name) for name in MEMORY_CAPS if name in given}
        rest = {name: value for name, value in given.items() if not _is_number(name)}
        asked = changed_request(was, {**rest, "tokens_per_step": tokens}, Loader())
        hosts = _ranks_on_host(self._nodes, self.num_gpus), _ranks_on_host(cluster, num_gpus)
        return replace(
            self, num_gpus=num_gpus, cluster=cluster, fixed=fixed,
            any_kernels=self.any_kernels and rest.get("kernels") in (None, "auto"),
            request=replace(asked, caps=changed_caps(self.request, machine, caps, hosts)),
        )  # fmt: skip

    def _in_sequences(self, values: Values) -> dict[str, Value]:
        """Counts of tokens as the counts of sequences that they are."""
        seq_len = int(values.get("seq_len", self.request.step.seq_len))
        found = {name: value for name, value in values.items() if name not in _IN_TOKENS}
        for tokens, sequences in _IN_TOKENS.items():
            if tokens in values:
                found[sequences] = sequences_of(tokens, int(values[tokens]), seq_len)
        return found

    # --- answers

    def answer(
        self, known: Sequence[Answer] = (), planner: Planner | None = None, *,
        enough_tokens_per_s: float = inf, advises: bool = True,
        progress: Callable[[str], None] = lambda text: None,
    ) -> Answer:  # fmt: skip
        best = self._best_of(known)
        if best is not None and best.tokens_per_s >= enough_tokens_per_s:
            return best
        try:
            found = self.fastest(progress)
        except TwinstreamError:
            if best is None:
                raise
            return best
        if best is None or found.step_s <= best.step_s:
            return found
        if found.searched is None:
            return best
        gap = best.step_s / found.bound_s - 1 if found.bound_s else None
        return replace(best, searched=found.searched, bound_s=found.bound_s, gap=gap)

    def _best_of(self, known: Sequence[Answer]) -> Answer | None:
        """The fastest of the layouts of known answers, of which some may not fit."""
        found = []
        for layout in {one.layout: None for one in known if one.layout is not None}:
            with suppress(TwinstreamError):
                found.append(self.laid_out(layout))
        return min(found, key=lambda one: one.step_s, default=None)

    def fastest(self, progress: Callable[[str], None] = lambda text: None) -> Answer:
        """The fastest that is found.

        Raises:
            TwinstreamError: none can be, or fits.
        """
        if self.runs_here:
            return self._on_ranks(self.fixed, progress, is_known=False)
        searched = self.search(progress)
        found = searched.best[0]
        return Answer.of_prediction(
            found.job, self._nodes, found.prediction, self.request, is_known=False,
            searched=searched,
        )  # fmt: skip

    def search(self, progress: Callable[[str], None] = lambda text: None) -> SearchResult:
        """The best of all layouts.

        Raises:
            NoLayoutError: none is possible, or none fits.
            TwinstreamError: fixed fields contradict the GPUs, or a profile lacks a number.
        """
        return search_layouts(
            self.job, self.num_gpus, self._nodes, self.fixed, self.keep, progress,
            self.request.caps,
        )  # fmt: skip

    def kept(self, answer: Answer) -> Answer:
        if answer.layout is None:
            raise StudyError("a plan of one device is no layout of several GPUs")
        return self.laid_out(answer.layout)

    def laid_out(self, layout: Layout) -> Answer:
        """A layout from before, planned for what there is now.

        Raises:
            TwinstreamError: it cannot be here, or does not fit.
        """
        if self.runs_here:
            replicas, left = divmod(self.num_gpus, layout.pp * layout.tp * layout.cp)
            if left:
                degrees = {"tp": layout.tp, "cp": layout.cp}
                within = [f" x {axis} {size}" for axis, size in degrees.items() if size > 1]
                of = "".join((f"{layout.pp} stages", *within))
                raise LayoutError(f"{self.num_gpus} ranks are no pipelines of {of}")
            names = (*LAYOUT_OF_RANKS, "tp", "parts", "cp", "cp_parts", "cp_exchange")
            before = {name: getattr(layout, name) for name in names}
            before["sequence_parallel"] = layout.token_slices > 1
            return self._on_ranks({**before, **self.fixed, "dp": replicas}, is_known=True)
        machine = machine_of(self._nodes)
        job = with_kernels(self.kept_job(layout), machine)
        require_possible(job, self.num_gpus)
        prediction = predict(job, self._nodes, caps=self.request.caps)
        if not prediction.fits:
            short = memory_of_runs().shortage(prediction.memory_bytes, prediction.room_bytes)
            raise StudyError(f"{job.layout.text} needs {short}")
        return Answer.of_prediction(job, self._nodes, prediction, self.request)

    def kept_job(self, layout: Layout) -> Job:
        """The job with a layout from before; its replicas are as many as GPUs allow."""
        kept = layout.model_copy(update=dict(self.fixed))
        each = kept.tp * kept.cp * kept.pp
        if "dp" not in self.fixed and self.num_gpus % each == 0:
            kept = kept.model_copy(update={"dp": self.num_gpus // each})
        return self.job.model_copy(update={"layout": kept})

    def _on_ranks(
        self, fixed: Mapping[str, Any], progress: Callable[[str], None] = lambda text: None, *,
        is_known: bool,
    ) -> Answer:  # fmt: skip
        request, place = self.request, self.place
        spec = request.decoder
        cuts = cuts_of_ranks(spec, request.step, request.machine, self.num_gpus)
        job, *others = jobs_of_ranks(spec, request.recipe, cuts)
        here = RunsHere(place.machine, others, request.choices)
        with gc_paused():
            searched = search_layouts(
                job, self.num_gpus, place.cluster, fixed, progress=progress, caps=request.caps,
                here=here,
            )  # fmt: skip
        return Answer.of_ranks(searched, place, self.cluster, request, is_known=is_known)


def _ranks_on_host(cluster: Cluster | None, num_gpus: int) -> int:
    """Return how many GPUs share the memory of a host."""
    return num_gpus if cluster is None else min(cluster.count("gpus_per_node"), num_gpus)


def _is_number(name: str) -> bool:
    return name.startswith((CLUSTER_NUMBER, MACHINE_NUMBER))


def sequences_of(name: str, tokens: int, seq_len: int) -> int:
    """Whole sequences of so many tokens.

    Raises:
        StudyError: they are none.
    """
    count, left = divmod(tokens, seq_len)
    if left or not count:
        raise StudyError(f"{name} = {tokens} are no whole sequences of {seq_len} tokens")
    return count


def _with_units(recipe: Recipe, units: str) -> Recipe:
    """The recipe with these units in its precision."""
    kernels = recipe.kernels
    if kernels is None or kernels.matmuls == "model":
        raise LayoutError("precision_units says what computes in precision fp8 or fp4: add it")
    narrow = kernels.model_copy(update={"narrow": narrow_units(units)})
    return recipe.model_copy(update={"kernels": narrow})


def _with_precision(recipe: Recipe, precision: str, any_kernels: bool) -> Recipe:
    """The recipe in another precision, if one is given; fp8 and fp4 are of the kernel set
    megatron."""
    kernels, matmuls = recipe.kernels, MATMULS_OF_PRECISION.get(precision)
    if matmuls is None or (matmuls == "model" and (kernels is None or kernels.matmuls == "model")):
        return recipe
    chosen: KernelChoice | None
    if matmuls == "model":
        assert kernels is not None
        chosen = None if any_kernels else kernels.model_copy(update={"matmuls": "model"})
    elif kernels is not None and kernels.vector != "megatron" and not any_kernels:
        raise LayoutError(
            f"precision {precision} is of the kernel set megatron, not of {kernels.vector}"
        )
    else:
        was = kernels or KernelChoice(attention="flash")
        chosen = KernelChoice(
            vector="megatron", attention=was.attention, matmuls=matmuls, deterministic=False,
            narrow=was.narrow,
        )  # fmt: skip
    return recipe.model_copy(update={"kernels": chosen})
