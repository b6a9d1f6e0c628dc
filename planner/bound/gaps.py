"""Gaps between uses of a tensor: until it is used again, content is kept, moved or recomputed.

Tensors that are used by the same tasks are one *element*; the lower bound decides by element and
gap.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil

from twinstream.planner.bound.segments import Segments
from twinstream.planner.choices import Choices, Home
from twinstream.planner.infeasible import DriveUse
from twinstream.planner.lifetimes.uses import UnitMap, read_only_leaves
from twinstream.planner.lifetimes.view import ChainView
from twinstream.schedule.chain import Chain

_FREE_ROLES = ("input", "loss", "scratch")
_CHUNKS_OF_FEW_GAPS = range(3, 9)


@dataclass(frozen=True, slots=True)
class Touch:
    """A task's use of a leaf: its position, whether it reads old content or makes new content."""

    position: int
    reads: bool
    makes: bool


@dataclass(frozen=True, slots=True)
class Gap:
    """Content that is needed again: from the task at `begin` to the task at `end`.

    `end` is less than or equal to `begin` where the gap goes over the boundary between passes.
    `made`: where the content was made, if no gap lies between (at `begin`, or before gaps that
    were passed over): a host copy is written after that. Otherwise it is None, and `after` is the
    index, in the same element, of the gap before. `away`: nothing of it may stay on the device.
    """

    begin: int
    end: int
    made: int | None
    after: int | None
    away: bool = False

    @property
    def fresh(self) -> bool:
        return self.made is not None


@dataclass(frozen=True)
class Element:
    """Leaves (tensors without parts, or parts) with the same uses: names, bytes, uses and gaps.

    `home`: where all of them are at home, if that is fixed. `on_disk`: whether they may lie on a
    disk: "read" are parameters that no task changes, which are there all the time.
    """

    leaves: tuple[str, ...]
    size_bytes: int
    touches: tuple[Touch, ...]
    gaps: tuple[Gap, ...]
    home: Home | None
    on_disk: DriveUse = None


def elements(
    view: ChainView, segments: Segments, choices: Choices, *, disk: DriveUse = None
) -> list[Element]:
    """Return all content of a chain that can be kept, moved or recomputed; positions are segments.

    Inputs, losses and scratch are left out; their bytes count only where tasks use them. Gaps
    with no task inside are left out, too: staying costs nothing there; and so are those of no more
    than `passed_over` tasks: content may stay over them at no cost, which relaxes the program.
    """
    chain, units = view.chain, view.units
    shortest = ceil(passed_over(chain) * segments.count / len(segments.of_task))
    touches = _touches(chain, units, segments)
    sizes = {t.tensor_id: t.size_bytes for t in chain.tensors}
    roles = {t.tensor_id: t.role for t in chain.tensors}
    persistent = {leaf for root in chain.persistent for leaf in units.leaves(root, None)}
    remade = _recomputes_of_leaf(view, segments)
    away = _away(view, segments, choices)
    read_only = read_only_leaves(view.chain, units) if disk else frozenset[str]()
    alike: dict[tuple[object, ...], list[str]] = {}
    for leaf, found in touches.items():
        if roles[leaf] not in _FREE_ROLES:
            home = choices.home(roles[leaf])
            key = (
                tuple(found), leaf in persistent, remade.get(leaf), home, away.get(leaf),
                leaf in read_only,
            )  # fmt: skip
            alike.setdefault(key, []).append(leaf)
    return [
        Element(
            tuple(leaves),
            sum(sizes[leaf] for leaf in leaves),
            tuple(touches[leaves[0]]),
            tuple(
                replace(gap, away=(gap.begin, gap.end) in away.get(leaves[0], ()))
                for gap in _gaps(
                    touches[leaves[0]],
                    cycle=segments.count if leaves[0] in persistent else None,
                    shortest=shortest,
                )
            ),
            choices.home(roles[leaves[0]]),
            "read" if leaves[0] in read_only else disk if disk == "written" else None,
        )
        for leaves in alike.values()
    ]


def passed_over(chain: Chain) -> int:
    """Content stays over gaps of at most so many tasks, wherever it is at home.

    With 3 to 8 chunks a round that is as many: it keeps the program small. With more, what lies
    there is too much to be overlooked.
    """
    chunks = chain.workload.chunks_per_round
    return chunks if chunks in _CHUNKS_OF_FEW_GAPS else 0


def _away(
    view: ChainView, segments: Segments, choices: Choices
) -> dict[str, frozenset[tuple[int, int]]]:
    """By leaf at home on the host: segments of consecutive uses between which its unit leaves.

    A unit is placed as one: it stays where another of its leaves is used meanwhile, by a task or
    by a recompute before it, unless a gap between two of all these uses is long enough. Homes that
    are not strict are decided on as if each leaf could leave.
    """
    chain, units, position = view.chain, view.units, view.position
    cycle = len(chain.tasks)
    used: dict[str, set[int]] = {}
    of_leaf: dict[str, list[int]] = {}
    again = ((position[recompute.before], recompute.task) for recompute in chain.recomputes)
    for at, task in (*enumerate(chain.tasks), *again):
        for unit, uses in units.touched(task).items():
            used.setdefault(unit, set()).add(at)
            if task.task_id in position:
                for leaf in {use.leaf for use in uses}:
                    of_leaf.setdefault(leaf, []).append(at)
    found: dict[str, frozenset[tuple[int, int]]] = {}
    for unit, places in used.items():
        if choices.home(units.units[unit].tensor.role) != "host":
            continue
        pairs = _gaps_of(sorted(places), cycle)
        long = [(a, b) for a, b in pairs if b - a - 1 > passed_over(chain)]
        for leaf in units.units[unit].leaves:
            found[leaf] = frozenset(
                (segments.of_task[a], segments.of_task[b % cycle])
                for a, b in _gaps_of(of_leaf.get(leaf, []), cycle)
                if not choices.strict_homes or _has_inside(a, b, long, cycle)
            )
    return found


def _gaps_of(places: Sequence[int], cycle: int) -> list[tuple[int, int]]:
    """Return pairs of consecutive places, and the last with the first of the next cycle."""
    return list(pairwise((*places, *(place + cycle for place in places[:1]))))


def _has_inside(begin: int, end: int, gaps: Iterable[tuple[int, int]], cycle: int) -> bool:
    """Whether one of the gaps lies between two places, which may be over the boundary."""
    return any(begin <= a + shift and b + shift <= end for a, b in gaps for shift in (0, cycle))


def _recomputes_of_leaf(
    view: ChainView, segments: Segments
) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return, by leaf, the recomputes that make it again, as (segment, number in its group)."""
    numbers: dict[str, int] = {}
    found: dict[str, list[tuple[int, int]]] = {}
    for recompute in view.chain.recomputes:
        number = numbers[recompute.group] = numbers.get(recompute.group, -1) + 1
        place = segments.of_task[view.position[recompute.before]], number
        for operand in recompute.task.operands:
            if operand.mode == "write":
                for leaf in view.units.leaves(operand.tensor, operand.num_parts):
                    found.setdefault(leaf, []).append(place)
    return {leaf: tuple(places) for leaf, places in found.items()}


def _touches(chain: Chain, units: UnitMap, segments: Segments) -> dict[str, list[Touch]]:
    """Return the uses of each leaf, one per segment, which reads if the first use there reads."""
    found: dict[str, list[Touch]] = {}
    segment: dict[str, tuple[int, bool, bool]] = {}  # first task, whether it reads, any makes
    last = len(chain.tasks) - 1
    for number, task in enumerate(chain.tasks):
        position = segments.of_task[number]
        for leaves in units.touched(task).values():
            for use in leaves:
                first, reads, makes = segment.get(use.leaf, (number, False, False))
                reads = reads or (first == number and use.reads is not None)
                segment[use.leaf] = first, reads, makes or use.makes is not None
        if number == last or segments.of_task[number + 1] != position:
            for leaf, (_, reads, makes) in segment.items():
                found.setdefault(leaf, []).append(Touch(position, reads, makes))
            segment.clear()
    return found


def _gaps(touches: Sequence[Touch], *, cycle: int | None, shortest: int) -> list[Gap]:
    """Gaps before every use that reads; with a cycle of so many tasks, over the boundary too.

    Gaps of at most `shortest` tasks are passed over: what is on the host after one was there
    before it, or is written in the gap after it.
    """
    gaps: list[Gap] = []
    pairs = list(pairwise(touches))
    if cycle is not None:
        pairs.append((touches[-1], touches[0]))
    before: int | None = None
    made: int | None = None
    for earlier, later in pairs:
        if earlier.makes:
            before, made = None, earlier.position
        if not later.reads:
            before, made = None, None
            continue
        inside = later.position - earlier.position - 1
        if inside < 0 or (later is touches[0] and earlier is touches[-1]):
            inside += cycle or 0
        if inside <= shortest:
            continue
        gaps.append(Gap(earlier.position, later.position, made, before))
        before, made = len(gaps) - 1, None
    if cycle is not None and gaps and not gaps[0].fresh and gaps[0].after is None:
        gaps[0] = Gap(gaps[0].begin, gaps[0].end, made, before)
    return gaps
