"""Jobs tried within the time there is, and what became of each, on the disk before the next."""

from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.gpu.jobs.results import Found, Outcome, SuiteFound
from benchmarks.gpu.jobs.store import Store
from benchmarks.gpu.run.budget import Budget
from twinstream.executor.probe.process import JobFailed, JobRefused, JobTimeout

_MOST_ATTEMPTS = 2


@dataclass
class Attempts:
    """Tries jobs that are not done, while the budget allows; `waiting` are those it did not."""

    store: Store
    budget: Budget
    tell: Callable[[str], None]
    waiting: list[str] = field(default_factory=list)

    def is_open(self, key: str) -> bool:
        results = self.store.results
        return not results.is_done(key) and results.attempts(key) < _MOST_ATTEMPTS

    def attempt(
        self, key: str, expected_s: float, limit_s: float, job: Callable[[float], Found]
    ) -> None:
        """Do a job if it is open and there is time."""
        if not self.is_open(key):
            return
        if not self.budget.allows(expected_s):
            self.waiting.append(key)
            return
        attempts = self.store.results.attempts(key)
        before = self.store.results.outcomes.get(key)
        begun = Outcome(status="started", attempts=attempts + 1)
        if before is not None and before.status in ("part", "started"):  # keep what was found
            begun = begun.model_copy(update={"found": before.found})
        self.store.put(key, begun)
        self.tell(f"{key} ... (about {expected_s:.0f} s, {self.budget.left_s:.0f} s left)")
        start_s = self.budget.clock()
        within_s = min(limit_s, self.budget.left_s)
        outcome = self._outcome(key, job, within_s, cut_off=within_s < limit_s)
        seconds = self.budget.clock() - start_s
        self.store.put(key, outcome.model_copy(update={"seconds": seconds}))
        self.tell(f"{key}: {outcome.status} in {seconds:.0f} s {outcome.reason}")

    def _outcome(
        self, key: str, job: Callable[[float], Found], within_s: float, *, cut_off: bool
    ) -> Outcome:
        attempts = self.store.results.attempts(key)
        try:
            found = job(within_s)
        except JobRefused as error:
            return Outcome(status="skipped", attempts=attempts, reason=str(error))
        except JobTimeout as error:
            # by the end of the time, which is not the job's fault, or by its own limit
            counted = attempts - 1 if cut_off else attempts
            return Outcome(status="failed", attempts=counted, reason=str(error))
        except JobFailed as error:
            self.store.log(f"{key}: {error}\n{error.details}")
            return Outcome(status="failed", attempts=attempts, reason=str(error))
        if isinstance(found, SuiteFound) and not found.complete:
            reason = "time was up; the next call goes on"
            return Outcome(status="part", attempts=attempts - 1, reason=reason, found=found)
        return Outcome(status="done", attempts=attempts, found=found)

    def skip(self, key: str, reason: str) -> None:
        self.store.put(key, Outcome(status="skipped", reason=reason))
        self.tell(f"{key}: skipped: {reason}")

    def fail(self, key: str, reason: str) -> None:
        attempts = self.store.results.attempts(key) + 1
        self.store.put(key, Outcome(status="failed", attempts=attempts, reason=reason))
        self.store.log(f"{key}: {reason}")
        self.tell(f"{key}: failed: {reason}")
