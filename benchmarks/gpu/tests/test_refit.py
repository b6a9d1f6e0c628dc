"""The curves, fitted anew to what an H200 measured on 2026-11-27."""

from pathlib import Path

import pytest

from benchmarks.gpu.jobs.results import ProbeFound, Results
from benchmarks.gpu.jobs.store import CampaignError
from benchmarks.gpu.report.refit import main, refit
from twinstream.hardware_profiles.loader import load_machine
from twinstream.schedule.files import read_document

PAGES = Path(__file__).parents[3] / "docs" / "benchmarks"


@pytest.fixture(scope="module")
def measured() -> Results:
    return read_document(Results, PAGES / "nvidia-h200.json")


def test_attention_and_products_are_within_what_the_page_says(measured):
    _, fit = refit(measured, load_machine(PAGES / "nvidia-h200.toml"))
    errors = {name: abs(1 / ratio - 1) for name, ratio in fit.ratios.items()}
    backward = [error for name, error in errors.items() if name.startswith("attention_backward")]
    assert len(backward) == 14 and max(backward) < 0.09 and sum(backward) / 14 < 0.02
    assert max(error for name, error in errors.items() if name.startswith("matmul")) < 0.05


def test_the_shipped_profile_is_that_fit(measured):
    machine, _ = refit(measured, load_machine(PAGES / "nvidia-h200.toml"))
    shipped = load_machine("h200")
    for key in ("matmul", "attention_backward/cudnn_frontend", "attention_forward/sdpa_cudnn"):
        for field in ("max", "half_depth", "diagonal"):
            found, kept = (getattr(one.efficiency[key], field) for one in (machine, shipped))
            assert kept == pytest.approx(found, rel=1e-4)
    for name in ("pcie_h2d_bytes_per_s", "pcie_d2h_bytes_per_s", "copy_latency_ns"):
        assert shipped.number(name) == pytest.approx(machine.number(name), rel=1e-4)


def test_samples_that_todays_probe_does_not_take_are_refused(measured):
    probed = measured.found("probe")
    assert isinstance(probed, ProbeFound)
    fewer = probed.model_copy(update={"samples": probed.samples[1:]})
    outcome = measured.outcomes["probe"].model_copy(update={"found": fewer})
    with pytest.raises(CampaignError, match="have 151 samples, and the probe now takes 152"):
        refit(measured.with_outcome("probe", outcome), load_machine(PAGES / "nvidia-h200.toml"))


def test_a_campaign_is_fitted_from_the_command_line(tmp_path, capsys):
    (tmp_path / "results.json").write_bytes((PAGES / "nvidia-h200.json").read_bytes())
    (tmp_path / "profile.toml").write_bytes((PAGES / "nvidia-h200.toml").read_bytes())
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), "-o", str(tmp_path / "anew.toml")])
    assert not ended.value.code
    assert "attention_backward" in capsys.readouterr().out
    assert load_machine(tmp_path / "anew.toml").efficiency["matmul"].max > 1
