"""Work beside a caller whose script has no main guard."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
print("the script begins", flush=True)
import sys
from twinstream.schedule.worker_processes import ForkedWorkerContext, WorkerContext

main = sys.modules["__main__"]
context = {context}()
ours, theirs = context.Pipe()
process = context.Process(target=print, args=("the work is done",))
process.start()
process.join()
assert sys.modules["__main__"] is main
sys.exit(process.exitcode)
"""


@pytest.mark.parametrize("context", ["WorkerContext", "ForkedWorkerContext"])
def test_a_script_without_a_main_guard_begins_once(tmp_path: Path, context: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(context=context))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "the script begins\nthe work is done\n"


POOL = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from twinstream.schedule.worker_processes import WorkerContext

pools = [ProcessPoolExecutor(1, mp_context=WorkerContext()) for _ in range(2)]
print(*(pool.submit(os.getpid).result() for pool in pools), flush=True)
time.sleep(60)
"""


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """Of several pools: each holds both ends of the pipes of those before it."""
    script = tmp_path / "script.py"
    script.write_text(POOL)
    quiet = subprocess.DEVNULL  # the tracker of semaphores tells that it removes those left
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=quiet, text=True
    ) as parent:
        assert parent.stdout is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        parent.send_signal(signal.SIGKILL)
    assert len(workers) == 2
    until = time.monotonic() + 20
    while (left := [pid for pid in workers if _runs(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == []


def _runs(pid: int) -> bool:
    """Whether a process is there, and no zombie that nobody waits for."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.parametrize("context", ["WorkerContext", "ForkedWorkerContext"])
def test_workers_end_with_a_process_that_was_killed(context: str) -> None:
    code = (
        "import time\n"
        f"from twinstream.schedule.worker_processes import {context}\n"
        f"worker = {context}().Process(target=time.sleep, args=(600,))\n"
        "worker.start()\n"
        "print(worker.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        pid = int(one.stdout.readline())
        one.kill()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/cmdline").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}/cmdline").exists()
