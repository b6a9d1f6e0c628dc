"""Carry out ops on the arenas; every backend that has memory uses this."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import assert_never

import torch

from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.operand import Kernel
from twinstream.executor.memory.arenas import POISON_BYTE, Arenas
from twinstream.executor.memory.poison import dying_content
from twinstream.executor.program.compiled import Work
from twinstream.executor.program.host_work import HostWork
from twinstream.executor.program.module_programs import ModulePrograms
from twinstream.executor.program.options import RunOptions
from twinstream.executor.providers.registry import provider_of
from twinstream.executor.replay.graph_classes import contents
from twinstream.executor.run.packs import noting_packs
from twinstream.models.providers.model import model_of
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import SeveralRanksError
from twinstream.schedule.ops import DISK_QUEUES, Communicate, Compute, Copy, Feed, Fetch, Op
from twinstream.schedule.tensors import DEVICE, DISK, HOST

Content = tuple[str, str] | tuple[str, str, int | None]
"""Tensor and slot, and how many parts of it."""
Communications = Callable[[Communicate, Arenas], Work]
"""The work of an op that meets other ranks, of whom a schedule by itself knows nothing."""


def bind_works(
    schedule: RankSchedule,
    arenas: Arenas,
    host_work: HostWork,
    options: RunOptions | None = None,
    communications: Communications | None = None,
) -> list[Work]:
    """The work of every op in issue order, to run in whatever thread or stream is current.

    Kernels are bound to their operands once, and ops that do the same on the same bytes share
    that: a pass only carries out calls. With `options.poison`, bytes are filled with NaN before
    they are written and once their content is dead, to expose what the proof of safety should have
    excluded.
    On CUDA not the host's bytes that the device's streams copy: they would be filled at once, and
    not in the order of the stream.

    Raises:
        SeveralRanksError: it communicates, and there is nobody to communicate with.
    """
    options = options or RunOptions()
    kernels = _kernels(schedule, options.modules)
    bound: dict[Hashable, Calls] = {}

    def bind(op: Op, content: Hashable) -> Work:
        match op:
            case Compute():
                if content not in bound:
                    attributes = schedule.calls[op.call].attributes
                    bound[content] = kernels[op.call](arenas.operands(op), attributes)
                calls = bound[content]
                return lambda pass_index: calls()
            case Copy() if DISK in (arenas.tier(op.source), arenas.tier(op.destination)):
                copy = arenas.disk_copy(op)
                return lambda pass_index: copy()
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
    if not options.poison:
        return works
    dying = dying_content(schedule)

    def filled(op: Op, dead: Iterable[Content]) -> list[torch.Tensor]:
        by_host = isinstance(op, Feed | Fetch) or op.stream.queue in DISK_QUEUES
        in_order = options.backend == "cpu" or by_host
        tiers = (DEVICE, HOST) if in_order else (DEVICE,)
        return [arenas.view(*c) for c in dead if arenas.tier(c[1]) in tiers]

    return [
        _poisoned(work, before=filled(op, _written(op)), after=filled(op, dying.get(op.op_id, ())))
        for op, work in zip(schedule.ops, works, strict=True)
    ]


def _kernels(schedule: RankSchedule, programs: ModulePrograms) -> dict[str, Kernel]:
    """Return the kernel of every call."""
    model = model_of(schedule.model)
    provider = provider_of(model)
    return {
        name: provider.kernel(model, call.kernel, programs) for name, call in schedule.calls.items()
    }


def _copy(source: torch.Tensor, destination: torch.Tensor) -> Work:
    def copy(pass_index: int) -> None:
        destination.copy_(source, non_blocking=True)

    return copy


def _written(op: Op) -> list[Content]:
    """What the op overwrites on a stream of the device."""
    if isinstance(op, Compute | Communicate):
        overwritten = [o for o in op.operands if o.mode in ("write", "scratch")]
        return [(o.tensor, o.slot, o.num_parts) for o in overwritten]
    return [(op.tensor, op.destination, op.num_parts)] if isinstance(op, Copy) else []


def _poisoned(work: Work, *, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> Work:
    def poisoned(pass_index: int) -> None:
        for dead in before:
            dead.fill_(POISON_BYTE)
        work(pass_index)
        for dead in after:
            dead.fill_(POISON_BYTE)

    return poisoned
