"""Ctrl-C and SIGTERM end a run after the step that is going on, with a checkpoint."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Whether a run is to end, and by which signal; 0 is none."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.asked, self.signal = False, 0
        self._tell = tell

    def __call__(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Ask for it; a second signal ends the process at once."""
        if self.asked and number:
            raise KeyboardInterrupt
        self.asked, self.signal = True, number
        if number:
            self._tell("stopping after this step with a checkpoint; once more to stop at once")

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Signals ask for it while this is open; in a thread that is not the main one none do."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
