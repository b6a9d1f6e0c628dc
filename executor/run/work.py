"""Carry out one op on the arenas; every backend that has memory uses this."""

from typing import assert_never

from twinstream.executor.kernels.registry import registered_kernel
from twinstream.executor.memory.arenas import POISON_BYTE, Arenas
from twinstream.executor.memory.poison import dying_content
from twinstream.executor.program.compiled import Work
from twinstream.executor.program.host_work import HostWork
from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import Compute, Copy, Feed, Fetch, Op


class OpRunner:
    """Binds ops of a schedule to its arenas, to run in whatever thread or stream is current.

    With `poison`, bytes are filled with NaN before they are written and once their content is
    dead, to expose what the proof of safety should have excluded.
    """

    def __init__(
        self, schedule: Schedule, arenas: Arenas, host_work: HostWork, *, poison: bool = False
    ) -> None:
        self._schedule = schedule
        self._arenas = arenas
        self._host_work = host_work
        self._poison = poison
        self._dying = dying_content(schedule) if poison else {}
        self._kernels = {
            name: registered_kernel(call.kernel).function for name, call in schedule.calls.items()
        }

    def bind_all(self) -> list[Work]:
        """The work of every op in issue order, kernels and views resolved once."""
        return [self._with_poison(op, self.bind(op)) for op in self._schedule.ops]

    def bind(self, op: Op) -> Work:
        match op:
            case Compute():
                return self._compute(op)
            case Copy():
                return self._copy(op)
            case Feed() | Fetch():
                return self._host(op)
            case _:
                assert_never(op)

    def _compute(self, op: Compute) -> Work:
        kernel, operands = self._kernels[op.call], self._arenas.operands(op)
        attributes = self._schedule.calls[op.call].attributes
        return lambda pass_index: kernel(operands, attributes)

    def _copy(self, op: Copy) -> Work:
        source, destination = self._arenas.copy_views(op)

        def copy(pass_index: int) -> None:
            destination.copy_(source, non_blocking=True)

        return copy

    def _host(self, op: Feed | Fetch) -> Work:
        run, slot = self._host_work.run, self._arenas.view(op.tensor, op.slot)
        return lambda pass_index: run(op, pass_index, slot)

    def _with_poison(self, op: Op, work: Work) -> Work:
        if not self._poison:
            return work
        before = []
        if isinstance(op, Compute):
            operands = self._arenas.operands(op).values()
            before = [o.bytes for o in operands if o.mode in ("write", "scratch")]
        elif isinstance(op, Copy):
            before = [self._arenas.copy_views(op)[1]]
        after = [self._arenas.view(*content) for content in self._dying.get(op.op_id, ())]

        def poisoned(pass_index: int) -> None:
            for dead in before:
                dead.fill_(POISON_BYTE)
            work(pass_index)
            for dead in after:
                dead.fill_(POISON_BYTE)

        return poisoned
