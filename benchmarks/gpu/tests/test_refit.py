"""The curves, fitted anew to what an H200 measured on 2026-11-27."""

from pathlib import Path

import pytest

from benchmarks.gpu.jobs.results import KernelsFound, ProbeFound, Results, SampleRatio
from benchmarks.gpu.jobs.store import CampaignError
from benchmarks.gpu.report.refit import main, refit, samples_of
from twinstream.executor.probe.tasks.curves import CurveFit
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
    first, *others = probed.samples

    def refitted(*samples: SampleRatio) -> CurveFit:
        kept = probed.model_copy(update={"samples": samples})
        outcome = measured.outcomes["probe"].model_copy(update={"found": kept})
        machine = load_machine(PAGES / "nvidia-h200.toml")
        return refit(measured.with_outcome("probe", outcome), machine)[1]

    other = first.model_copy(update={"name": "matmul 3x5x7"})
    with pytest.raises(CampaignError, match=r"1 sample.* 'matmul 3x5x7', and .* takes 0"):
        refitted(other, *others)
    assert len(refitted(*others).ratios) == len(refitted(first, *others).ratios)
    one_less = [s for s in others if s.name != "8b S8192 head_loss"]
    head = next(s for s in others if s.name == "8b S8192 head_loss")
    with pytest.raises(CampaignError, match=r"1 sample.* head_loss', and .* takes 2"):
        refitted(*one_less, head)


def test_attention_of_another_models_heads_is_known_by_its_name(measured):
    probed, chosen = measured.found("probe"), measured.found("kernels")
    assert isinstance(probed, ProbeFound) and isinstance(chosen, KernelsFound)
    name = "attention_backward cudnn_frontend 8192/8192x2 32x64"
    one = probed.samples[0].model_copy(update={"name": name})
    *_, (work,) = (s.works for s in samples_of([*probed.samples, one], chosen))
    assert work.shape == (8192, 8192, 32, 64, 2)


def test_each_sample_has_the_work_that_its_name_says(measured):
    """Products by their shape, and tasks of the longer chunk before those of the shorter."""
    probed, chosen = measured.found("probe"), measured.found("kernels")
    assert isinstance(probed, ProbeFound) and isinstance(chosen, KernelsFound)
    for sample in samples_of(probed.samples, chosen):
        if sample.name.startswith("matmul"):
            m, n, k = map(int, sample.name.split()[1].split("x"))
            assert sample.works[0].flops == 2 * m * n * k
    heads = [s for s in samples_of(probed.samples, chosen) if s.name == "8b S8192 block_forward@0"]
    tokens = [next(w.shape[0] for w in s.works if w.unit == "matmul") for s in heads]
    assert tokens == [16384, 8192]


def test_a_campaign_is_fitted_from_the_command_line(tmp_path, capsys):
    (tmp_path / "results.json").write_bytes((PAGES / "nvidia-h200.json").read_bytes())
    (tmp_path / "profile.toml").write_bytes((PAGES / "nvidia-h200.toml").read_bytes())
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path), "-o", str(tmp_path / "anew.toml")])
    assert not ended.value.code
    assert "attention_backward" in capsys.readouterr().out
    assert load_machine(tmp_path / "anew.toml").efficiency["matmul"].max > 1
