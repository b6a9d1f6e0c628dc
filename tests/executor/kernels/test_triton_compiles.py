"""Triton's kernels compile for a Hopper GPU: the interpreter checks neither types nor layouts."""

import json
import os
import subprocess
import sys

import pytest

from tests.contract.package_tree import REPO

MULTIPROCESSORS = 132  # of an H100 and of an H200
ISSUED_PER_S = MULTIPROCESSORS * 128 * 1.75e9  # lanes x clock; integers have half of the lanes
H200_BYTES_PER_S = 4.8e12


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
            if not kernel["HAS_CODES"]:  # these have work of their own (docs/record/kernels.md)
                issue_s = max(kernel["issued"], 2 * kernel["integer"]) / ISSUED_PER_S
                moved = 30 if kernel["HAS_MASTER"] else 14
                assert issue_s <= 1.15 * moved / H200_BYTES_PER_S, kernel


def test_a_turn_of_a_loop_is_counted_on_the_path_of_ordinary_numbers():
    pytest.importorskip("triton")
    from tests.executor.kernels.sass import LoopCount, loop_count

    text = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   FMUL R2, R3, R4 ;
        /*0020*/                   LOP3.LUT R5, R2, R4, RZ, 0x3c, !PT ;
        /*0030*/              @!P1 BRA 0x60 ;
        /*0040*/                   MOV R8, 0x60 ;
        /*0050*/                   CALL.REL.NOINC 0xb0 ;
        /*0060*/                   MUFU.RCP R6, R5 ;
        /*0070*/                   IMAD R7, R5, R6, RZ ;
        /*0080*/               @P0 EXIT ;
        /*0090*/                   BRA 0x10 ;
        /*00a0*/                   BRA 0xa0;
    """  # from FMUL to the second BRA, without the two that the first one skips; LOP3 is integer
    assert loop_count(text) == LoopCount(issued=7, integer=1)
