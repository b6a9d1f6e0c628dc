"""The part of the bound's linear program that says what happens to content between two uses.

Each gap gets columns for the fractions that are kept on the device, loaded and written to the host;
rows tie them together: what is needed again is kept, loaded or recomputed.
"""

from dataclasses import dataclass, replace
from typing import Literal

from twinstream.planner.bound.gaps import Element, Gap, elements
from twinstream.planner.bound.host_updates import HostUpdates
from twinstream.planner.bound.program import LinearProgram
from twinstream.planner.bound.round_classes import RoundClasses
from twinstream.planner.bound.segments import Segments
from twinstream.planner.choices import Choices
from twinstream.planner.infeasible import DriveUse
from twinstream.planner.lifetimes.view import ChainView
from twinstream.schedule.chain import Chain

GIB = 2.0**30
Terms = list[tuple[int, float]]
Side = Literal["leaving", "entering", "inside"]
Key = tuple[int, int, bool]
_SOON = 16  # tasks or segments


@dataclass(frozen=True)
class GapColumns:
    """Fractions of a gap's content: kept on the device, loaded, written to the host.

    `valid`: on the host from the gap's begin on, because of a gap before. Where a version has one
    gap only, it is None, and `written` is `loaded`: what is loaded is written, once. `read`: read
    from a disk into host memory in the gap; None of what is on no disk. `filed`: written to the
    disk in the gap, and `on_file`: there when it begins; None of what no task changes, and where a
    version has one gap only: what is read then is filed, once.
    """

    kept: int
    loaded: int
    written: int
    valid: int | None
    weight: float
    read: int | None = None
    filed: int | None = None
    on_file: int | None = None
    made_there: tuple[tuple[int, float], ...] = ()

    @property
    def alone(self) -> bool:
        return self.valid is None

    @property
    def at_home(self) -> Terms:
        """The fraction that a plan has at home on the host, if the rest is at home on a disk."""
        if self.valid is None:
            return [(self.written, 1.0), *_less(self.read)]
        return [(self.valid, 1.0), (self.written, 1.0), *self.made_there, *_less(self.filed)]

    @property
    def on_host(self) -> Terms:
        """The fraction on the host at some time in the gap."""
        if self.valid is None:
            return [(self.written, 1.0)]
        columns = (self.valid, self.written, self.read)
        return [*((one, 1.0) for one in columns if one is not None), *self.made_there]

    @property
    def held(self) -> Terms:
        """What the host has all through the gap: what was there before, or what is loaded."""
        return self.at_home if self.valid is None else [(self.valid, 1.0)]


class ChainGaps:
    """Columns and rows of all gaps, by key (element, gap, whether it joins two middle rounds)."""

    def __init__(  # noqa: PLR0913
        self,
        program: LinearProgram,
        view: ChainView,
        segments: Segments,
        rounds: RoundClasses,
        choices: Choices,
        updates: HostUpdates,
        *,
        tied: bool,
        disk: DriveUse = None,
    ) -> None:
        """Add the columns and rows of all gaps. With `tied`, all crossings from round to round are
        decided alike, as a plan needs it; and what is read from a disk is read for every load."""
        self.program, self.rounds, self.tied, self.updates = program, rounds, tied, updates
        self.whole_ends = tied and not segments.single
        self.elements = elements(view, segments, choices, disk=disk)
        self.recompute = _recompute_columns(program, view.chain, choices)
        self._sizes = {tensor.tensor_id: tensor.size_bytes for tensor in view.chain.tensors}
        self.columns: dict[Key, GapColumns] = {}
        self.kept_at: list[tuple[int, int, Terms]] = []
        self.kept_into: list[tuple[int, int, Terms]] = []
        self.loaded_at: list[tuple[int, int, Terms]] = []
        self.host_at: list[tuple[int, int, Terms]] = []
        self._remakes = _remaking_columns(view, segments, self.recompute)
        self._chain = view.chain
        for number, element in enumerate(self.elements):
            self._add_columns(number, element)
        for number, element in enumerate(self.elements):
            for index, gap in enumerate(element.gaps):
                self._add_rows(number, index, gap)
                self._add_occupancy(number, index, gap)
        self._one_level_per_group()

    def loads(self) -> list[tuple[int, Terms]]:
        """(task by whose start it must be there, GiB loaded) of every gap."""
        return [
            (gap.end, self._gib(n, i, gap, "entering", "loaded"))
            for n, element in enumerate(self.elements)
            for i, gap in enumerate(element.gaps)
        ]

    def evictions(self) -> list[tuple[int, Terms]]:
        """(task that makes it, GiB) of content that leaves the device in its only gap."""
        return [
            (made, self._gib(n, i, gap, "leaving", "written"))
            for n, element in enumerate(self.elements)
            for i, gap in enumerate(element.gaps)
            if (made := self._stored_from(n, i)) is not None
        ] + self.updates.sent

    def evicted_at_uses(self) -> list[tuple[int, Terms]]:
        """(task, GiB) of the same content at its uses between being made and its gap."""
        return [
            (touch.position, self._gib(n, i, gap, "leaving", "written"))
            for n, element in enumerate(self.elements)
            for i, gap in enumerate(element.gaps)
            if (made := self._stored_from(n, i)) is not None and gap.made not in (None, gap.begin)
            for touch in element.touches
            if _lies_in(touch.position, made, gap.begin)
        ]

    def kept_or_waiting(self) -> list[tuple[int, Terms]]:
        """(task, GiB) of content with gaps before the one in which it is written to the host.

        Over those gaps, and at their uses, it may be kept, and wait for its copy meanwhile.
        """
        return [
            (position, self._gib(n, i, gap, "leaving", "written"))
            for n, element in enumerate(self.elements)
            for i, gap in enumerate(element.gaps)
            if gap.made is None and (made := self._stored_from(n, i)) is not None
            for position in range(made + 1, gap.begin + 1)
        ]

    def written_gib(self) -> Terms:
        """Return the GiB written to the host in a step, as terms."""
        return [
            (columns.written, columns.weight * self._size_gib(number))
            for (number, _, _), columns in self.columns.items()
        ] + self.updates.sent_gib()

    def read_gib(self) -> Terms:
        """Return the GiB read from a disk in a step, as terms."""
        return [
            (columns.read, columns.weight * self._size_gib(number))
            for (number, _, _), columns in self.columns.items()
            if columns.read is not None
        ]

    def filed_gib(self) -> Terms:
        """Return the GiB written to a disk in a step, as terms."""
        return [
            (column, columns.weight * self._size_gib(number))
            for (number, _, _), columns in self.columns.items()
            if (column := columns.read if columns.alone else columns.filed) is not None
        ]

    def loaded_gib(self) -> Terms:
        return [
            (columns.loaded, columns.weight * self._size_gib(number))
            for (number, _, _), columns in self.columns.items()
        ]

    def _size_gib(self, number: int) -> float:
        return self.elements[number].size_bytes / GIB

    def _gib(
        self, number: int, index: int, gap: Gap, side: Side, which: Literal["loaded", "written"]
    ) -> Terms:
        size = self._size_gib(number)
        return [
            (getattr(self.columns[key], which), share * size)
            for key, share in self._side(number, index, gap, side)
        ]

    def _add_columns(self, number: int, element: Element) -> None:
        followed = {gap.after for gap in element.gaps if gap.after is not None}
        for index, gap in enumerate(element.gaps):
            there = self.updates.makes(element.leaves, gap.made)
            alone = gap.fresh and index not in followed and not there
            if self.tied and self.rounds.crosses(gap):
                self._tie(number, index, gap, alone)
                continue
            weight = self.rounds.weight_of_gap(gap)
            self.columns[number, index, False] = self._new(element, gap, alone, weight)
            if self.rounds.crosses(gap) and self.rounds.of_position(gap.begin) == 0:
                between = float(self.rounds.num_middles - 1)
                self.columns[number, index, True] = self._new(element, gap, alone, between)

    def _tie(self, number: int, index: int, gap: Gap, alone: bool) -> None:
        """One set of columns for a crossing from the first round and all that follow it."""
        first = self._partner(number, gap)
        if first is None:
            weight = self.rounds.num_rounds - 1.0
            columns = self._new(self.elements[number], gap, alone, weight)
            self.columns[number, index, False] = columns
        else:
            like = self.columns[number, first, False]
            self.columns[number, index, False] = replace(like, weight=0.0)

    def _new(self, element: Element, gap: Gap, alone: bool, weight: float) -> GapColumns:
        # all are fractions in [0, 1]; `away` and a home on the device are fixed by a range of 0
        there = tuple(self.updates.makes(element.leaves, gap.made))
        kept = self.program.column(upper=0.0 if gap.away else 1.0)
        loaded = self.program.column(upper=0.0 if element.home == "device" else 1.0)
        if alone:
            read = self.program.column() if element.on_disk else None
            return GapColumns(kept, loaded, loaded, None, weight, read)
        written, valid = self.program.column(), self.program.column()
        read = self.program.column() if element.on_disk else None
        filed, on_file = (
            self.program.column() if element.on_disk == "written" else None for _ in range(2)
        )
        return GapColumns(kept, loaded, written, valid, weight, read, filed, on_file, there)

    def _add_rows(self, number: int, index: int, gap: Gap) -> None:
        for extra in (False, True):
            columns = self.columns.get((number, index, extra))
            if columns is None:
                continue
            remade = self._remade(number, gap, columns.weight)
            # kept + loaded + remade >= 1: what the use at the gap's end reads is there, unless the
            # host has it for itself
            own = _times(-1.0, self.updates.reads(self.elements[number].leaves, gap.end))
            terms = [(columns.kept, -1.0), (columns.loaded, -1.0), *remade, *own]
            self.program.at_most(terms, -1.0)
            if columns.made_there and gap.begin == gap.made:
                # kept <= what the host did not make: that comes by a copy
                self.program.at_most([(columns.kept, 1.0), *columns.made_there], 1.0)
            if not columns.alone:
                # loaded <= valid + written + read: only what the host has can come back
                there = [*columns.on_host, *(_less(columns.filed) if self.tied else ())]
                self.program.at_most([(columns.loaded, 1.0), *_times(-1.0, there)], 0.0)
            if columns.read is not None and self.elements[number].on_disk == "written":
                # read <= on_file + filed: what was written there; alone it was offloaded before
                made = (columns.written,) if columns.alone else (columns.on_file, columns.filed)
                row = [(columns.read, 1.0), *(term for one in made for term in _less(one))]
                self.program.at_most(row, 0.0)
        if not self.columns[number, index, False].alone:
            self._add_host_row(number, index, gap)

    def _remade(self, number: int, gap: Gap, weight: float) -> Terms:
        """What recomputes in a gap make again of its content.

        A gap that stands for fewer rounds than the recompute may have any share of it.
        """
        element = self.elements[number]
        found: dict[int, float] = {}
        for leaf in element.leaves:
            part = self._sizes[leaf] / element.size_bytes
            for position, column in self._remakes.get(leaf, ()):
                if _lies_in(position, gap.begin, gap.end):
                    # of a middle round the recompute runs in each; the gap may stand for fewer
                    times = self.rounds.weight(self.rounds.of_position(position))
                    made = part if self.tied else part * times / weight
                    found[column] = found.get(column, 0.0) - made
        return list(found.items())

    def _add_host_row(self, number: int, index: int, gap: Gap) -> None:
        """What the host has when a gap begins was there in the gap before, or written in it."""
        valid: Terms = []
        on_file: Terms = []
        filed: Terms = []
        for key, share in self._side(number, index, gap, "leaving"):
            columns = self.columns[key]
            if columns.valid is None:
                continue
            valid.append((columns.valid, share))
            if columns.filed is not None and columns.on_file is not None:
                on_file.append((columns.on_file, share))
                filed += [(columns.filed, share), (columns.written, -share)]
        if gap.after is not None:
            before = self.elements[number].gaps[gap.after]
            for key, share in self._side(number, gap.after, before, "entering"):
                columns = self.columns[key]
                there = columns.at_home if self.tied else columns.on_host
                valid += _times(-share, there)
                on_file += _times(share, [*_less(columns.on_file), *_less(columns.filed)])
                filed += [] if self.tied else _times(-share, there)
        # valid <= valid + written + read of the gap before; 0 where content is made anew
        self.program.at_most(valid, 0.0)
        if self.elements[number].on_disk == "written":
            # the same of the disk; and what is filed was on the host in the gap
            self.program.at_most(on_file, 0.0)
            self.program.at_most(filed, 0.0)

    def _stored_from(self, number: int, index: int) -> int | None:
        """The task that makes what a gap writes to the host, if it is followed from there.

        Not where that was long before or in another round, or where it may be made again before it
        is written: before the gap, and, if others follow that it may be written for, in it.
        """
        gap, made = self.elements[number].gaps[index], self._made(number, index)
        if made is None:
            return None
        if made != gap.begin and self.rounds.folded and not self._same_class(made, gap):
            return None
        alone = self.columns[number, index, False].alone
        if alone and made == gap.begin:
            return made
        leaf, before = self.elements[number].leaves[0], gap.begin if alone else gap.end
        again = (position for position, _ in self._remakes.get(leaf, ()))
        return None if any(_lies_in(position, made, before) for position in again) else made

    def _made(self, number: int, index: int) -> int | None:
        """Where a gap's content was made; of a later gap, or one before others, if not long before.

        A plan's program looks at sole gaps only: with the others plans were no faster.
        """
        gaps = self.elements[number].gaps
        gap = first = gaps[index]
        if self.tied and not self.columns[number, index, False].alone:
            return None
        for _ in gaps:
            if first.after is None:
                break
            first = gaps[first.after]
        if first is gap or first.made is None:
            return first.made
        return first.made if 0 <= gap.begin - first.made <= _SOON else None

    def _side(self, number: int, index: int, gap: Gap, side: Side) -> list[tuple[Key, float]]:
        """Instances of a gap as the round that it leaves or enters sees them, with their shares.

        The middle class is an average: into it lead the crossing from the first round and those
        between middle rounds; out of it those and the one into the last.
        """
        mine = (number, index, False)
        if side == "inside" or self.tied or not self.rounds.crosses(gap):
            return [(mine, 1.0)]
        if self.rounds.of_position(gap.begin if side == "leaving" else gap.end) != 1:
            return [(mine, 1.0)]
        first = index if side == "entering" else self._partner(number, gap)
        middles = float(self.rounds.num_middles)
        # average over the R - 2 middle rounds: (1 x own kind + (R - 3) x between) / (R - 2)
        shares = [(mine, 1.0 / middles)]
        if first is not None:
            shares.append(((number, first, True), (middles - 1.0) / middles))
        return shares

    def _partner(self, number: int, gap: Gap) -> int | None:
        """The crossing from the first round that corresponds to one into the last."""
        shift = self.rounds.starts[1] - self.rounds.starts[0]
        for index, other in enumerate(self.elements[number].gaps):
            if other.begin == gap.begin - shift and self.rounds.crosses(other):
                return index
        return None

    def _same_class(self, made: int, gap: Gap) -> bool:
        """Whether as many rounds see content made as see its gap begin."""
        if made > gap.begin:  # in the pass before
            return self.rounds.of_position(gap.begin) == 0 and not self.rounds.crosses(gap)
        return self.rounds.of_position(made) == self.rounds.of_position(gap.begin)

    def _add_occupancy(self, number: int, index: int, gap: Gap) -> None:
        """Bytes that a gap keeps or loads, at the tasks strictly inside it, and the host's.

        The host has what was valid when the gap began, until it is loaded; and what its only gap
        loads, from when it is stored.
        """
        size = self._size_gib(number)
        for low, high, shares in self._shares(number, index, gap):
            kept = [(self.columns[key].kept, share * size) for key, share in shares]
            self.kept_at.append((low, high, kept))
            loaded = [(self.columns[key].loaded, share * size) for key, share in shares]
            loaded += [  # what is read from a disk was in neither memory before
                (column, -share * size)
                for key, share in shares
                if (column := self.columns[key].read) is not None
            ]
            self.loaded_at.append((low, high, loaded))
        for low, high, shares in self._shares(number, index, gap, into=True):
            kept = [(self.columns[key].kept, share * size) for key, share in shares]
            self.kept_into.append((low, high, kept))
        if self.tied:
            return
        since = gap
        if self.columns[number, index, False].alone:
            made = self._stored_from(number, index)
            if made is None:
                return
            since = replace(gap, begin=made)
        for low, high, shares in self._shares(number, index, since):
            held = [
                term
                for key, share in shares
                for term in _times(share * size, self.columns[key].held)
            ]
            self.host_at.append((low, high, held))

    def home_gib(self) -> Terms:
        """A column per element for its home, which a plan has all the time, and its GiB."""
        homes: Terms = []
        for number, element in enumerate(self.elements):
            home = self.program.column()
            homes.append((home, self._size_gib(number)))
            for index in range(len(element.gaps)):
                # valid + written <= home: a plan's home has room for all that is ever there
                at_home = self.columns[number, index, False].at_home
                self.program.at_most([*at_home, (home, -1.0)], 0.0)
        return homes

    def _shares(
        self, number: int, index: int, gap: Gap, *, into: bool = False
    ) -> list[tuple[int, int, list[tuple[Key, float]]]]:
        return [
            (low, high, self._side(number, index, gap, side))
            for low, high, side in self._segments(gap, into=into)
            if low < high
        ]

    def _segments(self, gap: Gap, *, into: bool) -> list[tuple[int, int, Side]]:
        """Where a gap's content counts: strictly inside, or in a plan all through long segments.

        With `into`: at which segments' begins, that of the use which ends the gap among them.
        """
        inside, end = (gap.begin, gap.end + 1) if self.whole_ends else (gap.begin + 1, gap.end)
        if into:
            inside, end = gap.begin + 1, gap.end + 1
        if gap.end <= gap.begin:
            return [(inside, self.rounds.num_segments, "inside"), (0, end, "inside")]
        if not self.rounds.crosses(gap):
            return [(inside, end, "inside")]
        boundary = max(inside, self.rounds.starts[self.rounds.of_position(gap.end)])
        return [(inside, boundary, "leaving"), (boundary, end, "entering")]

    def _one_level_per_group(self) -> None:
        groups: dict[str, Terms] = {}
        for recompute in self._chain.recomputes:
            column = self.recompute[recompute.task.task_id]
            groups.setdefault(recompute.group, []).append((column, 1.0))
        # a block is recomputed from one level at most: the shares of its levels add up to 1
        for terms in dict.fromkeys(tuple(terms) for terms in groups.values()):
            self.program.at_most(terms, 1.0)


def _less(column: int | None) -> Terms:
    """Take off a column, if there is one."""
    return [] if column is None else [(column, -1.0)]


def _times(factor: float, terms: Terms) -> Terms:
    return [(column, factor * value) for column, value in terms]


def _recompute_columns(program: LinearProgram, chain: Chain, choices: Choices) -> dict[str, int]:
    """A column per recompute; where the level is fixed, all or nothing."""
    fixed = choices.recompute
    found: dict[str, int] = {}
    for recompute in chain.recomputes:
        chosen = fixed is not None and recompute.task.label.level == fixed
        found[recompute.task.task_id] = program.column(
            upper=1.0 if fixed is None or chosen else 0.0, lower=1.0 if chosen else 0.0
        )
    return found


def _remaking_columns(
    view: ChainView, segments: Segments, recompute_columns: dict[str, int]
) -> dict[str, list[tuple[int, int]]]:
    """By leaf: (segment before or in which it is made again, recompute column)."""
    found: dict[str, list[tuple[int, int]]] = {}
    for recompute in view.chain.recomputes:
        segment = segments.of_task[view.position[recompute.before]]
        place = segment, recompute_columns[recompute.task.task_id]
        for operand in recompute.task.operands:
            if operand.mode == "write":
                for leaf in view.units.leaves(operand.tensor, operand.num_parts):
                    found.setdefault(leaf, []).append(place)
    return found


def _lies_in(position: int, begin: int, end: int) -> bool:
    """Whether a task comes after `begin`, and at `end` at the latest, cyclically."""
    if begin < end:
        return begin < position <= end
    return position > begin or position <= end
