"""Run the small GPU tests of kernels and steps under NVIDIA's compute-sanitizer.

    python -m tests.executor.sanitize [memcheck|racecheck|synccheck ...]

Exit code 0: no tool found anything. 1: one did, or a test failed. 2: there is no compute-sanitizer
or no CUDA device, and nothing was checked. Torch allocates without its cache, so that memcheck
sees where every tensor ends; kernels of whole steps work on one arena, inside of which it does not.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

TOOLS = ("memcheck", "racecheck", "synccheck")
FOUND_SOMETHING = 1
TESTS = (
    "tests/executor/kernels/test_triton_norms.py",
    "tests/executor/kernels/test_triton_elementwise.py",
    "tests/executor/kernels/test_triton_adamw.py",
    "tests/executor/test_triton_run.py",
)
# Gigabytes of logits take a checked kernel minutes.
LEFT_OUT = "not beyond_32_bits"


def sanitizer() -> str | None:
    """Its path: on PATH, or in the toolkit's usual place."""
    usual = Path("/usr/local/cuda/bin/compute-sanitizer")
    return shutil.which("compute-sanitizer") or (str(usual) if usual.exists() else None)


def command(tool: str, path: str) -> list[str]:
    plugins = ["-p", "no:xdist", "-p", "no:cacheprovider"]
    # Warnings of another machine's packages are errors in our settings, and stop the first test.
    pytest = ["-m", "pytest", "-W", "default", *plugins, "-q"]
    pytest += ["-m", "gpu", "-k", LEFT_OUT, *TESTS]
    checks = ["--tool", tool, "--error-exitcode", str(FOUND_SOMETHING), "--print-limit", "20"]
    return [path, *checks, sys.executable, *pytest]


def main(tools: list[str]) -> int:
    path = sanitizer()
    if path is None or not torch.cuda.is_available():
        missing = "compute-sanitizer" if path is None else "CUDA device"
        print(f"nothing was checked: there is no {missing} here", file=sys.stderr)
        return 2
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment.pop("TRITON_INTERPRET", None)
    codes = {}
    for tool in tools or TOOLS:
        print(f"--- {tool}", flush=True)
        codes[tool] = subprocess.run(command(tool, path), env=environment).returncode
    for tool, code in codes.items():
        print(f"{tool}: {'clean' if code == 0 else f'exit code {code}'}")
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
