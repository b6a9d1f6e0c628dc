"""Tasks of many chunks taken together, so that the lower bound's program stays small."""

from dataclasses import dataclass

from twinstream.schedule.chain import Chain

_MOST_SEGMENTS = 900


@dataclass(frozen=True)
class Segments:
    """Consecutive tasks as one: `of_task` numbers them, `firsts` are their first tasks."""

    of_task: tuple[int, ...]
    firsts: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.firsts)

    @property
    def single(self) -> bool:
        """Whether every task is a segment of its own."""
        return self.count == len(self.of_task)

    def tasks(self, segment: int) -> range:
        """Positions of a segment's tasks in the chain."""
        after = self.firsts[segment + 1] if segment + 1 < self.count else len(self.of_task)
        return range(self.firsts[segment], after)

    @staticmethod
    def of(chain: Chain, most: int | None = None) -> "Segments":
        """Single tasks, or in chains of very many the chunks of a layer in a few stretches.

        Chunks of a layer are consecutive tasks of one kernel; a stretch has as many of them as
        keeps the number of segments below about `most`, 900 if None.
        """
        most = _MOST_SEGMENTS if most is None else most
        chunks = chain.workload.chunks_per_round
        together = 1
        while together < chunks and len(chain.tasks) / together > most:
            together *= 2
        of_task: list[int] = []
        firsts: list[int] = []
        kernel, run = "", 0
        for i, task in enumerate(chain.tasks):
            name = chain.calls[task.call].kernel
            run = run + 1 if name == kernel and i not in chain.round_starts else 0
            kernel = name
            if run % chunks % together == 0:
                firsts.append(i)
            of_task.append(len(firsts) - 1)
        return Segments(tuple(of_task), tuple(firsts))
