"""The shared fixtures, tried on a suite of one file in a folder of its own."""

import importlib.util
import shutil
import subprocess
import sys

import pytest

from tests.contract.package_tree import REPO

SUITE = """
import pytest

def test_golden(check_golden):
    check_golden("answer.json", "42\\n")

@pytest.mark.gpu
def test_on_a_gpu():
    raise RuntimeError("a GPU was found")

def test_one_hypothesis_profile():
    from hypothesis import settings
    assert settings.default.derandomize and settings.default.deadline is None
    assert settings.default.print_blob
"""


@pytest.fixture
def suite(tmp_path):
    shutil.copy(REPO / "tests/conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "golden").mkdir()
    return tmp_path


def run_suite(suite, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", *options]
    done = subprocess.run(command, cwd=suite, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_a_golden_file_is_rewritten_only_on_request_and_then_fails_once(suite):
    golden = suite / "golden/answer.json"
    code, printed = run_suite(suite, "-k", "golden")
    assert code == 1
    assert "answer.json is missing" in printed
    assert not golden.exists()

    golden.write_bytes(b"41\n")
    code, printed = run_suite(suite, "-k", "golden")
    assert code == 1
    assert "-41\n" in printed
    assert "+42\n" in printed
    assert golden.read_bytes() == b"41\n"

    code, printed = run_suite(suite, "-k", "golden", "--update-golden")
    assert code == 1
    assert "rewrote" in printed
    assert golden.read_bytes() == b"42\n"
    for options in ((), ("--update-golden",)):
        assert run_suite(suite, "-k", "golden", *options)[0] == 0


def test_a_golden_file_is_compared_byte_for_byte(suite):
    (suite / "golden/answer.json").write_bytes(b"42\r\n")
    assert run_suite(suite, "-k", "golden")[0] == 1


def test_a_gpu_test_is_skipped_with_a_reason_where_there_is_no_cuda(suite):
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has a CUDA device")
    code, printed = run_suite(suite, "-k", "gpu")
    assert code == 0
    assert "1 skipped" in printed
    assert "needs a CUDA device" in printed


def test_hypothesis_runs_the_same_examples_every_time(suite):
    assert run_suite(suite, "-k", "hypothesis")[0] == 0
