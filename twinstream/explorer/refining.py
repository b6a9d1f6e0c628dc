"""Plans of normal effort, made in a process beside while the page shows the quick ones."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Lock

from twinstream.explorer.answers import Answer, Answers, Asked
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.worker_processes import (
    WorkerContext,
    WorkerProcess,
    end_with_parent,
    interrupts_held,
)


class RefusedPlan(TwinstreamError):
    """The process beside ended before it had a plan."""


class Refining:
    """One process at a time, for one page's machines one after the other; then it ends.

    So quick plans never wait for a normal one, and memory that planning took is given back.
    """

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._lock = Lock()
        self._running: tuple[WorkerProcess, Connection] | None = None
        self._asked: Sequence[Asked] = ()

    def follow(self, wanted: Sequence[Asked], *, anew: bool) -> None:
        """Keep what is done, and see that what is wanted gets done.

        Args:
            wanted: what the page would show.
            anew: whether the page asks for the first time; it then ends what runs for others.
        """
        with self._lock:
            self._collect()
            missing = [asked for asked in wanted if self._answers.kept(*asked) is None]
            busy = self._running is not None and (not anew or set(missing) <= set(self._asked))
            if (missing and not busy) or (anew and not missing):
                self._end()
            if missing and not busy:
                self._start(missing)

    def end(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._end()

    def _start(self, missing: Sequence[Asked]) -> None:
        context = WorkerContext()
        ours, theirs = context.Pipe(duplex=False)
        files = self._answers.model_files, self._answers.machine_files
        process = context.Process(target=_plan_all, args=(theirs, *files, missing), daemon=True)
        with interrupts_held():
            process.start()
        theirs.close()
        self._running, self._asked = (process, ours), missing

    def _collect(self) -> None:
        if self._running is None:
            return
        process, ours = self._running
        try:
            while ours.poll():
                asked, answer = ours.recv()
                self._answers.keep(asked, answer)
        except EOFError:
            process.join()
            self._end()
            for asked in self._asked:
                if self._answers.kept(*asked) is None:
                    self._answers.keep(asked, _died(process))

    def _end(self) -> None:
        if self._running is None:
            return
        (process, ours), self._running = self._running, None
        process.terminate()
        process.join()
        ours.close()


def _died(process: WorkerProcess) -> RefusedPlan:
    return RefusedPlan(
        f"the normal plan could not be made: its process ended with code {process.exitcode}, "
        "probably because memory ran out; run the command below on a machine with more"
    )


def can_be_refined(answer: Answer | TwinstreamError) -> bool:
    """A quick plan can, and so can a refusal for want of memory; a wrong question stays wrong."""
    return isinstance(answer, Answer | InfeasiblePlan)


def _plan_all(
    theirs: Connection,
    model_files: Mapping[str, str],
    machine_files: Mapping[str, str],
    wanted: Sequence[Asked],
) -> None:
    end_with_parent()
    answers = Answers(model_files, machine_files)
    with suppress(BrokenPipeError):  # nobody waits any more
        for state, machine in wanted:
            theirs.send(((state, machine), answers.answer(state, machine)))
