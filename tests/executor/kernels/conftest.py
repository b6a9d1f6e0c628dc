import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors here are tiny; threads would only wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
