"""The stage that runs the tests marked gpu."""

import sys

import pytest

from twinstream.campaign import gpu_tests
from twinstream.campaign.gpu_tests import run_gpu_tests, suite_found
from twinstream.campaign.worker import JobFailed, JobRefused

MIXED = """
import time
import pytest

pytestmark = pytest.mark.gpu

def test_right(): pass

@pytest.mark.parametrize("name", ["a b", "c"])
def test_named(name): pass

def test_wrong(): assert 1 == 2, "one is not two"

def test_left_out(): pytest.skip("no such device")
"""


@pytest.fixture
def tests_in(tmp_path):
    def write(content: str) -> str:
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
        path = tmp_path / "test_it.py"
        path.write_text(content)
        return str(path)

    return write


def test_outcomes_are_counted_and_failures_named(tests_in, tmp_path):
    done = run_gpu_tests([tests_in(MIXED)], tmp_path / "report.xml", limit_s=60.0)
    found = done.found
    assert (found.passed, found.failed, found.skipped) == (3, 1, 1)
    (failure,) = found.failures
    assert "test_wrong" in failure and "one is not two" in failure
    assert not done.timed_out
    assert "test_wrong" in (tmp_path / "report.xml").read_text()


def test_tests_that_take_too_long_are_ended_and_those_before_counted(monkeypatch, tmp_path):
    printed = "t.py::test_a PASSED\nt.py::test_b FAILED\nt.py::test_c "
    program = f"import time; print({printed!r}, flush=True); time.sleep(600)"
    monkeypatch.setattr(gpu_tests, "_command", lambda *_: (sys.executable, "-c", program))
    done = run_gpu_tests([str(tmp_path)], tmp_path / "report.xml", limit_s=10.0)
    assert done.timed_out
    assert (done.found.passed, done.found.failed) == (1, 1)
    assert done.found.failures == ("t.py::test_b",)


def test_tests_that_are_not_here_are_refused(tmp_path):
    with pytest.raises(JobRefused, match="run the campaign from the checkout"):
        run_gpu_tests([str(tmp_path / "nowhere")], tmp_path / "report.xml", limit_s=10.0)


def test_tests_that_cannot_be_collected_are_a_failure_with_what_was_printed(tests_in, tmp_path):
    with pytest.raises(JobFailed, match="pytest ended with code 2") as caught:
        run_gpu_tests([tests_in("import nowhere_at_all")], tmp_path / "report.xml", limit_s=60.0)
    assert "nowhere_at_all" in caught.value.details


def test_nothing_printed_is_nothing_found():
    found = suite_found("")
    assert (found.passed, found.failed, found.skipped, found.failures) == (0, 0, 0, ())
