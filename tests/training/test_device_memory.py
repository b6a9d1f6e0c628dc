"""What a training takes of a GPU's memory from beginning to end, on an account of the tests."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.device_ledger import CONTEXT_BYTES, GIB, DeviceLedger, on_ledger
from tests.training.small_runs import Seen, options, trained, write_rows
from twinstream.executor.memory.device_memory import DeviceMemoryError
from twinstream.log.metrics import EvalMetrics
from twinstream.training.trainer import Trainer

CUDA: dict[str, Any] = {
    "backend": "cuda", "machine": "h100", "kernels": "eager", "attention": "eager",
}  # fmt: skip


class InUse(Seen):
    """Notes what is in use of the device after every evaluation."""

    def __init__(self, ledger: DeviceLedger) -> None:
        super().__init__()
        self._ledger, self.bytes = ledger, list[int]()

    def on_eval(self, metrics: EvalMetrics) -> None:
        self.bytes.append(self._ledger.in_use)


def test_evaluations_and_flushes_take_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = on_ledger(monkeypatch, DeviceLedger())
    held_out = write_rows(tmp_path / "held_out.jsonl", 5)
    wanted = options(tmp_path, eval_data=(str(held_out),), eval_every=1, policy="streaming", **CUDA)
    seen = InUse(ledger)
    Trainer(wanted, callbacks=[seen]).train()
    assert len(seen.bytes) == 6 and len(set(seen.bytes)) == 1
    assert ledger.in_use == CONTEXT_BYTES, "all is given back"


@pytest.mark.parametrize("device_mem", [None, "2.5GiB"])
def test_a_gpu_that_others_use_too_has_a_cap_of_what_is_free(
    device_mem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 GiB are: others and the context alone are more than that."""
    on_ledger(monkeypatch, DeviceLedger(int(5.5 * GIB), others_bytes=int(2.7 * GIB)))
    result, _ = trained(options(tmp_path, steps=2, device_mem=device_mem, **CUDA))
    assert result.step == 2


def test_an_evaluation_without_memory_names_the_checkpoint_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*given: object, **how: object) -> None:
        raise DeviceMemoryError("the device has no room.")

    on_ledger(monkeypatch, DeviceLedger())
    held_out = write_rows(tmp_path / "held_out.jsonl", 5)
    monkeypatch.setattr("twinstream.executor.run.evaluation.execute_in", none_left)
    wanted = options(tmp_path, eval_data=(str(held_out),), eval_every=2, save_every="2", **CUDA)
    with pytest.raises(
        DeviceMemoryError,
        match=r"no room\. The last checkpoint is .*checkpoint-2: go on .*--resume",
    ):
        trained(wanted)
