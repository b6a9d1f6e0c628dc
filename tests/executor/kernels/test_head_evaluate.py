"""The loss alone: the bits that it has beside its gradients."""

import pytest
import torch

from tests.executor.kernels import driver
from tests.executor.kernels.driver import buffer, run
from tests.executor.kernels.test_head_loss import DTYPES, Head
from twinstream.executor.kernels.workspace import WorkspaceExhaustedError
from twinstream.models.kernel_costs.workspace import workspace_bytes
from twinstream.models.layout import ALIGNMENT_BYTES

KERNELS = ("head_evaluate", "head_loss")
READ = ("parameters", "hidden", "tokens", "step_state", "embedding")


def assert_same_loss_twice(head: Head, vector: str, device: str) -> None:
    """Written, then added to; the last slice of rows is shorter than the others."""
    with torch.device(device):
        alone = buffer(4)
        for mode in ("write", "update"):
            operands = {name: (b.to(device), m) for name, (b, m) in head.operands().items()}
            beside = operands["loss"][0]
            read = {name: operands[name] for name in READ if name in operands}
            run("head_evaluate", head.attributes, read | {"loss": (alone, mode)}, vector=vector)
            run("head_loss", head.attributes, operands, vector=vector)
            assert beside.view(torch.float32).item() != 0
            assert torch.equal(alone, beside)
            head.written = {n: operands[n][0] for n in head.written}
            head.mode = "update"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_alone_has_the_bits_of_the_loss_with_its_gradients(dtype, tied):
    assert_same_loss_twice(Head(dtype=dtype, tied=tied), "eager", "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_tritons_kernels_too(dtype, triton_device):
    assert_same_loss_twice(Head(dtype=dtype, tokens=5, row_slice=3), "triton", triton_device)


@pytest.mark.parametrize("vector", ["eager", "triton"])
def test_its_scratch_is_exact_and_less_than_with_gradients(vector, monkeypatch):
    head = Head()
    sizes = [workspace_bytes(f"{name}/{vector}", head.attributes) for name in KERNELS]
    assert sizes[0] < sizes[1]
    if vector == "triton":
        pytest.importorskip("triton")
    operands = head.operands()
    read = {name: operands[name] for name in READ if name in operands}
    monkeypatch.setattr(driver, "workspace_bytes", lambda *_: sizes[0] - ALIGNMENT_BYTES)
    with pytest.raises(WorkspaceExhaustedError):
        run("head_evaluate", head.attributes, read | {"loss": (buffer(4), "write")}, vector=vector)
