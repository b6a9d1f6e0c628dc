"""The demo, from the probe to the comparison."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.front_door.command_line import SUMMARY_KEYS, call
from twinstream.demo import DemoSettings, run_demo
from twinstream.demo_loop import Loop, Row, Trial
from twinstream.hardware_profiles.loader import load_machine
from twinstream.schedule.analysis.comparison import Pair
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import read_document
from twinstream.schedule.timeline import Timeline

SMALL = ("--num-layers", 2, "--steps", 2)


@pytest.mark.usefixtures("quick_probe")
def test_the_demo_offloads_recomputes_and_trains_to_the_same_bits(tmp_path):
    folder = tmp_path / "out" / "demo"
    document = call("demo", *SMALL, "-o", folder, "--json").json()
    assert document.keys() >= SUMMARY_KEYS
    assert document["recompute_fraction"] > 0
    assert document["h2d_bytes"] > 0
    assert document["workload"]["rounds_per_step"] == 2
    assert document["losses"] == document["losses_resident"]
    assert len(document["losses"]) == 2
    assert document["same_losses"] is True
    assert document["same_state"] is True
    assert document["device_peak_bytes"] <= document["caps"]["device_bytes"]
    assert document["host_peak_bytes"] <= document["caps"]["host_bytes"]
    schedule = read_document(Schedule, folder / "schedule.json")
    assert len(schedule.ops) == document["num_ops"]
    for name, kind in (("predicted", "simulated"), ("measured", "measured")):
        assert read_document(Timeline, folder / f"{name}.json").provenance.kind == kind
    assert load_machine(folder / "machine.toml").name == "cpu-probed"
    assert load_machine(folder / "calibrated.toml").name == "cpu-probed-calibrated"
    plans = document["calibration"]["plans"]
    assert [(plan["policy"], plan["calibrated_with"]) for plan in plans] == [
        ("resident", True), ("optimal", True), ("streaming", False)
    ]  # fmt: skip
    for plan in plans:
        counted, told = plan["counted_step_s"], plan["after_step_s"]
        assert plan["after_error"] == pytest.approx(told / counted - 1)
        assert counted <= plan["measured_step_s"]
    compare = [folder / f"{name}.json" for name in ("schedule", "predicted", "measured")]
    assert call("compare", *compare, "--machine", folder / "machine.toml").code == 0


@pytest.mark.usefixtures("quick_probe")
def test_the_demo_prints_both_runs_side_by_side(tmp_path):
    outcome = call("demo", *SMALL, "-o", tmp_path)
    assert outcome.code == 0, outcome.err
    assert "all on the device" in outcome.out
    assert "other caps (new)" in outcome.out
    assert "bit-identical" in outcome.out
    assert "NOT" not in outcome.out
    assert "block_recompute" in outcome.out


@pytest.mark.usefixtures("quick_probe")
def test_runs_that_differ_are_a_bug_and_exit_1(tmp_path, monkeypatch):
    from twinstream import demo

    monkeypatch.setattr(demo, "_same_state", lambda one, other: False)
    outcome = call("demo", *SMALL, "-o", tmp_path)
    assert outcome.code == 1
    assert "NOT identical" in outcome.out


@pytest.mark.usefixtures("quick_probe")
def test_every_phase_of_the_demo_is_shown(tmp_path):
    from collections.abc import Iterator
    from contextlib import contextmanager

    shown: list[tuple[str, int | None]] = []
    advanced: list[int] = []

    @contextmanager
    def progress(what: str, total: int | None) -> Iterator[object]:
        shown.append((what, total))
        yield lambda: advanced.append(1)

    run_demo(DemoSettings(tmp_path, num_steps=2, num_layers=2), progress)
    assert [total for _, total in shown] == [None, None, 2, 2, None, 2]
    assert len(advanced) == 6


# --- busy machines


def row(core_share: float) -> Row:
    pair = Pair(predicted=1.0, measured=1.0)
    return Row("plan", "optimal", pair, pair, True, 1.0, core_share)


@pytest.mark.parametrize(
    ("core_shares", "told"),
    [((0.97, 0.99), ""), ((0.30, 0.55), "had a core for 30% to 55% of their time")],
)
def test_a_busy_machine_is_told_in_a_sentence(core_shares, told):
    fit: Any = None
    assert told in (Loop(fit, tuple(map(row, core_shares))).disturbed or "")


def test_of_a_disturbed_run_only_the_time_with_a_core_counts(files):
    timeline = read_document(Timeline, files.measured)
    schedule: Schedule = files.read_schedule()

    def trial(share: float | None) -> Trial:
        provenance = timeline.provenance.model_copy(update={"processor_share": share})
        told: Any = SimpleNamespace(timeline=timeline.model_copy(update={"provenance": provenance}))
        summary: Any = None
        return Trial(schedule, timeline, told, summary, summary)

    assert trial(None).alone.step_ns == trial(0.95).alone.step_ns == timeline.step_ns
    half = trial(0.5).alone
    assert half.step_ns == pytest.approx(timeline.step_ns / 2)
    last, before = half.passes[-1].end_ns[-1], timeline.passes[-1].end_ns[-1]
    assert last == pytest.approx(before / 2, abs=1)
