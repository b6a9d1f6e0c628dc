"""The campaign's probe alone, as `twinstream probe` calls it for a CUDA device."""

import pytest

from benchmarks.gpu import probing
from benchmarks.gpu.known_device import KnownDevice
from benchmarks.gpu.tests.test_command import SameProcess
from benchmarks.gpu.worker import JobFailed
from twinstream.commands.runs import probing as command
from twinstream.executor.probe.tasks import kernels
from twinstream.executor.probe.timing.timing import timing
from twinstream.hardware_profiles.loader import load_machine


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(probing, "DeviceProcess", SameProcess)
    monkeypatch.setattr(kernels, "_SHAPES", kernels._SHAPES[:2])
    monkeypatch.setattr(timing, "_BUDGET_S", 0.005)


def test_a_device_gets_a_profile_that_names_its_attention():
    told: list[str] = []
    machine = probing.probed_machine("cpu", told.append, "tiny")
    assert machine.attention is not None and machine.attention.name == "eager"
    assert machine.number("peak_fp32_flop_per_s") > 0
    assert any(line.startswith("probe: done") for line in told)


def test_a_probe_that_fails_says_why(monkeypatch):
    def fail(self, limit_s):
        raise JobFailed("the device fell off the bus", "what it did last")

    monkeypatch.setattr(KnownDevice, "probe", fail)
    told: list[str] = []
    with pytest.raises(probing.ProbeError, match="probe: the device fell off the bus"):
        probing.probed_machine("cpu", told.append, "tiny")
    assert "what it did last" in told[-1]


def test_a_cuda_device_is_measured_where_there_is_one_and_takes_no_dtype(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "backend_named", lambda name: "cuda")
    monkeypatch.setattr(probing, "probed_machine", lambda backend, tell: load_shipped(backend))
    command.probe(tmp_path / "mine.toml")
    assert load_machine(tmp_path / "mine.toml").name == "h200"
    with pytest.raises(command.DtypeError, match="leave out --dtype"):
        command.probe(dtype=[command.Dtype.float32])


def load_shipped(backend: str):
    assert backend == "cuda"
    return load_machine("h200")
