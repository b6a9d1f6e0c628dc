"""The thread that does the host's part of a schedule, one thing after the other."""

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]


class HostThread:
    """Runs jobs in order, after `begin`.

    After the first error they are skipped; events happen all the same.
    """

    def __init__(self, begin: Job = lambda: None) -> None:
        self.error: BaseException | None = None
        self._jobs: queue.SimpleQueue[Job | threading.Event | None] = queue.SimpleQueue()
        self._begin = begin
        self._thread = threading.Thread(target=self._serve, name="twinstream-host", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def put_event(self) -> threading.Event:
        """An event that happens after all jobs put so far."""
        event = threading.Event()
        self._jobs.put(event)
        return event

    def stop(self) -> None:
        """Return when the jobs put so far are done or skipped."""
        self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        self._begin()
        while (job := self._jobs.get()) is not None:
            if isinstance(job, threading.Event):
                job.set()
            elif self.error is None:
                try:
                    job()
                except BaseException as error:  # handed to the thread that dispatches
                    self.error = error
