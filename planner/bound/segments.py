"""Segments: consecutive tasks taken together, which keeps the program of a long chain small."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

from twinstream.schedule.chain import Chain

_MOST_SEGMENTS = 450


@dataclass(frozen=True)
class Segments:
    """Segments of tasks: `of_task` has the segment of each task, `firsts` their first tasks."""

    of_task: tuple[int, ...]
    firsts: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.firsts)

    @property
    def single(self) -> bool:
        """Return whether every task is a segment of its own."""
        return self.count == len(self.of_task)

    def tasks(self, segment: int) -> range:
        """Positions of a segment's tasks in the chain."""
        after = self.firsts[segment + 1] if segment + 1 < self.count else len(self.of_task)
        return range(self.firsts[segment], after)

    @staticmethod
    def of(chain: Chain, most: int | None = None) -> "Segments":
        """Single tasks, or in chains of very many the chunks of a layer in a few stretches.

        Chunks of a layer are consecutive tasks of one kernel; a stretch has as many of them as
        keeps the number of segments below about `most`, 450 if None. Where a round has the most to
        hold tasks stay single: there memory decides most about the bound.
        """
        most = _MOST_SEGMENTS if most is None else most
        chunks = chain.workload.chunks_per_round
        together = 1
        while together < chunks and len(chain.tasks) / together > most:
            together *= 2
        single = _fullest(chain) if together > 1 else frozenset()
        of_task: list[int] = []
        firsts: list[int] = []
        kernel, run = "", 0
        for i, task in enumerate(chain.tasks):
            name = chain.calls[task.call].kernel
            run = run + 1 if name == kernel and i not in chain.round_starts else 0
            kernel = name
            if i in single or i - 1 in single or run % chunks % together == 0:
                firsts.append(i)
            of_task.append(len(firsts) - 1)
        return Segments(tuple(of_task), tuple(firsts))


def _fullest(chain: Chain) -> frozenset[int]:
    """Tasks of each round around the last one with the most alive, if all that is made stayed.

    They are those with more alive than there is, in the first round, when a layer's chunks more
    are through.
    """
    found: set[int] = set()
    level = -1
    for start, end in pairwise((*chain.round_starts, len(chain.tasks))):
        alive = _alive_bytes(chain, start, end)
        first = after = max(range(end - start), key=lambda i: (alive[i], i))
        if level < 0:
            level = alive[min(after + chain.workload.chunks_per_round, end - start)]
        while first > 0 and alive[first - 1] > level:
            first -= 1
        while alive[after] > level:
            after += 1
        found.update(range(start + first, start + after))
    return frozenset(found)


def _alive_bytes(chain: Chain, start: int, end: int) -> list[int]:
    """Bytes of what passes make from its first use in a round to its last, at each task and after.

    Nothing is alive after the round's last task.
    """
    persistent = set(chain.persistent)
    sizes = {t.tensor_id: t.size_bytes for t in chain.tensors if t.tensor_id not in persistent}
    used: dict[str, list[int]] = {}
    for i, task in enumerate(chain.tasks[start:end]):
        for operand in task.operands:
            if operand.tensor in sizes:
                used.setdefault(operand.tensor, []).append(i)
    change = [0] * (end - start + 1)
    for tensor, tasks in used.items():
        change[tasks[0]] += sizes[tensor]
        change[tasks[-1] + 1] -= sizes[tensor]
    return list(accumulate(change))
