"""A training step on the GPUs of a cluster as a query: the fastest layout of all."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import isinf
from typing import Any

from twinstream.clusters.kernel_sets import with_kernels
from twinstream.clusters.predict import (
    Prediction,
    document_of,
    gpu_caps,
    planned_document,
    predict,
)
from twinstream.clusters.refusals import require_possible
from twinstream.clusters.search.question import (
    KEPT,
    NAMES,
    LayoutSearch,
    full_name,
    given_caps,
    value_fault,
)
from twinstream.clusters.search.search import SearchResult
from twinstream.hardware_profiles.clusters.loader import machine_of, place_names
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.measures.uncertainty import Uncertainty, uncertainty_of_job
from twinstream.models.parallel.job import Job
from twinstream.models.parallel.layout import Layout
from twinstream.models.recipe import Recipe
from twinstream.schedule.document import Caps, Schedule
from twinstream.study.layouts import ChoiceOfLayouts, LayoutAnswer
from twinstream.study.query import (
    CLUSTER_NUMBER,
    MACHINE_NUMBER,
    Answer,
    Loader,
    Property,
    StudyError,
    Subject,
    Value,
    Values,
    size_fault,
)

_GIB = 2**30
_LAYOUT = tuple(name for name in Layout.model_fields if name not in ("stage_layers", "reduction"))
_PLACE = ("model", "cluster")
_IN_TOKENS = {"tokens_per_step": "global_batch", "chunk_tokens": "micro_batch"}
_CAPS = ("device_mem", "host_mem")
_DEVICE_MEMORY = "machine.device_memory_bytes"


@dataclass(frozen=True, kw_only=True)
class LaidOutStep(LayoutAnswer):
    """A layout and its prediction; `searched` is what was looked at, where it was searched for.

    `caps` are those of one GPU, if any were asked for.
    """

    job: Job
    cluster: Cluster
    searched: SearchResult | None
    caps: Caps | None = None

    @property
    def place_names(self) -> tuple[str, ...]:
        return place_names(self.cluster)

    @staticmethod
    def predicted(
        job: Job, cluster: Cluster, found: Prediction, searched: SearchResult | None = None, *,
        is_known: bool = True, caps: Caps | None = None,
    ) -> "LaidOutStep":  # fmt: skip
        """Its figures; without a search there is no bound."""
        least_s = None if searched is None else searched.least_bound_s
        return LaidOutStep(
            step_s=found.step_s, tokens_per_s=found.tokens_per_s, mfu=found.mfu,
            device_bytes=found.memory_bytes, host_bytes=found.host_bytes,
            room_bytes=(found.room_bytes, None), num_gpus=found.num_gpus, bound_s=least_s,
            gap=found.step_s / least_s - 1 if least_s else None, shares=dict(found.shares),
            layout=job.layout, is_known=is_known, job=job, cluster=cluster, searched=searched,
            caps=caps,
        )  # fmt: skip

    def document(self) -> Schedule:
        """The whole step of all ranks, of a single one alone."""
        best = None if self.searched is None else self.searched.best[0]
        if best is not None and best.schedule is not None and best.job is self.job:
            return best.schedule
        return planned_document(self.job, self.cluster, self.caps)

    @cached_property
    def uncertainty(self) -> Uncertainty:
        document = partial(document_of, self.job, self.cluster)
        return uncertainty_of_job(self.job, machine_of(self.cluster), document)

    @property
    def figures(self) -> dict[str, Any]:
        names = ("num_layouts", "num_fit", "num_simulated")
        counts = {name: getattr(self.searched, name, None) for name in names}
        return self.figures_of(_LAYOUT) | counts


@dataclass(frozen=True)
class LayoutQuery(ChoiceOfLayouts[LaidOutStep]):
    """Which layout is the fastest; `keep` of the best looking ones are simulated whole."""

    question: LayoutSearch
    keep: int = KEPT

    names = (*_PLACE, *NAMES, *_IN_TOKENS, *_CAPS)
    required = (*_PLACE, "gpus", "seq_len")
    columns = (
        "layout", "step_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "memory_bytes",
        "room_bytes", "compute_share", "communication_share", "bubble_share", "bound_s", "gap",
        "num_layouts", "num_fit", "num_simulated", "expected_error_mean", "expected_error_kind",
        *(f"layout.{name}" for name in _LAYOUT),
    )  # fmt: skip
    resources = (
        _DEVICE_MEMORY, _CAPS[0], "cluster.nic_bytes_per_s", "cluster.node_bytes_per_s",
    )  # fmt: skip

    @classmethod
    def of(cls, values: Values, load: Loader) -> "LayoutQuery":
        seq_len = int(values["seq_len"])
        given = _in_sequences(values, seq_len)
        if "global_batch" not in given:
            raise StudyError("global_batch is missing, or tokens_per_step")
        global_batch = int(given["global_batch"])
        shape = load.model(str(values["model"]), seq_len)
        job = Job(
            shape=shape, layout=Layout(), recipe=Recipe(), seq_len=seq_len,
            global_batch=global_batch,
        )  # fmt: skip
        base = LayoutSearch(job, int(values["gpus"]), load.cluster(str(values["cluster"])), {})
        rest = {name: value for name, value in values.items() if name not in _PLACE}
        return cls(base).changed(rest)

    @classmethod
    def full_name(cls, name: str) -> str:
        return name if name in (*_PLACE, *_IN_TOKENS, *_CAPS) else full_name(name)

    @classmethod
    def fault(cls, name: str, value: object) -> str | None:
        if name in _PLACE:
            return None if isinstance(value, str) else f"needs a text in quotes, got {value!r}"
        if name in _CAPS:
            return size_fault(value)
        return value_fault("global_batch" if name in _IN_TOKENS else name, value)

    @property
    def subject(self) -> Subject:
        asked = self.question
        return Subject(
            model=asked.job.shape.name, cluster=asked.cluster.name, num_gpus=asked.num_gpus,
            tokens_per_step=asked.job.tokens_per_step,
        )  # fmt: skip

    @property
    def content(self) -> dict[str, Any]:
        return self.question.content

    @property
    def properties(self) -> list[Property]:
        """Links, HBM, compute, memory, GPUs; of a single node without the network."""
        asked = self.question
        matmuls = asked.job.recipe.implementations.matmuls
        peaks = ["peak_bf16_flop_per_s"]
        if matmuls != "model":  # what is not a product of linear layers stays in bf16
            peaks.insert(0, f"peak_{matmuls}_flop_per_s")
        fields: list[tuple[str, tuple[str, ...], str, float]] = [
            ("network", ("cluster.nic_bytes_per_s",), "GB/s", 1e9),
            ("links in a node", ("cluster.node_bytes_per_s",), "GB/s", 1e9),
            ("HBM", ("machine.hbm_bytes_per_s",), "GB/s", 1e9),
            ("compute peak", tuple(f"machine.{peak}" for peak in peaks), "TFLOP/s", 1e12),
            (
                "device memory",
                (_DEVICE_MEMORY if asked.caps is None else _CAPS[0],),
                "GiB",
                2.0**30,
            ),
        ]
        alone = asked.num_gpus <= asked.cluster.count("gpus_per_node")
        found = []
        for name, names, unit, size in fields:
            values = tuple(self._number(field) for field in names)
            if all(values) and not any(map(isinf, values)) and not (alone and name == "network"):
                factors = (0.5, 2.0) if name == "device memory" else (2.0,)
                found.append(Property(name, names, values, unit, size, factors))
        return [*found, Property("GPUs", ("gpus",), (asked.num_gpus,), "", 1, (2.0,))]

    def _number(self, name: str) -> float:
        """0 where the profile does not state it."""
        cluster, caps = self.question.cluster, self.question.caps
        if name == _CAPS[0]:
            return float((caps and caps.device_bytes) or 0)
        if name.startswith(CLUSTER_NUMBER):
            own = name.removeprefix(CLUSTER_NUMBER)
            return cluster.number(own) if getattr(cluster, own) is not None else 0.0
        machine, own = machine_of(cluster), name.removeprefix(MACHINE_NUMBER)
        return machine.number(own) if getattr(machine, own) is not None else 0.0

    def changed(self, values: Values) -> "LayoutQuery":
        asked, load = self.question, Loader()
        if "model" in values:
            longest = int(values.get("seq_len", asked.job.seq_len))
            shape = load.model(str(values["model"]), longest)
            asked = replace(asked, job=asked.job.model_copy(update={"shape": shape}))
        if "cluster" in values:
            asked = replace(asked, cluster=load.cluster(str(values["cluster"])))
        given = _in_sequences(values, int(values.get("seq_len", asked.job.seq_len)))
        asked = asked.changed(given)
        return replace(self, question=replace(asked, caps=_caps(asked, values)))

    def fastest(self, progress: Callable[[str], None] = lambda text: None) -> LaidOutStep:
        searched = self.question.answer(self.keep, progress)
        found, cluster = searched.best[0], self.question.cluster
        return LaidOutStep.predicted(
            found.job, cluster, found.prediction, searched, is_known=False,
            caps=self.question.caps,
        )  # fmt: skip

    def beside(self, known: LaidOutStep, fastest: LaidOutStep) -> LaidOutStep:
        bound_s = fastest.bound_s
        gap = known.step_s / bound_s - 1 if bound_s else None
        return replace(known, searched=fastest.searched, bound_s=bound_s, gap=gap)

    def kept(self, answer: Answer) -> LaidOutStep:
        if answer.layout is None:
            raise StudyError("a plan of one device is no layout")
        return self.laid_out(answer.layout)

    def laid_out(self, layout: Layout) -> LaidOutStep:
        cluster = self.question.cluster
        job = with_kernels(kept_job(self.question, layout), machine_of(cluster))
        require_possible(job, self.question.num_gpus)
        prediction = predict(job, cluster, caps=self.question.caps)
        if not prediction.fits:
            needs, room = prediction.memory_bytes / _GIB, prediction.room_bytes / _GIB
            raise StudyError(f"{job.layout.text} needs {needs:.1f} GiB of a GPU's {room:.1f}")
        return LaidOutStep.predicted(job, cluster, prediction, caps=self.question.caps)


def _caps(asked: LayoutSearch, values: Values) -> Caps | None:
    """Caps of a GPU with those that are given: a text is one that its node has, a number may be
    more."""
    texts, numbers = dict.fromkeys(_CAPS), dict[str, int]()
    for name in _CAPS:
        value = values.get(name)
        if isinstance(value, str):
            texts[name] = value
        elif value is not None:
            numbers[name.replace("mem", "bytes")] = round(value)
    caps = given_caps(asked.cluster, asked.num_gpus, *texts.values()) or asked.caps
    if not numbers:
        return caps
    own = caps or gpu_caps(asked.cluster, machine_of(asked.cluster), asked.num_gpus)
    return own.model_copy(update=numbers)


def _in_sequences(values: Values, seq_len: int) -> dict[str, Value]:
    """Counts of tokens as the counts of sequences that they are."""
    found = {name: value for name, value in values.items() if name not in (*_IN_TOKENS, *_CAPS)}
    for tokens, sequences in _IN_TOKENS.items():
        if tokens not in values:
            continue
        count, left = divmod(int(values[tokens]), seq_len)
        if left or not count or found.get(sequences, count) != count:
            raise StudyError(
                f"{tokens} = {values[tokens]} are no whole sequences of {seq_len} tokens"
                if left or not count
                else f"{tokens} and {sequences} say the same, and differ: leave one out"
            )
        found[sequences] = count
    return found


def kept_job(asked: LayoutSearch, layout: Layout) -> Job:
    """Of a changed question, with a layout from before; its replicas are as many as GPUs allow."""
    kept = layout.model_copy(update=dict(asked.fixed))
    each = kept.tp * kept.cp * kept.pp
    if "dp" not in asked.fixed and asked.num_gpus % each == 0:
        kept = kept.model_copy(update={"dp": asked.num_gpus // each})
    return asked.job.model_copy(update={"layout": kept})
