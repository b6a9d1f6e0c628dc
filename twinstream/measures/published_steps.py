"""Find the error of predictions on published steps of many GPUs that are near to a question."""

import csv
from collections.abc import Mapping, Sequence
from importlib.resources import files
from math import log2, sqrt
from typing import NamedTuple, Self

from pydantic_core import to_json

from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layouts.job import Job
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.document import Schedule

COLUMNS = (
    *("cluster", "gpu", "experts", "precision", "parameters", "gpus", "axes", "zero3"),
    *("series", "family", "error"),
)
_AXES = ("tp", "cp", "pp", "dp", "ep")
_NARROW = ("fp8", "fp4")
# How bars hold, each family of steps left out in turn: docs/benchmarks/clusters.md, and the columns
# of `twinstream validate --cluster`. The figures below were chosen on that.
_MOST_STEPS = 8
_FEW_STEPS = 5  # fewer say too little of how steps spread
_FAR = 2.0  # of the nearest: another size of model, or another kind of layout
_SPREAD = {False: 0.08, True: 0.25}  # of all published steps, dense and with experts
_GROWTH = 0.2  # of a bar, for each unit of distance to the nearest step
_SAME_PUBLISHER = 3  # times as much its steps weigh in a bar as others as near
_DEVIATION = 1.25  # a standard deviation is so many mean absolute ones, of a normal distribution
_NO_BIAS = 1.0  # so much weight has it that a source has no bias
_FARTHEST = 4.0  # a model 16 times as large, or 256 times as many GPUs
_OF_GPUS, _OF_AN_AXIS, _OF_PRECISION, _OF_ZERO3 = 0.5, 1.0, 2.0, 1.0


class StepKind(NamedTuple):
    """The features of a step by which another one is near to it.

    `parameters` are all of the model's, `axes` those along which there are several ranks; `zero3`
    is whether they share the parameters.
    """

    experts: bool
    precision: str
    parameters: int
    gpus: int
    axes: frozenset[str]
    zero3: bool

    @classmethod
    def of(cls, job: Job) -> Self:
        return cls._of(job.shape, job.layout.model_dump(), job.precision)

    @classmethod
    def in_document(cls, schedule: Schedule) -> Self | None:
        """Return the kind of a schedule; None if it does not say its model and layout."""
        try:
            spec = ModelSpec.model_validate_json(to_json(schedule.model))
            recipe = schedule.of(schedule.classes[0]).recipe
            matmuls = Recipe.model_validate(recipe).implementations.matmuls
            precision = schedule.precision if matmuls == "model" else matmuls
            return cls._of(spec, schedule.layout, precision)
        except (ValueError, KeyError):  # of damaged documents
            return None

    @classmethod
    def _of(cls, spec: ModelSpec, layout: Mapping[str, object], precision: str) -> Self:
        degrees = {axis: int(str(layout[axis])) for axis in _AXES}
        return cls(
            experts=spec.experts is not None,
            precision=precision,
            parameters=spec.num_parameters,
            gpus=degrees["tp"] * degrees["cp"] * degrees["pp"] * degrees["dp"],
            axes=frozenset(axis for axis, degree in degrees.items() if degree > 1),
            zero3=layout["zero"] == 3,
        )

    @property
    def told(self) -> str:
        """Return the kind in words, without the size."""
        kind = "mixture of experts" if self.experts else "dense"
        axes = " ".join(axis for axis in _AXES if axis in self.axes)
        return f"{kind}, {self.precision}, {axes}" + (", ZeRO 3" if self.zero3 else "")

    def cells(self) -> dict[str, str]:
        """Return its columns in the table of published steps."""
        found = self._asdict() | {"axes": " ".join(sorted(self.axes))}
        return {name: str(value) for name, value in found.items()}

    def distance(self, other: "StepKind") -> float:
        """Return how unlike two steps on a machine are; a factor of 2 in parameters counts 1."""
        return (
            abs(log2(self.parameters / other.parameters))
            + _OF_GPUS * abs(log2(self.gpus / other.gpus))
            + _OF_AN_AXIS * len(self.axes ^ other.axes)
            + _OF_PRECISION * ((self.precision in _NARROW) != (other.precision in _NARROW))
            + _OF_ZERO3 * (self.zero3 != other.zero3)
        )


class PublishedStep(NamedTuple):
    """A step that somebody measured; `error` is predicted / measured - 1 of its time.

    `family` is the same for runs of one configuration on more or fewer replicas.
    """

    kind: StepKind
    cluster: str
    gpu: str
    series: str
    family: str
    error: float

    @property
    def publisher(self) -> str:
        """Return who published it, the first word of its series."""
        return publisher_of(self.series)


class NearSteps(NamedTuple):
    """Those nearest to a question, the nearest first, and where their errors are written.

    `bias` is the mean error of those of one publisher, which counts as known: the nearer a step is,
    the more it weighs, and as little is taken for granted as few of them say. `bar` is how far
    errors are from it, those of this publisher above all, and more the farther the nearest step
    is. Where few are near, or none is like the question, it is no less than the spread of all that
    are published.
    """

    steps: tuple[PublishedStep, ...]
    source: str
    bias: float
    bar: float

    @classmethod
    def of(
        cls, kind: StepKind, steps: tuple[PublishedStep, ...], source: str, publisher: str
    ) -> Self:
        """Of the steps near to a question, the nearest first."""
        away = [step.kind.distance(kind) for step in steps]
        weights = [1 / (1 + one) for one in away]
        told = [w if step.publisher == publisher else 0.0
                for w, step in zip(weights, steps, strict=True)]  # fmt: skip
        errors = [step.error for step in steps]
        bias = sum(w * e for w, e in zip(told, errors, strict=True)) / (sum(told) + _NO_BIAS)
        weights = [w + (_SAME_PUBLISHER - 1) * t for w, t in zip(weights, told, strict=True)]
        off = sum(w * abs(e - bias) for w, e in zip(weights, errors, strict=True)) / sum(weights)
        bar = _DEVIATION * off * sqrt(1 + 1 / len(steps)) * (1 + _GROWTH * away[0])
        if len(steps) < _FEW_STEPS or away[0] > _FAR:
            bar = max(bar, _SPREAD[kind.experts])
        return cls(steps, source, bias, bar)

    @property
    def worst(self) -> float:
        """Return the largest error of them, the bias taken off."""
        return max(abs(step.error - self.bias) for step in self.steps)

    @property
    def told(self) -> str:
        """Return in words how many steps there are, of which models and GPUs."""
        kinds = [step.kind for step in self.steps]
        sizes = _range([kind.parameters / 1e9 for kind in kinds], "{:.3g}")
        gpus = _range([kind.gpus for kind in kinds], "{:,}")
        names = " and ".join(dict.fromkeys(step.gpu for step in self.steps))
        count = f"{len(kinds)} step" + "s" * (len(kinds) > 1)
        return (
            f"{count} of {sizes} billion parameters on {gpus} {names}, the nearest {kinds[0].told}"
        )


class PublishedSteps:
    """The table of published steps, read once."""

    def __init__(self) -> None:
        self._source, self._steps = _table()
        names = {step.cluster for step in self._steps}
        self._machines = {name: machine_of(load_cluster(name)) for name in names}

    def near(
        self, kind: StepKind, machine: Machine, *, series: str | None = None, without: str = ""
    ) -> NearSteps | None:
        """Return at most 8 steps on the same GPU of a model of the same kind, not too far.

        None where there is none: nothing like the question was published, or it was predicted with
        other rates than the machine's.

        Args:
            series: of the question, whose publisher's bias is taken off; by default the nearest's.
            without: a family that does not count.
        """
        names = {name for name, one in self._machines.items() if _is_same_gpu(one, machine)}
        near = [
            step
            for step in self._steps
            if step.cluster in names
            and step.kind.experts == kind.experts
            and step.family != without
            and step.kind.distance(kind) <= _FARTHEST
        ]
        if not near:
            return None
        near.sort(key=lambda step: step.kind.distance(kind))
        publisher = near[0].publisher if series is None else publisher_of(series)
        return NearSteps.of(kind, tuple(near[:_MOST_STEPS]), self._source, publisher)


def nearest(kind: StepKind, machine: Machine) -> NearSteps | None:
    """Return the published steps nearest to a question, `PublishedSteps.near` of it."""
    return PublishedSteps().near(kind, machine)


def publisher_of(series: str) -> str:
    """Return who published a series.

    >>> publisher_of("dgxc H100 fp8"), publisher_of("Megatron-Bridge GB200 dense")
    ('dgxc', 'Megatron-Bridge')
    """
    return series.partition(" ")[0]


def _is_same_gpu(shipped: Machine, machine: Machine) -> bool:
    """Whether a machine computes as a shipped one; its host may be another."""
    return shipped.efficiency == machine.efficiency and all(
        getattr(shipped, field) == getattr(machine, field)
        for field in ("peak_bf16_flop_per_s", "hbm_bytes_per_s")
    )


def _table() -> tuple[str, list[PublishedStep]]:
    """Where the table is from, and its steps."""
    package = files("twinstream.hardware_profiles")
    text = package.joinpath("clusters", "data", "published_steps.csv").read_text("utf-8")
    source, *lines = text.splitlines()
    return source.removeprefix("# "), [_step(line) for line in csv.DictReader(lines)]


def _step(line: Mapping[str, str]) -> PublishedStep:
    kind = StepKind(
        experts=line["experts"] == "True",
        precision=line["precision"],
        parameters=int(line["parameters"]),
        gpus=int(line["gpus"]),
        axes=frozenset(line["axes"].split()),
        zero3=line["zero3"] == "True",
    )
    return PublishedStep(kind, line["cluster"], line["gpu"], line["series"], line["family"],
                         float(line["error"]))  # fmt: skip


def _range(values: Sequence[float], shown: str) -> str:
    least, most = shown.format(min(values)), shown.format(max(values))
    return least if least == most else f"{least} to {most}"
