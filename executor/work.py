"""Carry out one op on the arenas; every backend that has memory uses this."""

import torch

from twinstream.executor.arenas import POISON_BYTE, Arenas
from twinstream.executor.host_work import HostWork
from twinstream.executor.kernels.registry import registered_kernel
from twinstream.executor.poison import dying_content
from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import Compute, Copy, Feed, Fetch


class OpRunner:
    """Runs ops of a schedule on its arenas, in whatever thread or stream is current.

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

    def compute(self, op: Compute) -> None:
        operands = self._arenas.operands(op)
        if self._poison:
            for operand in operands.values():
                if operand.mode in ("write", "scratch"):
                    operand.bytes.fill_(POISON_BYTE)
        with torch.no_grad():
            self._kernels[op.call](operands, self._schedule.calls[op.call].attributes)
        self._bury(op.op_id)

    def copy(self, op: Copy) -> None:
        source, destination = self._arenas.copy_views(op)
        if self._poison:
            destination.fill_(POISON_BYTE)
        destination.copy_(source, non_blocking=True)
        self._bury(op.op_id)

    def host(self, op: Feed | Fetch, pass_index: int) -> None:
        self._host_work.run(op, pass_index, self._arenas.view(op.tensor, op.slot))
        self._bury(op.op_id)

    def _bury(self, op_id: str) -> None:
        for tensor, slot in self._dying.get(op_id, ()):
            self._arenas.view(tensor, slot).fill_(POISON_BYTE)
