"""A GPU of the tests in the place of torch's, for runs on CUDA from start to end."""

from contextlib import nullcontext

import pytest
import torch

from tests.helpers.fake_gpu import FakeGpu
from twinstream.executor.run import cuda_run


def on_cuda(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu) -> FakeGpu:
    """From now on `run_on_cuda` runs on this one, with torch's few calls replaced."""
    replaced = {
        "current_device": lambda: 0,
        "current_stream": lambda: None,
        "stream": lambda stream: nullcontext(),
        "mem_get_info": lambda: (0, 10**9),
        "memory_reserved": lambda: 5 * 10**8,
        "get_device_name": lambda: "a GPU of the tests",
        "get_device_capability": lambda: (9, 0),
    }
    for name, call in replaced.items():
        monkeypatch.setattr(torch.cuda, name, call)
    monkeypatch.setattr(cuda_run, "TorchGpu", lambda: gpu)
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"):
        monkeypatch.setenv(name, "as the user wants")
    return gpu
