import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors here are tiny; threads would only wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def triton_device(request):
    """Where Triton's kernels run: in its interpreter on the CPU, or natively on a GPU."""
    triton = pytest.importorskip("triton")
    if triton.knobs.runtime.interpret != (request.param == "cpu"):
        pytest.skip("TRITON_INTERPRET says otherwise: kernels are interpreted, or native, not both")
    return request.param
