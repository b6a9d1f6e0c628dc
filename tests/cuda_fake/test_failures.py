"""A device that fails or has no memory: one sentence, and what to go on from."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_fake.__main__ import LIBRARIES, environment
from tests.cuda_fake.device import TOTAL_BYTES, FakeDevice
from tests.executor.test_cuda_training import CUDA
from tests.training.small_runs import options
from twinstream.executor.memory import arena_memory
from twinstream.executor.memory.device_memory import DeviceMemoryError
from twinstream.training.trainer import Trainer

pytestmark = pytest.mark.gpu

# A training as the command line runs it, whose device fails at a pass.
_FAILS = """
import sys
from tests.cuda_fake.device import FakeDevice
from twinstream.executor.backends.cuda import CudaBackend
from twinstream.__main__ import main

begin_pass = CudaBackend.begin_pass
def fails(backend, number, *, timed):
    if number == 4:
        FakeDevice().fail()
    begin_pass(backend, number, timed=timed)
CudaBackend.begin_pass = fails
sys.argv = ["twinstream", *sys.argv[1:]]
sys.exit(main())
"""


def test_a_failed_device_ends_in_one_sentence_that_names_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    wanted = options(tmp_path, **CUDA)
    command = [sys.executable, "-c", _FAILS, "train", wanted.model, *wanted.data]
    given = {"-o": wanted.output, "--machine": "h100", "--seq-len": 128, "--steps": 8,
             "--tokens-per-step": 512, "--attention": "eager", "--dtype": "bfloat16",
             "--save-every": 2, "--backend": "cuda"}  # fmt: skip
    command += [str(word) for pair in given.items() for word in pair]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    said = " ".join(done.stderr.partition("error:")[2].split())
    assert "the GPU has failed" in said and "illegal memory access" in said
    assert "checkpoint-4: go on from it with --resume." in said


# Garbage that has a memory pool, and enough allocations for a collection.
_COLLECTS = """
import torch
from twinstream.executor.backends.gpu import TorchGpu

gpu = TorchGpu()
number = torch.zeros(1, device="cuda")
torch.cuda.synchronize()

def body():
    cycle = [torch.cuda.MemPool()]
    cycle.append(cycle)
    del cycle
    many = [[] for _ in range(5000)]
    number.add_(1)

gpu.capture(gpu.stream("compute"), body).reset()
print("captured")
"""


def test_no_garbage_is_collected_in_a_capture_where_torch_would_abort() -> None:
    command = [sys.executable, "-c", _COLLECTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "captured\n"), done.stderr


def test_a_slab_that_others_took_meanwhile_is_told(
    device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device_slab = arena_memory.device_slab

    def taken(size_bytes: int) -> object:
        device.memory(TOTAL_BYTES, others_bytes=TOTAL_BYTES)
        return device_slab(size_bytes)

    monkeypatch.setattr(arena_memory, "device_slab", taken)
    with pytest.raises(DeviceMemoryError, match=r"cannot be had.*smaller --device-mem\.$"):
        Trainer(options(tmp_path, **CUDA)).train()


def test_without_nvml_segments_are_not_expanded(tmp_path: Path) -> None:
    for path in LIBRARIES.iterdir():
        if "nvidia-ml" not in path.name:
            (tmp_path / path.name).symlink_to(path)
    code = (
        "from twinstream.executor.memory.device_memory import expand_segments\n"
        "print(expand_segments())"
    )
    command = [sys.executable, "-c", code]
    for libraries, expected in ((tmp_path, "False"), (LIBRARIES, "True")):
        done = subprocess.run(
            command, env=environment(libraries), capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr
