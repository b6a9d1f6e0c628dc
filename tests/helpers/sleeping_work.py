"""Work for a pool's processes."""

import os
import time
from pathlib import Path

from twinstream import Planner


def sleep_for_ever(folder: str, _: Planner) -> None:
    """Leave a file named after this process in the folder, then sleep for an hour."""
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(3600)


def nap(seconds: float, planner: Planner) -> float:
    """Sleep so long."""
    time.sleep(seconds)
    return seconds
