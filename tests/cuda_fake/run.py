"""Run a Python program above the fake device, whose kernels compute.

In the virtual environment, with the device, that `make test-cuda-fake` makes:
`python -m tests.cuda_fake.run -m benchmarks.gpu --size tiny --out DIR`.
"""

import os
import sys

from tests.cuda_fake.__main__ import LIBRARIES, environment

if __name__ == "__main__":
    if not LIBRARIES.is_dir():
        sys.exit(f"error: {LIBRARIES} is missing: run make test-cuda-fake first")
    changed = environment() | {"FAKE_CUDA_VALUES": "1"}
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], changed)
