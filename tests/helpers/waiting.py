"""Wait for what a test asserts: it takes as long as it takes where others keep the machine busy."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

LONGEST_S = 300.0


def comes(condition: Callable[[], object]) -> bool:
    """Whether it comes to hold, which is looked at again and again."""
    until_s = time.monotonic() + LONGEST_S
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.005)
    return True


def ended(pids: Iterable[int]) -> bool:
    """Whether all these processes come to an end."""
    return comes(lambda: not any(is_running(pid) for pid in pids))


def is_running(pid: int) -> bool:
    """And is no zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
