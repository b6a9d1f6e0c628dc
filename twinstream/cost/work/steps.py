"""Three kinds of step that a layer is made of, with what each computes and moves both ways."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from twinstream.cost.work.mesh import Axis


@dataclass(frozen=True)
class PassWork:
    """What one pass computes and moves, summed over all devices.

    Fields:
        flop: multiplications and additions.
        sent, received: values (not bytes) by the axis that they cross.
    """

    flop: float = 0.0
    sent: Mapping[Axis, float] = field(default_factory=dict)
    received: Mapping[Axis, float] = field(default_factory=dict)

    def __add__(self, other: "PassWork") -> "PassWork":
        return PassWork(
            self.flop + other.flop,
            _added(self.sent, other.sent),
            _added(self.received, other.received),
        )

    def times(self, factor: float) -> "PassWork":
        """The same pass so often."""
        return PassWork(
            self.flop * factor,
            {axis: values * factor for axis, values in self.sent.items()},
            {axis: values * factor for axis, values in self.received.items()},
        )


def _added(one: Mapping[Axis, float], other: Mapping[Axis, float]) -> dict[Axis, float]:
    return {axis: one.get(axis, 0) + other.get(axis, 0) for axis in (*one, *other)}


@dataclass(frozen=True)
class Multiply:
    """Multiply two arrays point by point, `products` times in all.

    Backward makes the gradients of both factors, and adds each to what others contribute to it:
    four FLOPs for one.
    """

    products: int

    def forward(self) -> PassWork:
        """One FLOP a product."""
        return PassWork(self.products)

    def backward(self) -> PassWork:
        """A product and an addition for each of the two factors."""
        return PassWork(4 * self.products)


@dataclass(frozen=True)
class Sum:
    """Add `terms` values up to one, for each of `outputs`; each device ends with a part of them.

    Terms that lie along an axis of `degree` devices are added up on each, and partial sums travel.
    """

    outputs: int
    terms: int
    axis: Axis | None = None
    degree: int = 1

    def forward(self) -> PassWork:
        """Every device but the one that keeps an output sends its partial sum of it."""
        moved = self._by_axis(self.outputs * (self.degree - 1))
        return PassWork(self.outputs * (self.terms - 1), moved, moved)

    def backward(self) -> PassWork:
        """A gradient of an output is that of its terms: sent once, received by the others."""
        sent = self._by_axis(self.outputs if self.degree > 1 else 0)
        return PassWork(0, sent, self._by_axis(self.outputs * (self.degree - 1)))

    def _by_axis(self, values: int) -> dict[Axis, float]:
        return {} if self.axis is None else {self.axis: values}


@dataclass(frozen=True)
class Spread:
    """Give each of `values`, which lie in parts along some axes, to all devices along them.

    What crosses several axes is charged to the outermost first, to the next what it adds to it:
    the shares of the axes add up to the whole.

    Fields:
        values: distinct values.
        copies: how many devices hold each, along other axes, before and after.
        over: the axes along which they lie in parts, outermost first, with degrees.
        crossings: share of the values that change their place on an axis for good on the way, to
            the next stage or another expert; what moves in one go with another axis is charged
            once.
    """

    values: int
    copies: int
    over: tuple[tuple[Axis, int], ...]
    crossings: tuple[tuple[Axis, float], ...] = ()

    def forward(self) -> PassWork:
        """A value is sent once, to all; every device receives what it lacks."""
        sent: dict[Axis, float] = {axis: self.values * share for axis, share in self.crossings}
        rest = 1.0 - sum(share for _, share in self.crossings)
        outermost = next((axis for axis, degree in self.over if degree > 1), None)
        if outermost is not None:
            sent[outermost] = sent.get(outermost, 0.0) + self.values * rest
        return PassWork(0, sent, self._reached())

    def backward(self) -> PassWork:
        """Gradients of all copies differ: each is sent, received and added."""
        back = self._reached()
        return PassWork(sum(back.values()), back, back)

    def _reached(self) -> dict[Axis, float]:
        """Values that arrive where they were not, by axis."""
        held = self.values * self.copies
        reached: dict[Axis, float] = {axis: held * share for axis, share in self.crossings}
        holders = 1
        for axis, degree in self.over:
            reached[axis] = reached.get(axis, 0.0) + held * holders * (degree - 1)
            holders *= degree
        return reached


Step = Multiply | Sum | Spread
