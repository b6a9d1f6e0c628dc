"""Work beside a caller whose script has no main guard."""

import subprocess
import sys
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
