"""A tiny schedule with its predicted and measured timelines, made once by the command line."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.front_door.command_line import TINY_STEP, call
from twinstream.clusters.timed_step import document_of
from twinstream.hardware_profiles.clusters.loader import load_cluster
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.presets import load_preset
from twinstream.models.recipes.recipe import megatron_recipe
from twinstream.report.view import MeshView, View
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import read_document, write_document
from twinstream.schedule.timeline import Timeline


@dataclass(frozen=True)
class Files:
    """Paths of the documents of one plan."""

    schedule: Path
    predicted: Path
    measured: Path

    def read_schedule(self) -> Schedule:
        return read_document(Schedule, self.schedule)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("front_door")
    made = Files(*(folder / f"{name}.json" for name in ("schedule", "predicted", "measured")))
    caps = ("--device-mem", "6MiB", "--policy", "streaming")
    for command in (
        ("plan", *TINY_STEP, "--machine", "cpu", *caps, "-o", made.schedule),
        ("simulate", made.schedule, "-o", made.predicted),
        ("run", made.schedule, "--steps", 3, "--backend", "cpu", "-o", made.measured),
    ):
        outcome = call(*command)
        assert outcome.code == 0, outcome.err
    return made


@pytest.fixture(scope="session")
def cluster_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of a small model on 16 GPUs: two stages, replicas, tensor and context parallel."""
    layout = Layout(tp=2, pp=2, dp=2, cp=2, zero=1, recompute="full")
    shape = load_preset("tiny").model_copy(update={"dtype": "bfloat16"})
    recipe = megatron_recipe()
    job = Job(shape=shape, layout=layout, seq_len=4096, global_batch=8, recipe=recipe)
    path = tmp_path_factory.mktemp("cluster") / "cluster.json"
    write_document(document_of(job, load_cluster("h100_dgx")), path)
    return path


@pytest.fixture
def quick_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe small kernels only: a second instead of ten."""
    from twinstream.executor.probe import cpu_attention
    from twinstream.executor.probe.tasks import kernels
    from twinstream.executor.probe.timing import timing

    monkeypatch.setattr(kernels, "_SHAPES", kernels._SHAPES[:2])
    monkeypatch.setattr(cpu_attention, "_SHAPES", cpu_attention._SHAPES[:3])
    monkeypatch.setattr(timing, "_BUDGET_S", 0.01)


@pytest.fixture(scope="module")
def views(meshes: list[MeshView]) -> list[View]:
    """The device of each timeline."""
    return [mesh.classes[0] for mesh in meshes]


@pytest.fixture(scope="module")
def meshes(files: Files) -> list[MeshView]:
    """The predicted and the measured timeline of the files' schedule."""
    schedule = files.read_schedule()
    return [
        MeshView(name, schedule, read_document(Timeline, path))
        for name, path in (("predicted", files.predicted), ("measured", files.measured))
    ]
