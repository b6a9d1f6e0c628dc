"""Run the tests of the CUDA path above the fake device: `make test-cuda-fake`.

In a virtual environment with a CUDA build of torch: `python -m tests.cuda_fake [PYTEST OPTIONS]`.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.cuda_fake.build import SOURCES, BuildError, build

LIBRARIES = Path(sys.prefix) / "fake_cuda"
_PRELOADED = ("libcudart.so.13", "libcublasLt.so.13", "libcublas.so.13", "libcuda.so.1")
_GPU_TESTS = ("tests/executor/test_cuda.py", "tests/executor/test_cuda_training.py")
# Kernels either compute, or only their launches are counted.
RUNS = {
    "FAKE_CUDA_VALUES": (
        "tests/cuda_fake/test_values.py", *_GPU_TESTS, "tests/cuda_fake/test_late_orders.py",
    ),
    "FAKE_CUDA_NO_COMPUTE": ("tests/cuda_fake/test_counts.py", "tests/cuda_fake/test_failures.py"),
}  # fmt: skip


def environment(libraries: Path = LIBRARIES) -> dict[str, str]:
    """Of a process on the fake device."""
    return os.environ | {
        "LD_PRELOAD": ":".join(str(libraries / name) for name in _PRELOADED),
        "LD_LIBRARY_PATH": str(libraries),
        "TRITON_LIBCUDA_PATH": str(libraries),
        "TRITON_INTERPRET": "0",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "0",
        "PYTHONPATH": str(SOURCES.with_name("inside")),
        "OMP_NUM_THREADS": "2",
    }


def main() -> int:
    newest = max(path.stat().st_mtime for path in SOURCES.iterdir())
    if not LIBRARIES.exists() or LIBRARIES.stat().st_mtime < newest:
        try:
            build(Path(sys.prefix), LIBRARIES)
        except BuildError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        os.utime(LIBRARIES)
    codes = []
    for kind, paths in RUNS.items():
        command = [sys.executable, "-m", "pytest", "-m", "gpu", *sys.argv[1:], *paths]
        codes.append(subprocess.call(command, env=environment() | {kind: "1"}))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
