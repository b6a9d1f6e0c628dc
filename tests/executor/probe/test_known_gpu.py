"""The attention of a GPU whose shipped profile lacks it: tried here, timed, named, with rates."""

import pytest

from twinstream.executor.probe import known_gpu
from twinstream.executor.probe.known_gpu import candidates, measured_attention, with_attention
from twinstream.executor.probe.process import JobFailed
from twinstream.executor.probe.tasks.attention import AttentionCandidate
from twinstream.hardware_profiles.cost import work_time
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.kernel_costs import attention_libraries
from twinstream.models.presets import load_preset
from twinstream.models.recipe import KernelChoice
from twinstream.planner.kernel_choice import attention_for

H100 = load_machine("h100")
RATES = {  # FLOP/s, of the stand-in
    "sdpa_flash": 2e14, "flash4": 5e14, "cudnn_frontend": 4e14, "cudnn_sliced": 4.5e14,
}  # fmt: skip


def test_only_what_is_installed_made_for_the_gpu_and_deterministic_is_tried(monkeypatch):
    assert candidates(H100) == ("sdpa_flash",)
    monkeypatch.setattr(attention_libraries, "version", lambda name: "9.9")
    assert candidates(H100) == (
        "sdpa_flash",
        "flash2",
        "flash3",
        "flash4",
        "cudnn_frontend",
        "cudnn_sliced",
    )
    assert candidates(load_machine("a100")) == ("sdpa_flash", "flash2")


def test_one_is_tried_and_timed_on_the_shapes_of_runs():
    tried, samples = measured_attention("cpu", "sdpa_cpu", ("tiny",), 0.0)
    assert (tried.name, tried.refused) == ("sdpa_cpu", None) and tried.time_ns > 0
    units = {(work.unit, work.implementation) for s in samples for work in s.works}
    assert units == {("attention_forward", "sdpa_cpu"), ("attention_backward", "sdpa_cpu")}
    assert len(samples) == 2 * (1 + 2)  # of packed sequences one case, of slices first and last
    refused, none = measured_attention("cpu", "sdpa_flash", ("tiny",), 0.0)
    assert "it runs on cuda, not on cpu" in refused.refused and none == []


class Device:
    """Answers as a GPU would that runs attention at constant rates; one attention breaks it."""

    def __init__(self, begin):
        self.asked: list[str] = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def do(self, job, limit_s):
        name = job.keywords["name"]
        if name == "flash3":
            raise JobFailed("the device's process died (exit code -11)")
        if name == "flash2":
            return AttentionCandidate(name, "its results differ from run to run"), []
        samples = []
        for chain in known_gpu.probe_chains(KernelChoice(attention=name), ("8b", "1b")):
            for call in chain.calls.values():
                for work in call.cost:
                    if work.unit.startswith("attention"):
                        ns = work.flops / RATES[name] * 1e9 + 2_000.0  # and a launch
                        told = f"{work.unit} {name} {work.shape}"
                        samples.append(known_gpu.TaskSample(told, (work,), ns))
        time_ns = sum(sample.time_ns for sample in samples)
        return AttentionCandidate(name, None, time_ns, excess_bytes=2**20 * len(name)), samples


def test_the_profile_names_the_fastest_that_is_right_and_has_rates_of_each(monkeypatch):
    monkeypatch.setattr(known_gpu, "DeviceProcess", Device)
    monkeypatch.setattr(attention_libraries, "version", lambda name: "9.9")
    told: list[str] = []
    machine = with_attention(H100, told.append)
    assert (machine.attention.name, machine.attention.kind) == ("flash4", "measured")
    assert attention_for(machine, load_preset("8b")) == "flash4"
    assert "attention flash3 is left out: the device's process died (exit code -11)" in told
    assert "attention flash2 is left out: its results differ from run to run" in told
    for name, rate in RATES.items():
        for chain in known_gpu.probe_chains(KernelChoice(attention=name), ("8b", "1b")):
            works = [w for c in chain.calls.values() for w in c.cost if "attention" in w.unit]
            for work in works:
                expected_ns = work.flops / rate * 1e9 + 2_000.0
                assert work_time(work, machine).alone_ns == pytest.approx(expected_ns, rel=0.01)
    grown = machine.number("device_reserve_bytes") - H100.number("device_reserve_bytes")
    assert grown == 2**20 * len("cudnn_frontend"), "the most that one takes beyond its formula"
    kept = {key: curve for key, curve in H100.efficiency.items() if "cudnn_frontend" not in key}
    assert {key: machine.efficiency[key] for key in kept} == kept


def test_where_none_is_right_the_profile_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(known_gpu, "DeviceProcess", Device)
    monkeypatch.setattr(known_gpu, "candidates", lambda machine: ("flash2", "flash3"))
    assert with_attention(H100, lambda line: None) == H100
