"""A CUDA device's profile, as `twinstream probe` asks for it, with stand-ins for the device."""

import pytest

from tests.executor.probe.test_choosing import FLASH, FakeProcess, process
from twinstream.commands.runs import probe as command
from twinstream.executor.probe import device
from twinstream.executor.probe.chains import probe_chains
from twinstream.executor.probe.choosing import attention_try, kernels_fault
from twinstream.executor.probe.chosen import Chosen
from twinstream.executor.probe.cuda import Probed, ProbeRequest, Sustained
from twinstream.executor.probe.device import (
    LOAD_S,
    ProbeError,
    datasheet_of,
    num_samples,
    probe_device,
    probed_machine,
)
from twinstream.executor.probe.process import JobFailed
from twinstream.executor.probe.tasks.task_samples import listed_grouped, listed_samples
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.recipes.recipe import KernelChoice

CHOSEN = Chosen(
    kernels=KernelChoice(attention="sdpa_flash"), excess_bytes=2**25, others=("sdpa_cudnn",)
)


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", "h100_datasheet"),
        ("NVIDIA H200", "h200_datasheet"),
        ("Radeon", None),
    ],
)
def test_nominal_rates_are_those_of_the_devices_datasheet(name, profile):
    found = datasheet_of(name)
    assert (found.name if found else None) == profile


@pytest.fixture
def requests(monkeypatch) -> list[ProbeRequest]:
    """What is asked of a probe that takes no time, of an H200 that is not here."""
    asked: list[ProbeRequest] = []

    def probe(request: ProbeRequest, where: object) -> Probed:
        asked.append(request)
        return Probed(load_machine("h200"), None, [], Sustained(6e14))

    monkeypatch.setattr(device, "probe_cuda", probe)
    monkeypatch.setattr(device.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(device.torch.cuda, "get_device_name", lambda where: "NVIDIA H200")
    return asked


def test_the_chosen_kernels_are_measured_and_other_attention_beside(requests):
    machine = probe_device("cuda", CHOSEN, ("tiny",), commit="abc").machine
    assert machine.attention is not None
    assert (machine.attention.name, machine.attention.kind) == ("sdpa_flash", "measured")
    assert "right and fastest on NVIDIA H200" in machine.attention.source
    (request,) = requests
    assert request.datasheet == load_machine("h200_datasheet")
    assert (request.commit, request.excess_bytes, request.warm_seconds) == ("abc", 2**25, 0.5)
    for chains, attention in (
        (request.chains, "sdpa_flash"), (request.attention_chains, "sdpa_cudnn"),
    ):  # fmt: skip
        assert [chain.workload.seq_len for chain in chains] == [64, 256]
        for chain in chains:
            assert chain.model.spec["dtype"] == "bfloat16"
            assert chain.recipe["kernels"]["attention"] == attention


class StandIn(FakeProcess):
    """Tries as told, and the probe itself in this process."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def close(self):
        pass

    def do(self, job, limit_s):
        if job.func in (attention_try, kernels_fault):
            return super().do(job, limit_s)
        return job("cuda")


@pytest.fixture
def told() -> list[str]:
    return []


def stand_in(monkeypatch, **more):
    known = process(FLASH).attention
    monkeypatch.setattr(device, "DeviceProcess", lambda begin: StandIn(known, **more))


def test_a_device_gets_a_profile_that_names_its_attention(monkeypatch, requests, told):
    stand_in(monkeypatch)
    machine = probed_machine(told.append, ("8b",))
    assert machine.attention is not None and machine.attention.name == "sdpa_flash"
    assert "attention sdpa_flash: 9.00 ms" in told
    assert "with attention sdpa_flash and triton vector kernels" in told[-1]


def test_a_probe_that_fails_says_why(monkeypatch, told):
    def fail(*_: object, **__: object) -> None:
        raise JobFailed("the device fell off the bus", "what it did last")

    stand_in(monkeypatch)
    monkeypatch.setattr(device, "probe_device", fail)
    with pytest.raises(ProbeError, match="could not be measured: the device fell off the bus"):
        probed_machine(told.append, ("8b",))
    assert told[-1] == "what it did last"


def test_a_cuda_device_is_measured_where_there_is_one_and_takes_no_dtype(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "backend_named", lambda name: "cuda")
    monkeypatch.setattr(device, "probed_machine", lambda tell: load_machine("h200"))
    command.probe(tmp_path / "mine.toml")
    assert load_machine(tmp_path / "mine.toml").name == "h200"
    with pytest.raises(command.DtypeError, match="leave out --dtype"):
        command.probe(dtype=[command.Dtype.float32])


@pytest.mark.parametrize("presets", [("8b",), ("8b", "1b")])
def test_a_probe_takes_each_work_once_and_both_sizes_of_heads(requests, monkeypatch, presets):
    """Counted from what the chains list, before anything is measured."""
    probe_device("cuda", CHOSEN, presets)
    (request,) = requests
    taken, heads = set(), set()
    for chains, part in ((request.chains, ""), (request.attention_chains, "attention")):
        for chain in chains:
            for name, works in listed_samples(chain):
                if name.startswith(part):
                    taken.add((chain.recipe["kernels"]["attention"], works))
                if name.startswith("attention"):
                    heads.add(works[0].shape[3])
    experts = {w for chain in request.expert_chains for _, w in listed_grouped(chain)}
    assert heads == {64, 128}
    assert num_samples(CHOSEN, presets) == len(taken) + len(experts)
    listed = sum(len([*listed_samples(chain)]) for chain in request.chains)
    assert len(taken) < listed


def test_a_probe_of_all_shapes_takes_less_than_a_minute():
    """By the H200's 152 samples in 117 s, of which links took 11 and each was loaded for 0.5 s."""
    assert 11 + num_samples(CHOSEN, ("8b", "1b")) * ((117 - 11) / 152 - 0.5 + LOAD_S) < 60


def test_of_a_sequence_in_slices_the_first_and_the_last_are_measured():
    chains = probe_chains(KernelChoice(), ("8b",))
    (chain,) = (one for one in chains if one.workload.seq_len == 65536)
    names, every = ([n for n, _ in listed_samples(chain, every_place=e)] for e in (False, True))
    assert set(names) < set(every)
    assert {int(name.split("@")[1]) for name in names if "@" in name} == {0, 49152}
    keys = {name.split()[2].split("x")[0] for name in names if name.startswith("attention")}
    assert keys == {"16384/16384", "16384/65536"}
