"""What `torchrun` starts: prints one line, what the rank has or why it has nothing."""

import os
import sys

from tests.executor.ranks.faulty import going_wrong, summing
from tests.executor.ranks.talks import taken
from twinstream.executor.program.options import RunOptions
from twinstream.executor.ranks.rank_run import RankRun
from twinstream.executor.ranks.world import Patience
from twinstream.schedule.errors import TwinstreamError


def main(how: str) -> int:
    rank = int(os.environ["RANK"])
    schedule = summing(2, 999 if how == "differs" and rank else 1000)
    passes = 4 if how == "runs on" and rank else 3
    try:
        with RankRun.joined(schedule, patience=Patience(timeout_s=4, start_s=60)) as run:
            for _ in range(2):
                outcome = run.execute(going_wrong(how, run.part), RunOptions(num_passes=passes))
            print(f"rank {rank} has {taken(outcome, 'x', 1).sum().item()}\n", end="", flush=True)
    except TwinstreamError as error:
        print(f"{error}\n", end="", flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
