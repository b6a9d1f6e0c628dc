"""What a training asks of the driver: nothing that waits or allocates in a pass, nothing kept."""

from pathlib import Path
from typing import Any

import pytest

from tests.cuda_fake.device import ALLOCATIONS, PAGEABLE, SYNCHRONISATIONS, FakeDevice
from tests.executor.test_cuda_training import CUDA
from tests.training.small_runs import Seen, options, trained, write_rows
from twinstream.executor.kernels.attention import canary
from twinstream.executor.run import cuda_run
from twinstream.log.metrics import EvalMetrics
from twinstream.training.trainer import Trainer

pytestmark = pytest.mark.gpu
FLASH = CUDA | {"attention": "sdpa_flash"}
MIB = 2**20


@pytest.fixture(autouse=True)
def no_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compute nothing here."""
    monkeypatch.setattr(canary, "check_shape", lambda *given: None)


@pytest.mark.parametrize("policy", ["resident", "streaming"])
@pytest.mark.parametrize("graphs", [True, False])
def test_a_pass_allocates_nothing_and_waits_for_nothing(
    graphs: bool, policy: str, device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_run, "graphs_pay", lambda program, times: graphs)
    _, seen = trained(options(tmp_path, policy=policy, **FLASH))
    found = device.report()
    passes = found.during("pass")
    assert passes["cudaGraphLaunch"] > 0 or not graphs
    assert passes["kernels of Triton"] > 0 and passes["products"] > 0
    for name in (*ALLOCATIONS, *SYNCHRONISATIONS, *PAGEABLE, "cuModuleLoadData"):
        assert passes[name] == 0, name
    assert found.violations == {}
    assert found.during("captures")["captures refused"] == 0
    assert found.during("captures")["cudaStreamBeginCapture"] > 0 or not graphs
    assert not [line for line in seen.lines if "refused" in line or "compiled" in line]
    whole = found.during("")
    assert [whole[name] for name in PAGEABLE] == [0, 0], "state goes through pinned pieces"
    assert whole["waits for an event never recorded"] == 0
    for name in ("registered", "graphs", "executables", "queued"):
        assert found.left[name] == 0, name


class InUse(Seen):
    """Notes what is in use on the device after every evaluation."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device, self.bytes = device, list[int]()

    def on_eval(self, metrics: EvalMetrics) -> None:
        super().on_eval(metrics)
        self.bytes.append(self._device.in_use())


@pytest.mark.parametrize("policy", ["resident", "streaming"])
def test_evaluations_take_no_more_of_the_device_from_one_to_the_next(
    policy: str, device: FakeDevice, tmp_path: Path
) -> None:
    held_out = write_rows(tmp_path / "held_out.jsonl", 17)
    more: dict[str, Any] = {"steps": 12, "eval_data": (str(held_out),), "eval_every": 1}
    seen = InUse(device)
    Trainer(options(tmp_path, policy=policy, **FLASH, **more), callbacks=[seen]).train()
    assert len(seen.bytes) == 12
    assert max(seen.bytes) == seen.bytes[0], "and less once the training's graphs are gone"


def test_what_others_have_of_the_device_is_not_counted(device: FakeDevice, tmp_path: Path) -> None:
    device.memory(5 * 2**30, others_bytes=int(2.2 * 2**30))
    result, _ = trained(options(tmp_path, **FLASH))
    assert result.step == 6
