"""Cells that came out slower than one with no more memory and no faster link.

Each cell is planned by itself at first, and a plan lies above its bound by some percent. Cells with
other tokens per step are not compared: where these are open, they depend on the caps.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod

from twinstream.hardware_profiles.link import LINK_FIELDS
from twinstream.sweep.asked.machines import Cell
from twinstream.sweep.asked.values import MACHINE_NUMBER
from twinstream.sweep.cell import OK

_WORTH_TELLING = 1.001
_CUT = ("rounds_per_step", "chunks_per_round", "planned_chunk_tokens")
_LINKS = tuple(f"{MACHINE_NUMBER}{field}" for field in LINK_FIELDS)
_RESOURCES = ("device_mem", "host_mem", *_LINKS)


@dataclass(frozen=True)
class Slower:
    """A cell, the fastest of those with no more, and its extra time per token: 0.02 is 2 %.

    `planned_for` is the cell that the plan of the faster one was made for, mostly that one itself.
    """

    cell: Cell
    than: Cell
    by: float
    planned_for: Cell


@dataclass(frozen=True)
class _Planned:
    cell: Cell
    resources: tuple[float, ...]
    tokens_per_s: float
    planned_for: Cell

    def has_all_of(self, other: "_Planned") -> bool:
        return all(
            mine >= theirs for mine, theirs in zip(self.resources, other.resources, strict=True)
        )


def slower_with_more(cells: Sequence[Cell], rows: Sequence[Mapping[str, str]]) -> list[Slower]:
    """Every cell that is slower than one with less by over 0.1 %, with the fastest such one.

    Args:
        cells: of a sweep.
        rows: of the cells, in the same order.
    """
    alike: dict[object, list[_Planned]] = {}
    by_key = {cell.key: cell for cell in cells}
    for cell, row in zip(cells, rows, strict=True):
        if row["status"] == OK:
            speed, planned_for = float(row["tokens_per_s"]), by_key.get(row["plan_of"], cell)
            planned = _Planned(cell, _resources(cell), speed, planned_for)
            tokens_per_step = prod(int(row[name]) for name in _CUT)
            alike.setdefault((tokens_per_step, *_all_else(cell)), []).append(planned)
    found = (_slower(one, group) for group in map(_fastest_first, alike.values()) for one in group)
    return [one for one in found if one is not None]


def beside_the_faster(slower: Iterable[Slower]) -> list[Cell]:
    """The cells of `optimal` to plan again, each beside the plan of the faster one; each once.

    Other policies have fixed rules, and what comes of these is what their rows are to show.
    """
    mine = {one.cell.key: one for one in slower if one.cell.request.policy == "optimal"}
    return [replace(one.cell, beside=one.planned_for) for one in mine.values()]


def _fastest_first(group: Sequence[_Planned]) -> list[_Planned]:
    return sorted(group, key=lambda one: -one.tokens_per_s)


def _slower(one: _Planned, fastest_first: Sequence[_Planned]) -> Slower | None:
    for other in fastest_first:
        if other.tokens_per_s <= _WORTH_TELLING * one.tokens_per_s:
            break
        if one.has_all_of(other):
            by = other.tokens_per_s / one.tokens_per_s - 1
            return Slower(one.cell, other.cell, by, other.planned_for)
    return None


def _resources(cell: Cell) -> tuple[float, ...]:
    """Of which more should never be slower; a link that no axis varies is the same for all."""
    caps = cell.request.caps.device_bytes, cell.request.caps.host_bytes
    memory = tuple(inf if cap is None else float(cap) for cap in caps)
    return (*memory, *(float(cell.values.get(name, 0.0)) for name in _LINKS))


def _all_else(cell: Cell) -> tuple[object, ...]:
    """What the cells that are compared have in common."""
    return tuple((name, value) for name, value in cell.values.items() if name not in _RESOURCES)
