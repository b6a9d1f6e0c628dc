"""The device's process: what breaks there breaks one job."""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.waiting import ended
from twinstream.executor.probe.process import DeviceProcess, JobFailed, JobRefused, JobTimeout
from twinstream.schedule.errors import TwinstreamError


def process_id(_: str) -> int:
    return os.getpid()


def told(state: str, more: str) -> str:
    return state + more


def refuse(_: str) -> None:
    raise TwinstreamError("so much there is not")


def break_down(_: str) -> None:
    raise RuntimeError("an illegal access\nwas encountered")


def die(_: str) -> None:
    os._exit(9)


def hang(_: str) -> None:
    time.sleep(60.0)


def test_a_process_does_jobs_until_one_breaks_it_and_then_another_does():
    with DeviceProcess(partial(str, "begun")) as process:
        first = process.do(process_id, 30.0)
        assert process.do(partial(told, more=" once"), 30.0) == "begun once"
        with pytest.raises(JobRefused, match="so much there is not"):
            process.do(refuse, 30.0)
        assert process.do(process_id, 30.0) == first
        with pytest.raises(JobFailed, match=r"RuntimeError: an illegal access$") as caught:
            process.do(break_down, 30.0)
        assert "in break_down" in caught.value.details
        second = process.do(process_id, 30.0)
        assert second != first
        with pytest.raises(JobFailed, match=r"process died \(exit code 9\)"):
            process.do(die, 30.0)
        with pytest.raises(JobTimeout, match="not done after 0 s"):
            process.do(hang, 0.3)
        last = process.do(process_id, 30.0)
        assert last not in (first, second)
    assert not Path(f"/proc/{last}").exists()


PARENT = """
import sys
from tests.executor.probe.test_process import hang, process_id
from twinstream.executor.probe.process import DeviceProcess
process = DeviceProcess(str)
print(process.do(process_id, 30.0), flush=True)
process.do(hang, 30.0)
"""


def test_the_process_ends_in_the_middle_of_a_job_when_its_parent_is_killed(tmp_path):
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    env = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    parent = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, env=env)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.2)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert ended([child])
