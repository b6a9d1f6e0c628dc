"""What of a stage the planner may place, what of that may leave the device, and what stays put."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinstream.hardware_profiles.cost import copy_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import Communicate, Compute
from twinstream.schedule.tensors import Tensor

_LEAST_BYTES = 2**20  # smaller tensors are not worth a copy


@dataclass(frozen=True)
class StageTimes:
    """When each op of a stage begins, with everything on the device, and how long a pass takes."""

    start_ns: Sequence[int]
    pass_ns: float


@dataclass(frozen=True)
class Places:
    """Tensors of a stage by what may become of them.

    `placed` have their bytes from the planner, `movable` are those of them that may leave the
    device. All others keep slots of their own: what is received or gathered ahead of its use, and
    what is exchanged and used again at once, is lowered with as many slots as it takes to overlap;
    and a block of a ring is in two slots at a time.
    """

    placed: frozenset[str]
    movable: frozenset[str]


@dataclass
class _Life:
    """What is seen of a tensor: its longest time between two uses of one content, and by whom."""

    first_ns: float | None = None
    first_reads: bool = False
    last_ns: float = 0.0
    longest_ns: float = 0.0
    exchanged: bool = False
    ahead: bool = False
    slot: str = ""
    in_slots: bool = False


def places_of(
    schedule: Schedule, times: StageTimes, machine: Machine, *, tight: bool = False
) -> Places:
    """Movable is what rests at least as long as it takes to copy it out and back in.

    Beside that the planner places what only computation uses; of a `tight` stage all, so that
    nothing has bytes to itself, and exchanges may have to wait for them.
    """
    carried = {item.tensor for item in schedule.carried}
    lives = _lives(schedule, times, carried)
    placed, movable = set(), set()
    for tensor in schedule.tensors:
        life = lives.get(tensor.tensor_id)
        if life is None or tensor.size_bytes < _LEAST_BYTES:
            continue
        if life.in_slots or (life.ahead and not tight):
            continue
        rests = life.longest_ns >= _there_and_back_ns(tensor, machine)
        if rests:
            movable.add(tensor.tensor_id)
        if rests or tight or not life.exchanged:
            placed.add(tensor.tensor_id)
    return Places(frozenset(placed), frozenset(movable))


def _lives(schedule: Schedule, times: StageTimes, carried: set[str]) -> Mapping[str, _Life]:
    roles = {tensor.tensor_id: tensor.role for tensor in schedule.tensors}
    found: dict[str, _Life] = {}
    for op, start_ns in zip(schedule.ops, times.start_ns, strict=True):
        if not isinstance(op, Compute | Communicate):
            continue
        for operand in op.operands:
            life = found.setdefault(operand.tensor, _Life(slot=operand.slot))
            life.in_slots |= operand.slot != life.slot
            reads = operand.mode in ("read", "update")
            if life.first_ns is None:
                life.first_ns, life.first_reads = start_ns, reads
            elif reads:
                life.longest_ns = max(life.longest_ns, start_ns - life.last_ns)
            life.last_ns = start_ns
            if isinstance(op, Communicate):
                life.exchanged = True
                gathered = roles[operand.tensor] == "parameter" and operand.tensor not in carried
                life.ahead |= operand.mode == "write" and (op.collective == "recv" or gathered)
    for tensor in carried:
        kept = found.get(tensor)
        if kept is not None and kept.first_ns is not None:
            over_ns = times.pass_ns - kept.last_ns + kept.first_ns
            kept.longest_ns = max(kept.longest_ns, over_ns)
    return found


def _there_and_back_ns(tensor: Tensor, machine: Machine) -> float:
    return copy_alone_ns(tensor.size_bytes, "d2h", machine) + copy_alone_ns(
        tensor.size_bytes, "h2d", machine
    )
