"""Triton's kernels compile for a Hopper GPU: the interpreter checks neither types nor layouts."""

import json
import os
import subprocess
import sys

import pytest

from tests.contract.package_tree import REPO

MULTIPROCESSORS = 132  # of an H100 and of an H200


def test_every_kernel_compiles_for_sm_90_without_spilling_and_with_16_byte_loads():
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.executor.kernels.compile_for_hopper"],
        cwd=REPO, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    kernels = json.loads(ran.stdout)
    in_sources = {
        line.split("(")[0].removeprefix("def ")
        for path in (REPO / "executor/kernels/triton_kernels").glob("*.py")
        for line in path.read_text().split("@triton.jit\n")[1:]
    }
    assert {kernel["name"] for kernel in kernels} == in_sources
    for kernel in kernels:
        assert kernel["stack_bytes"] == 0, kernel
        if kernel["name"] != "_dequantize_kernel":  # writes 16 bytes of what 4 bytes of codes say
            assert kernel["wide_loads"] > 0, kernel
        if kernel["name"] == "_cross_entropy_kernel":  # rows at work stay in the L2 cache
            assert kernel["grid"] == [MULTIPROCESSORS]
        if kernel["name"] == "_adamw_kernel":  # all programs run at once
            assert kernel["grid"][0] <= MULTIPROCESSORS * kernel["resident"], kernel
