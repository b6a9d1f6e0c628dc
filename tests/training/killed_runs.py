"""A run that is killed (-9) at random moments and gone on with, beside one that is not.

    python -m tests.training.killed_runs FOLDER NUM_KILLS [MODEL]

prints in how many of the kills a checkpoint was being written, and whether the bits are equal. The
processes are forked from one that has imported all, since that is most of a short run's time.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.training.small_runs import options, state_files, trained
from twinstream.training.checkpoints import COMPLETE, Checkpoints
from twinstream.training.options import TrainOptions

STEPS_PER_KILL = 16
AMONG = 8  # of which one is drawn; the others are time for this process to see it and to kill
OTHERS = [{}, {"policy": "streaming"}, {"policy": "full_recompute"}, {"host_mem": "1GiB"}]


def main(folder: Path, num_kills: int, model: str | None) -> None:
    """Kill, go on, compare."""
    num_steps = STEPS_PER_KILL * num_kills
    more = {"steps": num_steps, "save_every": "1", "dtype": "bfloat16", "model": model}
    undisturbed = options(folder / "a", **{**more, "save_every": "never"})
    log = undisturbed.output / "metrics.jsonl"
    step_s = time_of_a_step_s(log, forked(lambda: trained(undisturbed)), num_steps)
    wanted, draw = options(folder / "b", **more), random.Random(0)
    in_checkpoint = kills = 0
    for kill in range(num_kills):
        other = wanted.model_copy(update=draw.choice(OTHERS))
        step = STEPS_PER_KILL * kill + draw.randint(0, AMONG)
        kills += killed(other, step, after_s=draw.random() * step_s)
        found = wanted.output.glob("checkpoint-*")
        in_checkpoint += any(not (path / COMPLETE).exists() for path in found)
    done = Checkpoints(wanted.output).complete()
    assert wait(forked(lambda: trained(wanted, resume=has_begun(wanted)))) == 0
    same = state_files(wanted.output, num_steps) == state_files(undisturbed.output, num_steps)
    print(
        f"{kills} kills, {in_checkpoint} of them while a checkpoint was written, the last after "
        f"{done[-1].name if done else 'no checkpoint'} of {num_steps} steps: weights and optimizer "
        f"state are {'bit-identical' if same else 'NOT identical'}"
    )
    sys.exit(not (same and kills))


def has_begun(wanted: TrainOptions) -> bool:
    """On a busy machine it may have been killed before."""
    return (wanted.output / "run.toml").exists()


def killed(wanted: TrainOptions, step: int, after_s: float) -> bool:
    """Start a run or go on with it, and kill it so long after a step; whether it was not over."""
    process = forked(lambda: trained(wanted, resume=has_begun(wanted)))
    wait_for_step(wanted.output / "metrics.jsonl", step, process)
    time.sleep(after_s)
    os.kill(process, signal.SIGKILL)
    return wait(process) != 0


def time_of_a_step_s(log: Path, process: int, num_steps: int) -> float:
    """Of a run that has just been started, on average; its end is waited for."""
    wait_for_step(log, 1, process)
    start_s = time.monotonic()
    assert wait(process) == 0
    return (time.monotonic() - start_s) / num_steps


def wait_for_step(log: Path, step: int, process: int) -> None:
    """Until the log has a line of that step (with step 0: not at all), or the process has ended."""
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while step and f'"step":{step},' not in (log.read_text() if log.exists() else ""):
        if os.waitid(os.P_PID, process, ended):
            return
        time.sleep(0.002)


def forked(work: Callable[[], object]) -> int:
    """A process that does the work and ends."""
    process = os.fork()
    if process:
        return process
    try:
        work()
    except BaseException as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def wait(process: int) -> int:
    """How it ended; 0 is well."""
    return os.waitpid(process, 0)[1]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
