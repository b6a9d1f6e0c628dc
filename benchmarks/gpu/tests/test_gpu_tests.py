"""The stage that runs the tests marked gpu."""

import sys
from pathlib import Path

import pytest

from benchmarks.gpu.jobs.results import SuiteFound
from benchmarks.gpu.run import gpu_tests
from benchmarks.gpu.run.gpu_tests import run_gpu_tests, suite_found
from twinstream.executor.probe.process import JobFailed, JobRefused

NOTHING = SuiteFound()
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


def written(folder: Path, content: str) -> str:
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
    path = folder / "test_it.py"
    path.write_text(content)
    return str(path)


@pytest.fixture
def tests_in(tmp_path):
    return lambda content: written(tmp_path, content)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> tuple[str, SuiteFound]:
    folder = tmp_path_factory.mktemp("mixed")
    path = written(folder, MIXED)
    return path, run_gpu_tests([path], NOTHING, 60.0, folder / "printed").found


def test_outcomes_are_counted_and_failures_named(mixed):
    _, found = mixed
    assert (found.passed, found.failed, found.skipped) == (3, 1, 1)
    (failure,) = found.failures
    assert "test_wrong" in failure and "one is not two" in failure
    assert found.complete and len(found.reached) == 5


def test_tests_that_take_too_long_are_ended_and_those_before_counted(monkeypatch, tmp_path):
    printed = "t.py::test_a PASSED\nt.py::test_b FAILED\nt.py::test_c "
    program = f"import time; print({printed!r}, flush=True); time.sleep(600)"
    monkeypatch.setattr(gpu_tests, "_command", lambda *_: (sys.executable, "-c", program))
    found = run_gpu_tests([str(tmp_path)], NOTHING, 10.0, tmp_path / "printed").found
    assert (found.complete, found.in_flight) == (False, "t.py::test_c")
    assert (found.passed, found.failed) == (1, 1)
    assert found.failures == ("t.py::test_b",)
    assert found.reached == ("t.py::test_a", "t.py::test_b")


def test_tests_that_were_reached_are_not_run_again_and_all_are_counted(mixed, tmp_path):
    path, whole = mixed
    right, *named, wrong, left_out = whole.reached
    assert "test_right" in right and "test_wrong" in wrong
    part = SuiteFound(passed=1, failed=1, failures=("w",), reached=(right, wrong), complete=False)
    found = run_gpu_tests([path], part, 60.0, tmp_path / "printed").found
    reached = (right, wrong, *named, left_out)
    assert found == whole.model_copy(update={"failures": ("w",), "reached": reached})


def test_a_test_that_twice_does_not_end_has_failed():
    printed = "t.py::test_a PASSED  [ 1%]\nt.py::test_c "
    once = suite_found(printed, NOTHING, complete=False)
    assert (once.in_flight, once.failed) == ("t.py::test_c", 0)
    twice = suite_found("t.py::test_c ", once, complete=False)
    assert twice.failed == 1
    assert twice.reached == ("t.py::test_a", "t.py::test_c")
    assert "twice it had not ended" in twice.failures[0]
    assert suite_found(printed, once, complete=True).in_flight == ""


def test_tests_that_are_not_here_are_refused(tmp_path):
    with pytest.raises(JobRefused, match="run the campaign from the checkout"):
        run_gpu_tests([str(tmp_path / "nowhere")], NOTHING, 10.0, tmp_path / "printed")


def test_pytest_that_cannot_run_is_a_failure_with_what_was_printed(tests_in, tmp_path):
    (tmp_path / "conftest.py").write_text("import nowhere_at_all")
    with pytest.raises(JobFailed, match="pytest ended with code 4") as caught:
        run_gpu_tests([tests_in("")], NOTHING, 60.0, tmp_path / "printed")
    assert "nowhere_at_all" in caught.value.details


def test_nothing_printed_is_nothing_found():
    found = suite_found("", NOTHING, complete=True)
    assert (found.passed, found.failed, found.skipped, found.failures) == (0, 0, 0, ())


def test_paths_that_lie_in_one_another_are_run_in_the_order_given(tests_in, tmp_path):
    first = tests_in("import pytest\n\n@pytest.mark.gpu\ndef test_first(): pass\n")
    inner = tmp_path / "a_folder"
    inner.mkdir()
    for where in (inner, tmp_path):
        name = "inner" if where is inner else "outer"
        content = f"import pytest\n\n@pytest.mark.gpu\ndef test_{name}(): pass\n"
        (where / f"test_{name}.py").write_text(content)
    (tmp_path / "a_broken").mkdir()
    (tmp_path / "a_broken" / "test_broken.py").write_text("import nowhere_at_all")
    paths = [first, str(inner), str(tmp_path)]
    found = run_gpu_tests(paths, NOTHING, 60.0, tmp_path / "printed").found
    assert [name.rpartition("::")[2] for name in found.reached] == [
        "test_first", "test_inner", "test_outer",
    ]  # fmt: skip
    assert (found.passed, found.failed) == (3, 1)
    (failure,) = found.failures
    assert "test_broken.py" in failure
    again = run_gpu_tests(paths, found, 60.0, tmp_path / "printed").found
    assert again == found
