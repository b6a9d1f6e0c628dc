"""Work for a pool's processes that does not end by itself."""

import os
import time
from pathlib import Path

from twinstream import Planner


def sleep_for_ever(folder: str, _: Planner) -> None:
    """Leave a file named after this process in the folder, then sleep for an hour."""
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(3600)
