"""Find the error of predictions on published steps of many GPUs that are near to a question."""

import csv
from collections.abc import Mapping, Sequence
from importlib.resources import files
from math import log2
from statistics import fmean
from typing import NamedTuple, Self

from pydantic_core import to_json

from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.parallel.job import Job
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.schedule.document import Schedule

COLUMNS = (
    *("machine", "gpu", "experts", "precision", "parameters", "gpus", "axes", "zero3"),
    *("series", "error"),
)
_AXES = ("tp", "cp", "pp", "dp", "ep")
_NARROW = ("fp8", "fp4")
# Each of the 272 steps with others near left out in turn: the mean error stated is 7.9 %, that
# found 8.2 %, their correlation 0.63; 92 % are off by less than twice as much.
_MOST_STEPS = 8
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
    """A step that somebody measured; `error` is predicted / measured - 1 of its time."""

    kind: StepKind
    machine: str
    gpu: str
    series: str
    error: float


class NearSteps(NamedTuple):
    """Those nearest to a question, the nearest first, and where their errors are written."""

    steps: tuple[PublishedStep, ...]
    source: str

    @property
    def mean(self) -> float:
        return fmean(abs(step.error) for step in self.steps)

    @property
    def worst(self) -> float:
        return max(abs(step.error) for step in self.steps)

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


def nearest(kind: StepKind, machine: Machine) -> NearSteps | None:
    """Return at most 8 published steps on the same GPU of a model of the same kind, not too far.

    None where there is none: nothing like the question was published, or it was predicted with
    other rates than the machine's.
    """
    source, every = _table()
    names = {name for name in {step.machine for step in every} if _is_same_gpu(name, machine)}
    near = [
        step
        for step in every
        if step.machine in names
        and step.kind.experts == kind.experts
        and step.kind.distance(kind) <= _FARTHEST
    ]
    near.sort(key=lambda step: step.kind.distance(kind))
    return NearSteps(tuple(near[:_MOST_STEPS]), source) if near else None


def _is_same_gpu(name: str, machine: Machine) -> bool:
    """Whether a machine computes as the shipped one of that name; its host may be another."""
    shipped = load_machine(name)
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
    return PublishedStep(kind, line["machine"], line["gpu"], line["series"], float(line["error"]))


def _range(values: Sequence[float], shown: str) -> str:
    least, most = shown.format(min(values)), shown.format(max(values))
    return least if least == most else f"{least} to {most}"
