"""Residencies of a small chain: what runs, and over which gaps content stays on the device."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

from twinstream.schedule.chain import Chain, Task


class Use(NamedTuple):
    """A step's use of a tensor: whether it needs the content, and the version it leaves."""

    step: int
    reads: bool
    makes: bool
    version: int


@dataclass(frozen=True)
class Stay:
    """Uses without leaving the device; `load` is the gap (number of its first use) before them."""

    tensor: str
    uses: tuple[Use, ...]
    load: int | None
    whole_cycle: bool


@dataclass(frozen=True)
class Home:
    """A copy in host memory: the stay that stores it (None: always there) and who loads it."""

    tensor: str
    stored_by: int | None
    loaded_by: tuple[int, ...]


@dataclass(frozen=True)
class Residency:
    """What runs, when tensors are on the device, and which copies that takes."""

    steps: tuple[Task, ...]
    stays: tuple[Stay, ...]
    homes: tuple[Home, ...]


Homes = Mapping[str, str]
OPEN_HOMES: Homes = MappingProxyType({})


def residencies(chain: Chain, homes: Homes = OPEN_HOMES) -> Iterator[Residency]:
    """All combinations of recomputes, and of keeping or reloading in every gap.

    `homes`, by tensor: what is at home on the host is reloaded in every gap, what is at home on the
    device in none.
    """
    persistent = set(chain.persistent)
    movable = [t.tensor_id for t in chain.tensors if t.role != "scratch"]
    for recomputes in _recompute_choices(chain):
        steps = _steps(chain, recomputes)
        uses = {name: uses_of(steps, name) for name in movable}
        options = [
            _reload_choices(uses[name], len(steps), name in persistent, homes.get(name))
            for name in movable
        ]
        for reloads in product(*options):
            stays: list[Stay] = []
            copies: list[Home] = []
            for name, gaps in zip(movable, reloads, strict=True):
                _place(name, uses[name], gaps, name in persistent, stays, copies)
            yield Residency(steps, tuple(stays), tuple(copies))


def _recompute_choices(chain: Chain) -> list[tuple[Task, ...]]:
    assert len({r.group for r in chain.recomputes}) <= 1
    return [(), *((r.task,) for r in chain.recomputes)]


def _steps(chain: Chain, recomputes: Sequence[Task]) -> tuple[Task, ...]:
    before = {r.task.task_id: r.before for r in chain.recomputes}
    steps: list[Task] = []
    for task in chain.tasks:
        steps += [r for r in recomputes if before[r.task_id] == task.task_id]
        steps.append(task)
    return tuple(steps)


def uses_of(steps: Sequence[Task], tensor: str) -> tuple[Use, ...]:
    found = []
    for step, task in enumerate(steps):
        for operand in task.operands:
            if operand.tensor == tensor:
                makes = operand.mode != "read"
                version = operand.version + (operand.mode == "update")
                found.append(Use(step, operand.mode != "write", makes, version))
    return tuple(found)


def _gaps(uses: Sequence[Use], *, persistent: bool) -> list[int]:
    """Numbers of the uses whose content the next use needs."""
    last = len(uses) if persistent else len(uses) - 1
    return [i for i in range(last) if uses[(i + 1) % len(uses)].reads]


def _reload_choices(
    uses: Sequence[Use], num_steps: int, persistent: bool, home: str | None
) -> list[tuple[int, ...]]:
    """Sets of gaps to reload in; never between neighbours, where both need it on the device."""
    gaps = [
        i
        for i in _gaps(uses, persistent=persistent)
        if len(uses) == 1 or (uses[(i + 1) % len(uses)].step - uses[i].step) % num_steps != 1
    ]
    picks = product(
        {"host": (True,), "device": (False,)}.get(home or "", (False, True)), repeat=len(gaps)
    )
    return [tuple(g for g, on in zip(gaps, pick, strict=True) if on) for pick in picks]


def _place(
    tensor: str,
    uses: Sequence[Use],
    reloads: Sequence[int],
    persistent: bool,
    stays: list[Stay],
    homes: list[Home],
) -> None:
    """Cut the uses into stays, and say which home each load reads and which stay stores it."""
    kept = [i for i in _gaps(uses, persistent=persistent) if i not in reloads]
    count = len(uses)
    if len(kept) == count:
        stays.append(Stay(tensor, tuple(uses), None, True))
        return
    stay_of: dict[int, int] = {}
    for first in (i for i in range(count) if (i - 1) % count not in kept):
        run = [first]
        while run[-1] in kept:
            run.append((run[-1] + 1) % count)
        load = (first - 1) % count if (first - 1) % count in reloads else None
        stay_of.update(dict.fromkeys(run, len(stays)))
        stays.append(Stay(tensor, tuple(uses[i] for i in run), load, False))
    if not reloads:
        return
    makers = [i for i in range(count) if uses[i].makes]
    if not makers:
        homes.append(Home(tensor, None, tuple(stay_of[(g + 1) % count] for g in reloads)))
    for maker in makers:
        gaps = [maker]
        while not uses[(gaps[-1] + 1) % count].makes:
            gaps.append((gaps[-1] + 1) % count)
        loads = tuple(stay_of[(g + 1) % count] for g in gaps if g in reloads)
        if loads:
            homes.append(Home(tensor, stay_of[maker], loads))
