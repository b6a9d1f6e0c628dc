"""Where classes of ranks lie in a mesh, by arithmetic on cells: no rank is ever listed."""

from collections.abc import Iterator
from itertools import combinations
from math import prod

from twinstream.schedule.cluster.violations import ClassesNotPartition
from twinstream.schedule.document import Mesh, RankClass

Masks = tuple[int, ...]  # per axis of a mesh, bit i for coordinate i


class ClassCells:
    """The cells of all classes as bit masks; classes are called by their number.

    A line of some axes is all classes that have equal cells on the other axes. Of a partition,
    it is the classes that a group along those axes meets, provided no other class shares a
    coordinate on all the other axes.
    """

    def __init__(self, mesh: Mesh, classes: tuple[RankClass, ...]) -> None:
        self.mesh = mesh
        self.names = [one.name for one in classes]
        self.masks = [_masks(mesh, one) for one in classes]
        self._number = {masks: number for number, masks in enumerate(self.masks)}
        self._lines: dict[tuple[str, ...], dict[Masks, list[int]]] = {}
        self._crossing: dict[tuple[str, ...], list[tuple[list[int], list[int]]]] = {}

    def lines(self, axes: tuple[str, ...]) -> dict[Masks, list[int]]:
        """Classes by their cells on the axes that are not named."""
        if axes not in self._lines:
            others = [i for i, axis in enumerate(self.mesh.axes) if axis.name not in axes]
            found = self._lines[axes] = {}
            for number, masks in enumerate(self.masks):
                found.setdefault(tuple([masks[i] for i in others]), []).append(number)
        return self._lines[axes]

    def crossing_lines(self, axes: tuple[str, ...]) -> list[tuple[list[int], list[int]]]:
        """Pairs of lines that share a coordinate on all other axes, of which a group meets both."""
        if axes not in self._crossing:
            self._crossing[axes] = [
                (line, beside)
                for (one, line), (other, beside) in combinations(self.lines(axes).items(), 2)
                if overlap(one, other)
            ]
        return self._crossing[axes]

    def shifted(self, number: int, axis: str, shift: int) -> int | None:
        """The class of exactly the ranks that lie `shift` further; None if there is none."""
        masks, place = list(self.masks[number]), self.mesh.names.index(axis)
        size = self.mesh.axes[place].size
        step = shift % size
        whole = (1 << size) - 1
        masks[place] = (masks[place] << step | masks[place] >> (size - step)) & whole
        return self._number.get(tuple(masks))


def _masks(mesh: Mesh, one: RankClass) -> Masks:
    cells = [one.cells.get(axis.name) for axis in mesh.axes]
    return tuple(
        (1 << axis.size) - 1 if cell is None else sum(1 << i for i in cell)
        for axis, cell in zip(mesh.axes, cells, strict=True)
    )


def overlap(first: Masks, second: Masks) -> bool:
    """Whether cells share a coordinate on every axis."""
    return all(a & b for a, b in zip(first, second, strict=True))


def partition_violations(cells: ClassCells) -> Iterator[ClassesNotPartition]:
    """Ranks in two classes, and ranks in none.

    Classes that are disjoint and have as many ranks as the mesh are all of it.
    """
    disjoint = True
    for (one, a), (other, b) in combinations(enumerate(cells.masks), 2):
        if overlap(a, b):
            disjoint = False
            names = cells.names[one], cells.names[other]
            at = _first_shared(cells.mesh, a, b)
            text = f"the rank at {at} is in class '{names[0]}' and in class '{names[1]}'"
            yield ClassesNotPartition(text, classes=names)
    num_ranks = sum(prod(mask.bit_count() for mask in masks) for masks in cells.masks)
    if disjoint and num_ranks < cells.mesh.size:
        missing = cells.mesh.size - num_ranks
        yield ClassesNotPartition(f"{missing:,} of {cells.mesh.size:,} ranks are in no class")


def _first_shared(mesh: Mesh, first: Masks, second: Masks) -> str:
    shared = [a & b for a, b in zip(first, second, strict=True)]
    places = [(mask & -mask).bit_length() - 1 for mask in shared]
    return ", ".join(f"{a.name} {i}" for a, i in zip(mesh.axes, places, strict=True))
