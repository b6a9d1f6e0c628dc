"""The shared fixtures, tried on a suite in a folder of its own."""

import importlib.util
import shutil
import subprocess
import sys

import pytest

from tests.contract.package_tree import REPO

SUITE = """
import pytest
from hypothesis import settings

@pytest.mark.parametrize("name", ["equal", "missing", "changed", "other_line_end"])
def test_golden(check_golden, name):
    check_golden(name, "same\\nnew\\n")

def test_hypothesis_profile():
    assert settings.default.derandomize and settings.default.deadline is None
    assert settings.default.print_blob

@pytest.mark.gpu
def test_on_a_gpu():
    import torch
    torch.zeros(1, device="cuda")
"""


@pytest.fixture
def suite(tmp_path):
    (tmp_path / "golden").mkdir()
    (tmp_path / "golden/equal").write_bytes(b"same\nnew\n")
    (tmp_path / "golden/changed").write_bytes(b"same\nold\n")
    (tmp_path / "golden/other_line_end").write_bytes(b"same\r\nnew\r\n")
    shutil.copy(REPO / "tests/conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (tmp_path / "test_suite.py").write_text(SUITE)
    return tmp_path


def run_suite(suite, *options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rsf", *options]
    return subprocess.run(command, cwd=suite, capture_output=True, text=True).stdout


def golden_files(suite) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (suite / "golden").iterdir()}


def test_a_golden_file_that_differs_fails_and_stays_as_it_is(suite):
    before = golden_files(suite)
    printed = run_suite(suite, "-k", "golden")
    assert "3 failed, 1 passed" in printed
    assert "missing is missing: run with --update-golden" in printed
    assert "-old\n" in printed
    assert "+new\n" in printed
    assert golden_files(suite) == before


def test_an_update_rewrites_what_differs_and_fails_for_it(suite):
    printed = run_suite(suite, "-k", "golden", "--update-golden")
    assert "3 failed, 1 passed" in printed
    assert "read its diff, then run again" in printed
    names = ("changed", "equal", "missing", "other_line_end")
    assert golden_files(suite) == dict.fromkeys(names, b"same\nnew\n")


def test_the_profile_is_loaded_and_a_gpu_test_runs_or_is_skipped_with_a_reason(suite):
    printed = run_suite(suite, "-k", "not golden")
    if has_cuda():
        assert "2 passed" in printed
    else:
        assert "1 passed, 1 skipped" in printed
        assert "needs a CUDA device" in printed


def has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
