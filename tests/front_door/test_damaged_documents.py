"""Whatever one value of a document becomes, there is a result or one message, and no traceback."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.front_door.conftest import Files
from tests.front_door.damaged_documents import as_toml, damaged
from twinstream import api
from twinstream.api import simulate
from twinstream.commands.arguments.inputs import checked_schedule, read_timeline
from twinstream.commands.arguments.options import Profiles
from twinstream.commands.schedule_inputs import inputs_of as cluster_inputs
from twinstream.hardware_profiles.loader import load_machine, load_machine_text
from twinstream.measures.explanation import explain
from twinstream.measures.metrics import summarize
from twinstream.planner.search.chunking import TrainingStep
from twinstream.report.report import report_html
from twinstream.report.trace import trace_of
from twinstream.report.view import MeshView
from twinstream.schedule.analysis.comparison import compare
from twinstream.schedule.errors import TwinstreamError

NUMBER = int(os.environ.get("TWINSTREAM_DAMAGES", "60"))  # of each kind of document
SEED = int(os.environ.get("TWINSTREAM_SEED", "0"))
STEP = TrainingStep(seq_len=64, tokens_per_step=256)


def survived(document: object, use: Callable[[object], None], number: int = NUMBER) -> int:
    """How many damages ended in an error of ours; any other is raised, with what was done."""
    refused = 0
    for done, mine in damaged(document, number, SEED):
        try:
            use(mine)
        except TwinstreamError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{done}: {error!r}") from error
    return refused


def test_damaged_schedules_are_refused_or_used(files: Files, tmp_path: Path):
    machine = load_machine("cpu")

    def use(mine: object) -> None:
        path = tmp_path / "schedule.json"
        path.write_text(json.dumps(mine))
        schedule = checked_schedule(path)
        timeline = simulate(schedule, machine)
        summarize(schedule, timeline, machine)
        explain(schedule, timeline, machine)
        trace_of([MeshView("predicted", schedule, timeline)])

    assert survived(json.loads(files.schedule.read_text()), use) > NUMBER // 2


@pytest.mark.parametrize("kind", ["predicted", "measured"])
def test_damaged_timelines_are_refused_or_shown(kind: str, files: Files, tmp_path: Path):
    machine, schedule = load_machine("cpu"), files.read_schedule()
    good = read_timeline(files.predicted, "simulated")

    def use(mine: object) -> None:
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps(mine))
        line = read_timeline(path, "simulated" if kind == "predicted" else "measured")
        compare(schedule, good, line)
        summarize(schedule, line, machine)
        trace_of([MeshView(kind, schedule, line)])
        report_html(schedule, machine, predicted=line if kind == "predicted" else good,
                    measured=line if kind == "measured" else None)  # fmt: skip

    assert survived(json.loads(getattr(files, kind).read_text()), use) > NUMBER // 2


def test_damaged_schedules_of_clusters_are_refused_or_shown(cluster_file: Path, tmp_path: Path):
    def use(mine: object) -> None:
        path = tmp_path / "cluster.json"
        path.write_text(json.dumps(mine))
        inputs = cluster_inputs(path, Profiles(cluster="h100_dgx"))
        line = inputs.timeline()
        report_html(inputs.schedule, inputs.machine, predicted=line)
        trace_of([MeshView("predicted", inputs.schedule, line)])

    number = NUMBER // 4  # of a document that takes long
    assert survived(json.loads(cluster_file.read_text()), use, number) > number // 3


def test_damaged_timelines_of_clusters_are_refused_or_shown(cluster_file: Path, tmp_path: Path):
    inputs = cluster_inputs(cluster_file, Profiles())
    whole = json.loads(inputs.timeline().model_dump_json(exclude_none=True))

    def use(mine: object) -> None:
        path = tmp_path / "line.json"
        path.write_text(json.dumps(mine))
        line = inputs.timeline(path)
        report_html(inputs.schedule, inputs.machine, predicted=line)
        trace_of([MeshView("predicted", inputs.schedule, line)])

    assert survived(whole, use, NUMBER // 4) > NUMBER // 16


def test_damaged_profiles_are_refused_or_planned_for(files: Files, tmp_path: Path):
    schedule = files.read_schedule()

    def use(mine: object) -> None:
        assert isinstance(mine, dict)
        machine = load_machine_text(as_toml(mine), source="mine.toml")
        timeline = simulate(schedule, machine)
        summarize(schedule, timeline, machine)
        api.plan("tiny", machine, step=STEP, policy="streaming")

    whole = json.loads(load_machine("cpu").model_dump_json(exclude_none=True))
    assert survived(whole, use) > NUMBER // 4
