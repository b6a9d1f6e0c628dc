"""Carry out ops on the arenas; every backend that has memory uses this."""

from collections.abc import Callable, Hashable, Sequence
from typing import assert_never

import torch

from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.registry import registered_kernel
from twinstream.executor.memory.arenas import POISON_BYTE, Arenas
from twinstream.executor.memory.poison import dying_content
from twinstream.executor.program.compiled import Work
from twinstream.executor.program.host_work import HostWork
from twinstream.executor.replay.graph_classes import contents
from twinstream.executor.run.packs import noting_packs
from twinstream.schedule.document import Schedule
from twinstream.schedule.errors import SeveralRanksError
from twinstream.schedule.ops import Communicate, Compute, Copy, Feed, Fetch, Op

Communications = Callable[[Communicate, Arenas], Work]
"""The work of an op that meets other ranks, of whom a schedule by itself knows nothing."""


def bind_works(
    schedule: Schedule,
    arenas: Arenas,
    host_work: HostWork,
    *,
    poison: bool = False,
    communications: Communications | None = None,
) -> list[Work]:
    """The work of every op in issue order, to run in whatever thread or stream is current.

    Kernels are bound to their operands once, and ops that do the same on the same bytes share
    that: a pass only carries out calls. With `poison`, bytes are filled with NaN before they are
    written and once their content is dead, to expose what the proof of safety should have excluded.

    Raises:
        SeveralRanksError: it communicates, and there is nobody to communicate with.
    """
    kernels = {name: registered_kernel(call.kernel) for name, call in schedule.calls.items()}
    bound: dict[Hashable, Calls] = {}

    def bind(op: Op, content: Hashable) -> Work:
        match op:
            case Compute():
                if content not in bound:
                    attributes = schedule.calls[op.call].attributes
                    bound[content] = kernels[op.call](arenas.operands(op), attributes)
                calls = bound[content]
                return lambda pass_index: calls()
            case Copy():
                return _copy(*arenas.copy_views(op))
            case Feed() | Fetch():
                slot = arenas.view(op.tensor, op.slot)
                return lambda pass_index: host_work.run(op, pass_index, slot)
            case Communicate():
                if communications is None:
                    raise SeveralRanksError(op.op_id)
                return communications(op, arenas)
            case _:
                assert_never(op)

    works = [bind(*pair) for pair in zip(schedule.ops, contents(schedule), strict=True)]
    if schedule.workload.packing is not None:
        works = noting_packs(schedule, arenas, works)
    if not poison:
        return works
    dying = dying_content(schedule)
    return [
        _poisoned(
            work,
            before=_written(op, arenas),
            after=[arenas.view(*content) for content in dying.get(op.op_id, ())],
        )
        for op, work in zip(schedule.ops, works, strict=True)
    ]


def _copy(source: torch.Tensor, destination: torch.Tensor) -> Work:
    def copy(pass_index: int) -> None:
        destination.copy_(source, non_blocking=True)

    return copy


def _written(op: Op, arenas: Arenas) -> list[torch.Tensor]:
    """What the op overwrites on a stream of the device."""
    if isinstance(op, Compute | Communicate):
        return [o.bytes for o in arenas.in_order(op) if o.mode in ("write", "scratch")]
    return [arenas.copy_views(op)[1]] if isinstance(op, Copy) else []


def _poisoned(work: Work, *, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> Work:
    def poisoned(pass_index: int) -> None:
        for dead in before:
            dead.fill_(POISON_BYTE)
        work(pass_index)
        for dead in after:
            dead.fill_(POISON_BYTE)

    return poisoned
