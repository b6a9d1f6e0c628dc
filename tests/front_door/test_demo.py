"""The demo, from the probe to the comparison."""

import pytest

from tests.front_door.command_line import SUMMARY_KEYS, call
from twinstream.demo import DemoSettings, run_demo
from twinstream.hardware_profiles.loader import load_machine
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
    compare = [folder / f"{name}.json" for name in ("schedule", "predicted", "measured")]
    assert call("compare", *compare, "--machine", folder / "machine.toml").code == 0


def test_the_demo_prints_both_runs_side_by_side(tmp_path):
    outcome = call("demo", *SMALL, "--machine", "cpu", "-o", tmp_path)
    assert outcome.code == 0, outcome.err
    assert "all on the device" in outcome.out
    assert "bit-identical" in outcome.out
    assert "NOT" not in outcome.out
    assert "block_recompute" in outcome.out


def test_runs_that_differ_are_a_bug_and_exit_1(tmp_path, monkeypatch):
    from twinstream import demo

    monkeypatch.setattr(demo, "_same_state", lambda one, other: False)
    outcome = call("demo", *SMALL, "--machine", "cpu", "-o", tmp_path)
    assert outcome.code == 1
    assert "NOT identical" in outcome.out


def test_every_phase_of_the_demo_is_shown(tmp_path):
    from collections.abc import Iterator
    from contextlib import contextmanager

    shown: list[tuple[str, int | None]] = []
    advanced: list[int] = []

    @contextmanager
    def progress(what: str, total: int | None) -> Iterator[object]:
        shown.append((what, total))
        yield lambda: advanced.append(1)

    run_demo(DemoSettings(tmp_path, machine="cpu", num_steps=2, num_layers=2), progress)
    assert [total for _, total in shown] == [None, 2, 2]
    assert len(advanced) == 4
