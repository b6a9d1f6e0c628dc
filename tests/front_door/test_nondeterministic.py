"""`--nondeterministic`: what it allows, and that whatever follows from it says so."""

import json

import pytest

from tests.front_door.command_line import TINY_STEP, call, error_of
from twinstream import api
from twinstream.api import simulate
from twinstream.executor.backends.protocol import MeasuredPass
from twinstream.executor.replay.dispatch import Passes
from twinstream.executor.run.measured import measured_timeline
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.planner.kernel_choice import NondeterministicAttentionError
from twinstream.planner.search.chunking import TrainingStep
from twinstream.report.report import report_html
from twinstream.report.trace import trace_of
from twinstream.report.view import MeshView
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import read_document
from twinstream.schedule.timeline import Provenance, Timeline

ASKED = (
    "--model", "8b", "--seq-len", 512, "--tokens-per-step", 512, "--machine", "h200",
    "--policy", "resident",
)  # fmt: skip
CUDNN = ("--attention", "sdpa_cudnn", "--nondeterministic")
NAMED = "attention sdpa_cudnn"


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The plan's screen, its JSON, and the file of the schedule."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    screen = call("plan", *ASKED, *CUDNN, "-o", path)
    assert screen.code == 0, screen.err
    return screen.out, call("plan", *ASKED, *CUDNN, "--json").json(), path


@pytest.mark.parametrize("command", ["plan", "whatif"])
def test_one_that_is_not_deterministic_is_refused_without_the_flag(command):
    told = " ".join(error_of(command, *ASKED, "--attention", "sdpa_cudnn").split())
    assert "does not give the same bits from run to run: allow it with --nondeterministic" in told
    assert "eager, sdpa_cpu, sdpa_flash, flash2, flash3, flash4" in told


def test_python_refuses_it_too_where_the_recipe_does_not_allow_it():
    kernels = KernelChoice(vector="triton", attention="sdpa_cudnn")
    step = TrainingStep(64, 256, recipe=Recipe(kernels=kernels))
    with pytest.raises(NondeterministicAttentionError, match="deterministic=False"):
        api.plan("8b", "h200", step=step)


def test_the_flag_leaves_the_default_deterministic():
    described = call("plan", *ASKED, "--nondeterministic", "--json").json()
    assert described["kernels"] == {"vector": "triton", "attention": "cudnn_frontend"}
    assert described["nondeterministic"] == []


def test_the_plan_says_so_on_the_screen_in_json_and_in_the_schedule(planned):
    screen, described, path = planned
    assert f"triton, {NAMED} (not deterministic)" in screen
    assert "Attention sdpa_cudnn does not give the same bits from run to run." in screen
    assert described["nondeterministic"] == [NAMED]
    assert any("same bits" in note for note in described["notes"])
    kernels = json.loads(path.read_text())["recipe"]["kernels"]
    assert kernels == {"vector": "triton", "attention": "sdpa_cudnn", "deterministic": False}


def test_simulation_trace_report_and_comparison_say_so(planned, tmp_path):
    path, timeline = planned[2], tmp_path / "timeline.json"
    told = call("simulate", path, "-o", timeline)
    assert "not deterministic" in told.out and NAMED in told.out
    predicted = read_document(Timeline, timeline)
    assert predicted.provenance.nondeterministic == (NAMED,)
    schedule = read_document(Schedule, path)
    where = f"simulated on h200 (not deterministic: {NAMED})"
    assert where in report_html(schedule, load_machine("h200"), predicted=predicted)
    trace = trace_of([MeshView("predicted", schedule, predicted)])
    assert where in trace["otherData"]["predicted"]


def test_a_measured_timeline_says_so(planned):
    schedule = read_document(Schedule, planned[2])
    spans = simulate(schedule, "h200").cold
    passes = Passes(times=(MeasuredPass(spans=spans, end_ns=max(spans.end_ns)),), host_cost=None)
    measured = measured_timeline(schedule, passes, Provenance(kind="measured", where="here"))
    assert measured.provenance.description == f"measured on here (not deterministic: {NAMED})"


def test_recipes_that_do_not_use_it_are_written_as_before():
    kernels = Recipe(kernels=KernelChoice()).model_dump(mode="json")["kernels"]
    assert kernels == {"vector": "eager", "attention": "eager"}
    assert KernelChoice.model_validate({"vector": "eager", "attention": "sdpa_cudnn"}).deterministic


def test_nothing_is_said_of_a_plan_that_repeats():
    screen = call("plan", *TINY_STEP, "--machine", "cpu", "--policy", "resident").out
    assert "deterministic" not in screen and "same bits" not in screen
