"""What a run on ranks leaves in its folder, what its page shows, and what is gone afterwards."""

import shutil
from pathlib import Path

import pytest

from tests.front_door.command_line import call, error_of
from tests.training.ranks.rank_runs import rank_options
from tests.training.small_runs import trained
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.log.layout_choice import LayoutChoice
from twinstream.log.run_files import RunFiles
from twinstream.models.layouts.layout import Layout
from twinstream.schedule.analysis.comparison import Comparison
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import read_document, write_document
from twinstream.schedule.timeline import Timeline
from twinstream.simulator.replay import simulate
from twinstream.training.options import TrainOptions

STEPS, MORE = 4, 6
OF_RANKS = ("cluster.json", "cluster.toml", "cluster_node.toml", "layouts.json", "measured.json")


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> TrainOptions:
    """Of a run on two ranks that has ended."""
    options = rank_options(tmp_path_factory.mktemp("ranks"), ranks=2, steps=STEPS)
    trained(options)
    return options


@pytest.fixture
def copied(wanted: TrainOptions, tmp_path: Path) -> TrainOptions:
    """The same of a copy of the folder, to go on for a few steps."""
    shutil.copytree(wanted.output, tmp_path / "run")
    return wanted.model_copy(update={"output": tmp_path / "run", "steps": MORE})


def written(folder: Path) -> str:
    path = folder.parent / "page.html"
    outcome = call("report", folder, "-o", path)
    assert outcome.code == 0, outcome.err
    return path.read_text(encoding="utf-8")


def test_the_profile_that_is_kept_predicts_what_was_predicted(wanted: TrainOptions) -> None:
    files = RunFiles(wanted.output)
    schedule = read_document(Schedule, files.cluster)
    cluster = load_cluster(str(files.profile))
    again = simulate(schedule, machine_of(cluster), cluster)
    found = read_document(Comparison, files.comparison)
    assert found.step_ns.predicted == again.step_ns
    measured = read_document(Timeline, files.measured)
    assert found.step_ns.measured == measured.step_ns
    assert measured.provenance.kind == "measured"
    assert [len(line.passes) > 0 for line in measured.classes.values()].count(True) > 0


def test_why_the_layout_was_chosen_is_kept(wanted: TrainOptions) -> None:
    choice = read_document(LayoutChoice, RunFiles(wanted.output).layouts)
    schedule = read_document(Schedule, RunFiles(wanted.output).cluster)
    layout = schedule.layout
    assert choice.chosen.startswith(Layout.model_validate(layout).text)
    assert choice.others and "tokens/s" in choice.others[0]
    assert choice.why == f"the fastest of {1 + len(choice.others)} that were looked at"
    assert choice.model_copy(update={"others": ()}).why == "as asked"


def test_the_page_of_the_run_has_the_layout_and_the_step_predicted_and_measured(
    wanted: TrainOptions, tmp_path: Path
) -> None:
    html = written(wanted.output)
    choice = read_document(LayoutChoice, RunFiles(wanted.output).layouts)
    for text in (
        ">Loss<", ">Layout<", choice.chosen, choice.others[0], choice.why, choice.assumed,
        "The whole step, as predicted", "The whole step, as measured",
        "Predicted against measured", "device memory of a rank", "on 2 ranks: pp ",
        "512 tokens a step",
    ):  # fmt: skip
        assert text in html, text
    told = call("report", wanted.output, "-o", tmp_path / "page.html", "--json").json()
    measured = read_document(Timeline, RunFiles(wanted.output).measured)
    assert told["measured"]["step_time_s"] == pytest.approx(measured.step_ns / 1e9)
    assert told["predicted"]["tokens_per_step"] == 512
    assert told["run"]["num_steps"] == STEPS


def test_other_commands_take_the_files_as_they_are(wanted: TrainOptions, tmp_path: Path) -> None:
    files = RunFiles(wanted.output)
    both = (files.cluster, "--measured", files.measured)
    for command in ("report", "trace"):
        assert call(command, *both, "-o", tmp_path / "out").code == 0
    compared = call("compare", *both, "--json").json()
    found = read_document(Comparison, files.comparison)
    assert compared["step_ns"]["predicted"] == found.step_ns.predicted
    assert call("verify", files.cluster).code == 0


def test_while_ranks_train_the_page_has_what_is_predicted(copied: TrainOptions) -> None:
    files = RunFiles(copied.output)
    for path in (files.measured, files.comparison, files.layouts):
        path.unlink()
    html = written(copied.output)
    assert "The whole step" in html and "as measured" not in html and ">Layout<" not in html
    assert "Assumed: " not in html
    files.profile.unlink()
    assert "Assumed: " in written(copied.output)


def test_a_run_that_goes_on_on_one_device_has_nothing_of_ranks(copied: TrainOptions) -> None:
    trained(copied.model_copy(update={"ranks": None}), resume=True)
    files = RunFiles(copied.output)
    assert not [name for name in OF_RANKS if (copied.output / name).exists()]
    read_document(Comparison, files.comparison)
    assert files.plan.exists() and "as measured" not in written(copied.output)


def test_a_run_that_goes_on_on_ranks_has_nothing_of_one_device(tmp_path: Path) -> None:
    alone = rank_options(tmp_path, steps=STEPS)
    trained(alone)
    assert RunFiles(alone.output).plan.exists()
    trained(alone.model_copy(update={"ranks": 2, "pp": 2, "steps": MORE}), resume=True)
    files = RunFiles(alone.output)
    assert not files.plan.exists() and all((alone.output / name).exists() for name in OF_RANKS)
    assert read_document(LayoutChoice, files.layouts).why == "as asked"
    assert len(read_document(Comparison, files.comparison).ranks) == 2


def test_a_run_that_has_ended_keeps_what_it_measured(copied: TrainOptions) -> None:
    ended = copied.model_copy(update={"steps": STEPS})
    before = {name: (copied.output / name).read_bytes() for name in OF_RANKS}
    trained(ended.model_copy(update={"pp": 1, "dp": 2}), resume=True)
    assert {name: (copied.output / name).read_bytes() for name in OF_RANKS} == before
    trained(ended.model_copy(update={"ranks": None}), resume=True)
    assert {name: (copied.output / name).read_bytes() for name in OF_RANKS} == before


def test_damaged_or_foreign_files_of_ranks_are_one_message(copied: TrainOptions) -> None:
    files = RunFiles(copied.output)
    files.layouts.write_text("{}")
    assert f"{files.layouts} is not a valid layout choice" in error_of("report", copied.output)
    files.layouts.unlink()
    measured = read_document(Timeline, files.measured)
    first = next(iter(measured.classes.values()))
    write_document(
        measured.model_copy(update={"classes": {"x": first}, "ranks": {}}), files.measured
    )
    assert "error: " in error_of("report", copied.output)
    files.cluster.write_text("{")
    assert str(files.cluster) in error_of("report", copied.output)


@pytest.mark.parametrize("name", OF_RANKS)
def test_a_page_is_not_written_over_what_it_is_made_from(copied: TrainOptions, name: str) -> None:
    before = (copied.output / name).read_bytes()
    assert "another file" in error_of("report", copied.output, "-o", copied.output / name)
    assert (copied.output / name).read_bytes() == before
