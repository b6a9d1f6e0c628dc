"""Training on the GPUs of a machine, on stand-ins: which, in what memory, by what links."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.front_door.command_line import call
from tests.training.ranks.rank_runs import rank_options
from twinstream.clusters.shared_machine import place_here
from twinstream.executor.launch import rank_processes
from twinstream.executor.probe import known_gpu
from twinstream.executor.ranks import gpus
from twinstream.executor.ranks.errors import GpusError
from twinstream.hardware_profiles.clusters.loader import load_cluster
from twinstream.hardware_profiles.loader import load_machine
from twinstream.schedule.errors import TwinstreamError
from twinstream.training.ranks.planning import on_all_gpus
from twinstream.training.trainer import Trainer

GIB = 2**30
H100 = "NVIDIA H100 80GB HBM3"
FREE = [40 * GIB, 30 * GIB, 50 * GIB, 60 * GIB]


def looks(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...] = (H100,) * 3, *, nvlink: bool = True
) -> None:
    """A process that looks at the GPUs finds these."""

    def looked(command: list[str], **_: Any) -> SimpleNamespace:
        count = int(command[-1])
        found = {"names": names[:count], "free_bytes": FREE[:count], "nvlink": nvlink}
        return SimpleNamespace(returncode=0, stdout=json.dumps(found), stderr="")

    monkeypatch.setattr(gpus.subprocess, "run", looked)


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with three H100, of which the second has least free."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: H100)
    monkeypatch.setattr(known_gpu, "with_attention", lambda machine, tell: machine)

    looks(monkeypatch)


@pytest.mark.parametrize(
    ("given", "ranks", "told"),
    [
        ({}, 3, "training on all 3 GPUs of this machine; --ranks 1 takes one of them"),
        ({"backend": "cuda"}, 3, "training on all 3 GPUs"),
        ({"backend": "cpu"}, None, ""),
        ({"ranks": 1}, 1, ""),
        ({"ranks": 2}, 2, ""),
        ({"policy": "streaming"}, None, "training on one of 3 GPUs: several do not do policy"),
    ],
)
def test_all_gpus_are_taken_unless_it_is_said_how_many(
    given: dict[str, Any], ranks: int | None, told: str, three_gpus: None, tmp_path: Path
) -> None:
    lines: list[str] = []
    wanted = rank_options(tmp_path, **({"backend": "auto"} | given))
    found = Trainer(on_all_gpus(wanted, lines.append))
    assert found._options.ranks == ranks
    assert "".join(lines).startswith(told) and len(lines) == bool(told)


def test_without_gpus_one_process_trains(tmp_path: Path) -> None:
    assert on_all_gpus(rank_options(tmp_path, backend="auto"), pytest.fail).ranks is None


def test_a_rank_s_caps_are_its_gpu_s_and_its_share_of_the_host(
    three_gpus: None, tmp_path: Path
) -> None:
    asked = {"backend": "cuda", "machine": None, "ranks": 2, "host_mem": "4GiB"}
    plan = Trainer(rank_options(tmp_path, **asked)).prepare().plan
    caps = {
        (part.caps.device_bytes, part.caps.host_bytes) for part in plan.schedule.schedules.values()
    }
    assert caps == {(30 * GIB, 4 * GIB)}  # the least that is free
    reserve = {part.caps.device_reserve_bytes for part in plan.schedule.schedules.values()}
    assert reserve == {load_machine("h100").number("device_reserve_bytes") + 1.25 * GIB}
    shared = Trainer(rank_options(tmp_path, **(asked | {"host_mem": None}))).prepare()
    (host_bytes,) = {part.caps.host_bytes for part in shared.plan.schedule.schedules.values()}
    assert shared.here.host_mem == pytest.approx(2 * host_bytes, abs=2)
    assert plan.place.machine == load_machine("h100")  # no cores are shared
    assert plan.choice.assumed == "links between GPUs as h100_dgx has them"


@pytest.mark.parametrize(
    ("machine", "assumed", "rate"),
    [
        ("h200", "links between GPUs as h200_dgx has them", 450e9),
        ("rtx3090", "GPUs linked by PCIe alone", None),
    ],
)
def test_links_are_those_of_a_cluster_of_the_same_gpus_or_pcie(
    machine: str, assumed: str, rate: float | None
) -> None:
    node = load_machine(machine)
    place = place_here(node, 4, num_cores=2)
    assert place.assumed.startswith(assumed)
    assert place.machine == node
    assert place.cluster.count("gpus_per_node") == 4
    assert place.cluster.machine == machine
    assert not place.cluster.curves
    link = place.cluster.node_bytes_per_s
    assert link is not None
    assert link.value == (rate or node.number("pcie_d2h_bytes_per_s"))


def test_more_ranks_than_gpus_are_refused_before_anything_is_looked_at(
    three_gpus: None, tmp_path: Path
) -> None:
    with pytest.raises(GpusError, match="4 ranks on one machine need a GPU each, and it has 3"):
        Trainer(rank_options(tmp_path, ranks=4, backend="auto")).prepare()


def test_ranks_are_told_to_run_on_gpus(
    three_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Told(TwinstreamError):
        pass

    class Processes:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.pids: list[int] = []

        def close(self) -> None:
            pass

        def begin(self, schedule: object, work: object, options: Any) -> None:
            raise Told(options.backend)

    monkeypatch.setattr(rank_processes, "RankProcesses", Processes)
    with pytest.raises(Told, match="cuda"):
        Trainer(rank_options(tmp_path, ranks=2, backend="cuda", machine="h100")).train()


def test_gpus_that_cannot_be_looked_at_are_said_so() -> None:
    with pytest.raises(GpusError, match="2 GPUs cannot be looked at: "):
        gpus.detect_gpus(2)  # there are none here


def test_gpus_of_different_kinds_are_refused(
    three_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks(monkeypatch, (H100, H100, "NVIDIA L4"))
    options = rank_options(tmp_path, ranks=2, backend="cuda", machine=None)
    Trainer(options).prepare()
    with pytest.raises(GpusError, match=r"GPU 1 is NVIDIA H100 .*; GPU 2 is NVIDIA L4: choose"):
        Trainer(options.model_copy(update={"ranks": 3})).prepare()


def test_without_nvlink_gpus_are_linked_by_pcie(
    three_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks(monkeypatch, nvlink=False)
    plan = Trainer(rank_options(tmp_path, ranks=2, backend="cuda", machine=None)).prepare().plan
    assert plan.choice.assumed == "GPUs linked by PCIe alone, as in rtx4090_pc"
    assert plan.place.cluster.name == "this machine"
    pc = place_here(load_machine("rtx4090"), 2, num_cores=2, nvlink=False)  # which has none
    assert pc.assumed == "links between GPUs as rtx4090_pc has them"
    assert pc.cluster.node_efficiency == load_cluster("rtx4090_pc").node_efficiency


class Nvml:
    """NVLink between these pairs of devices."""

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, *pairs: str) -> None:
        self._pairs = pairs

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid == "gone":
            raise self.NVMLError
        return uuid

    def nvmlDeviceGetP2PStatus(self, one: str, other: str, index: int) -> int:  # noqa: N802
        assert index == self.NVML_P2P_CAPS_INDEX_NVLINK
        return 0 if one + other in self._pairs else 3


@pytest.mark.parametrize(
    ("uuids", "linked"), [("ab", True), ("abc", True), ("abcd", False), (("a", "gone"), None)]
)
def test_nvlink_counts_where_it_links_each_with_each(uuids: Any, linked: bool | None) -> None:
    assert gpus.linked_by_nvlink(uuids, Nvml("ab", "ac", "bc", "cd", "ad")) is linked


def test_the_command_takes_all_gpus(three_gpus: None, tmp_path: Path) -> None:
    wanted = rank_options(tmp_path)
    told = call(
        "train", wanted.model, *wanted.data, "-o", tmp_path / "run", "--seq-len", 64,
        "--tokens-per-step", 768, "--chunk-tokens", 64, "--steps", 2, "--dry-run",
    )  # fmt: skip
    assert told.code == 0, told.err
    assert "on 3 ranks of h100" in told.out
    assert "links between GPUs as h100_dgx has them" in " ".join(told.out.split())
