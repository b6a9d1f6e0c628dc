"""Measured training steps of clusters: rows of the one form of table that is read.

A CSV, a line for each step, with the columns of `COLUMNS`, which docs/benchmarks/clusters.md
describes. A model is a preset, a config.json (its path beside the table) or the fields of a
`ModelSpec` as JSON; a layout the fields of a `Layout` that are not as usual, `tp=8 pp=4 zero=1`.
"""

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from twinstream.clusters.predict import Prepared
from twinstream.fidelity.constants import with_constants
from twinstream.fidelity.measured import Predicted
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.hardware_profiles.clusters.published_memory import FRAMEWORKS, Framework
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.csv_table import Cells, ClusterTableError, read_lines
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.presets import load_model
from twinstream.models.recipes.recipe import MATMULS_OF_PRECISION, Recipe, megatron_recipe
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node
from twinstream.schedule.numbers import PositiveCount

COLUMNS = (
    *("row", "gpu", "num_gpus", "cluster", "model", "seq_len", "global_batch", "layout"),
    *("precision", "attention", "network_reduction", "step_time_s", "series", "family"),
    *("calibrates", "suspect", "scored", "comparison", "set", "rank", "activation_bytes"),
    *("note", "why_not", "framework", "recompute_stated", "reserved_bytes"),
)
_NEEDED = COLUMNS[:7]
_SAVED = ("saved.", "boundary")  # slots that a stage keeps from forward to backward
_PIPELINE_ROUNDS = 5  # times its stages: as many microbatches as are simulated of a pipeline
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Values = Mapping[str, float]  # of constants, by name


class Compared(Node):
    """That a row's speed is held against another's of the same set, the one of the lowest rank.

    What is compared is tokens/s per GPU. `kind` says what is told of it: `scaling` from fewest
    GPUs, `ratio` of two ways to run the same.
    """

    kind: str
    set: str
    rank: int


class ClusterRow(Node):
    """A row of a table.

    Fields:
        series: what errors are averaged over: source, GPU, precision.
        row_id: what a person calls it; unique within its series.
        family: equal for runs of one configuration on more or fewer replicas (weak scaling).
        job: None where the shapes and layouts known here cannot say what ran; `why_not` says why.
        cluster: the profile, by name.
        measured_s: seconds of a step; None where the source leaves it open.
        scored: whether it counts in errors; `why_not` tells where it does not.
        suspect: the source itself, or who collected it, doubts the number.
        calibrates: constants of its GPU type may be fitted to it.
        activation_bytes: of the first stage, as published.
        framework: whose allocator and buffers the run had.
        recompute_stated: whether the source says what was recomputed; if not, a run that ran fits
            where it does with whole layers recomputed.
        reserved_bytes: most that the framework's allocator had of a GPU, as published.
    """

    series: str
    row_id: str
    family: str
    gpu: str
    num_gpus: PositiveCount
    cluster: str
    job: Job | None = None
    measured_s: Seconds | None = None
    note: str = ""
    suspect: bool = False
    scored: bool = True
    why_not: str = ""
    compared: Compared | None = None
    calibrates: bool = False
    activation_bytes: Annotated[int, Field(gt=0)] | None = None
    framework: Framework = "megatron"
    recompute_stated: bool = True
    reserved_bytes: Annotated[int, Field(gt=0)] | None = None

    @property
    def tokens(self) -> int:
        """Return the tokens of a step; 0 where the job is not known."""
        return self.job.global_batch * self.job.seq_len if self.job else 0

    @property
    def layout(self) -> str:
        """Return the layout in short; "" where the job is not known."""
        return "" if self.job is None else self.job.layout.text

    @property
    def identity(self) -> Hashable:
        return id(self)

    @property
    def measured(self) -> float | None:
        return self.measured_s

    @property
    def split(self) -> Literal["scored", "calibration", "not scored"]:
        """Return whether the row counts in errors, and whether constants were fitted to it."""
        if not self.scored:
            return "not scored"
        return "calibration" if self.calibrates else "scored"

    @property
    def effort(self) -> float:
        """Return how many layers all simulated microbatches pass; a ring's steps count twice."""
        if self.job is None:
            return 0
        most = _PIPELINE_ROUNDS * self.job.layout.pp
        steps = 2 * self.job.layout.cp if self.job.layout.cp > 1 else 1
        return self.job.shape.num_layers * min(self.job.num_microbatches, most) * steps

    def value_in(self, predicted: Predicted) -> float | None:
        return predicted.step_s

    def nodes(self, values: Values | None) -> tuple[Machine, Cluster]:
        """Return a node and the cluster as shipped, or with these values of constants."""
        cluster = load_cluster(self.cluster)
        machine = machine_of(cluster)
        if values is None:
            return machine, cluster
        return with_constants(machine, cluster, values, "tried")

    def ready(self, profile: Values | None) -> "LaidOut":
        """Lay the job out on its cluster.

        Raises:
            NotModelledError: shapes and layouts known here cannot say what ran.
            TwinstreamError: as the profile is read, or the job cannot run so.
        """
        if self.job is None:
            raise NotModelledError(self.why_not)
        return LaidOut(self, Prepared(self.job, self.nodes(profile)[1]))

    def refusal(self, error: TwinstreamError) -> str:
        """Return what is wrong: a table's jobs are others', and any may be beyond what is known."""
        return str(error)


class NotModelledError(TwinstreamError):
    """Shapes and layouts known here cannot say what ran."""


@dataclass(frozen=True)
class LaidOut:
    """A row's job on its cluster."""

    row: ClusterRow
    prepared: Prepared

    def predicted(self, profile: Values | None) -> Predicted:
        """Predict the step and its memory."""
        machine, cluster = self.row.nodes(profile)
        found = self.prepared.on(cluster, machine)
        published = self.row.activation_bytes is not None
        return Predicted(
            step_s=found.step_s,
            fits=found.fits or self._may_fit(found.room_bytes - found.memory["reserve"]),
            memory_bytes=found.memory_bytes,
            room_bytes=found.room_bytes,
            activation_bytes=self._kept_bytes() if published else None,
        )

    def step_s(self, profile: Values | None) -> float:
        """Predict the seconds of a step."""
        machine, cluster = self.row.nodes(profile)
        return self.prepared.on(cluster, machine).step_s

    def _may_fit(self, room_bytes: int) -> bool:
        """Whether it fits with whole layers recomputed, where nobody says what was."""
        job = self.row.job
        if self.row.recompute_stated or job is None:
            return False
        full = job.layout.model_copy(update={"recompute": "full"})
        least = Prepared(job.laid_out(full), load_cluster(self.row.cluster)).memory()
        return sum(least.values()) <= room_bytes

    def _kept_bytes(self) -> int:
        """Sum what the first stage keeps between forward and backward, without buffers; more
        microbatches than stages change nothing."""
        document = self.prepared.steps[0].document
        first = document.of(document.classes[0])
        return sum(slot.size_bytes for slot in first.slots if slot.slot_id.startswith(_SAVED))


def read_measured_steps(paths: Sequence[Path]) -> tuple[ClusterRow, ...]:
    """Read the rows of tables, one table after the other.

    Raises:
        ClusterTableError: a file is no such table, has no rows, or a cell is wrong.
    """
    return tuple(row for path in paths for row in _read(path))


def _read(path: Path) -> list[ClusterRow]:
    names, lines = read_lines(path)
    if missing := [name for name in _NEEDED if name not in names]:
        raise ClusterTableError(
            f"{path} is no table of measured steps: it lacks {', '.join(missing)}. Its columns are "
            f"{', '.join(COLUMNS)} (docs/benchmarks/clusters.md)"
        )
    if not lines:
        raise ClusterTableError(f"{path} has no rows under its header")
    return [cells.valid(_row) for cells in lines]


def _row(cells: Cells) -> ClusterRow:
    return ClusterRow(
        series=cells.text("series") or cells.text("gpu"),
        row_id=cells.text("row"),
        family=cells.text("family") or cells.text("row"),
        gpu=cells.text("gpu"),
        num_gpus=cells.count("num_gpus"),
        cluster=cells.text("cluster"),
        job=_job(cells) if cells.text("model") else None,
        measured_s=cells.number("step_time_s") if cells.text("step_time_s") else None,
        note=cells.text("note"),
        suspect=cells.flag("suspect"),
        scored=cells.flag("scored", unstated=True),
        why_not=cells.text("why_not"),
        calibrates=cells.flag("calibrates"),
        compared=_compared(cells) if cells.text("comparison") else None,
        activation_bytes=_bytes(cells, "activation_bytes"),
        framework=_framework(cells),
        recompute_stated=cells.flag("recompute_stated", unstated=True),
        reserved_bytes=_bytes(cells, "reserved_bytes"),
    )


def _bytes(cells: Cells, column: str) -> int | None:
    return cells.count(column) if cells.text(column) else None


def _framework(cells: Cells) -> Framework:
    told = cells.text("framework") or "megatron"
    for name in FRAMEWORKS:
        if told == name:
            return name
    raise ClusterTableError(
        f"{cells.path}, line {cells.line}: framework is '{told}', and needs one of "
        f"{', '.join(FRAMEWORKS)}"
    )


def _compared(cells: Cells) -> Compared:
    rank = cells.text("rank") or "0"
    return Compared.model_validate_strings(
        {"kind": cells.text("comparison"), "set": cells.text("set"), "rank": rank}
    )


def _job(cells: Cells) -> Job:
    layout, gradients = _layout(cells)
    return Job.model_validate(
        {
            "shape": _model(cells),
            "layout": layout,
            "recipe": _recipe(cells, gradients),
            "seq_len": cells.count("seq_len"),
            "global_batch": cells.count("global_batch"),
            "network_reduction": cells.flag("network_reduction", unstated=True),
        }
    )


def _recipe(cells: Cells, gradients: str) -> Recipe:
    """Megatron-LM's, with what the row says of it."""
    precision = cells.text("precision") or "bf16"
    if precision not in MATMULS_OF_PRECISION:
        raise ClusterTableError(
            f"{cells.path}, line {cells.line}: precision is '{precision}', and needs one of "
            f"{', '.join(MATMULS_OF_PRECISION)}"
        )
    attention = cells.text("attention") or "flash"
    return megatron_recipe(attention, precision, "model" if gradients == "bfloat16" else "float32")


def _model(cells: Cells) -> ModelSpec:
    told = cells.text("model")
    if told.startswith("{"):
        return ModelSpec.model_validate_json(told)
    beside = cells.path.parent / told
    return load_model(beside if beside.exists() else told)


def _layout(cells: Cells) -> tuple[Layout, str]:
    """Read words `name=value`, and the dtype of gradients, which stands there too."""
    fields: dict[str, Any] = {}
    for word in cells.text("layout").split():
        name, _, value = word.partition("=")
        if not value:
            raise ClusterTableError(
                f"{cells.path}, line {cells.line}: layout has '{word}', and needs name=value"
            )
        listed = [int(count) for count in value.split(",")] if "," in value else None
        fields[name] = listed or (json.loads(value) if _is_json(value) else value)
    gradients = str(fields.pop("gradient_dtype", "float32"))
    return Layout.model_validate_json(json.dumps(fields)), gradients  # tuples from text alone


def _is_json(value: str) -> bool:
    return value in ("true", "false") or value.replace(".", "", 1).isdecimal()
