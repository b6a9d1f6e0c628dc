"""Damage to who is in which class, and to the order, for `damages`."""

from collections.abc import Iterable
from random import Random
from typing import Any

from twinstream.schedule.document import Exchange, RankClass, Schedule
from twinstream.schedule.ops import Communicate


def with_fields(cluster: Schedule, **update: Any) -> Schedule:
    return cluster.model_copy(update=update)


def replaced(items: Iterable[Any], old: Any, *new: Any) -> tuple[Any, ...]:
    """The items, with new ones instead of one of them."""
    return tuple(made for item in items for made in (new if item is old else (item,)))


# --- who is in which class


def take_anothers_schedule(cluster: Schedule, rng: Random) -> Schedule | None:
    one = rng.choice(cluster.classes)
    made = one.model_copy(update={"schedule": rng.choice(sorted(cluster.schedules))})
    return with_fields(cluster, classes=replaced(cluster.classes, one, made))


def change_cell(cluster: Schedule, rng: Random) -> Schedule | None:
    """A class has coordinates more or less on one axis, so that a rank is there twice or not."""
    one, axis = rng.choice(cluster.classes), rng.choice(cluster.mesh.axes)
    cell = set(one.cell(axis.name, axis.size)) ^ {rng.randrange(axis.size)}
    if not cell:
        return with_fields(cluster, classes=replaced(cluster.classes, one)) if len(
            cluster.classes) > 1 else None  # fmt: skip
    return _with_cell(cluster, one, axis.name, cell)


def _with_cell(cluster: Schedule, one: RankClass, axis: str, cell: Iterable[int]) -> Schedule:
    cells = {**one.cells, axis: tuple(sorted(cell))}
    made = one.model_copy(update={"cells": cells})
    return with_fields(cluster, classes=replaced(cluster.classes, one, made))


def move_coordinate(cluster: Schedule, rng: Random) -> Schedule | None:
    """From the cell of one class to that of another which is equal on all other axes."""
    cells = {
        c.name: {a.name: c.cell(a.name, a.size) for a in cluster.mesh.axes} for c in cluster.classes
    }
    pairs = [
        (one, other, axis)
        for one in cluster.classes for other in cluster.classes for axis in cluster.mesh.names
        if one is not other and len(cells[one.name][axis]) > 1
        and all(cells[one.name][a] == cells[other.name][a] for a in cluster.mesh.names if a != axis)
    ]  # fmt: skip
    if not pairs:
        return None
    one, other, axis = rng.choice(pairs)
    moved = rng.choice(cells[one.name][axis])
    less = _with_cell(cluster, one, axis, set(cells[one.name][axis]) - {moved})
    return _with_cell(less, other, axis, {*cells[other.name][axis], moved})


def swap_cells(cluster: Schedule, rng: Random) -> Schedule | None:
    if len(cluster.classes) < 2:
        return None
    one, other = rng.sample(cluster.classes, 2)
    classes = list(cluster.classes)
    classes[classes.index(one)] = one.model_copy(update={"cells": other.cells})
    classes[classes.index(other)] = other.model_copy(update={"cells": one.cells})
    return with_fields(cluster, classes=tuple(classes))


def split_class(cluster: Schedule, rng: Random) -> Schedule | None:
    """In two along an axis, where that is a group's own both are in its exchange, or so it says."""
    choices = [
        (one, axis) for one in cluster.classes for axis in cluster.mesh.axes
        if len(one.cell(axis.name, axis.size)) > 1
    ]  # fmt: skip
    if not choices:
        return None
    one, axis = rng.choice(choices)
    cell = one.cell(axis.name, axis.size)
    parts = [
        one.model_copy(update={"name": f"{one.name}{i}", "cells": {**one.cells, axis.name: part}})
        for i, part in enumerate((cell[:1], cell[1:]))
    ]
    axes = {op.op_id: op.axes for op in cluster.of(one).ops if isinstance(op, Communicate)}
    order: list[Exchange] = []
    for exchange in cluster.order:
        own = [op_id for name, op_id in exchange.sides if name == one.name]
        others = tuple(side for side in exchange.sides if side[0] != one.name)
        along = any(axis.name in axes.get(op_id, ()) for op_id in own)
        groups = [parts] if along else [[part] for part in parts]
        order += [
            Exchange(sides=(*others, *((p.name, op_id) for op_id in own for p in group)))
            for group in (groups if own else [[]])
        ]
    return with_fields(cluster, classes=replaced(cluster.classes, one, *parts), order=tuple(order))


# --- the order


def swap_exchanges(cluster: Schedule, rng: Random) -> Schedule | None:
    order = list(cluster.order)
    if len(order) < 2:
        return None
    start = rng.randrange(len(order) - 1)
    a, b = rng.choice(
        [(start, start + 1), (start, start + 1), tuple(rng.sample(range(len(order)), 2))]
    )
    order[a], order[b] = order[b], order[a]
    return with_fields(cluster, order=tuple(order))


def drop_exchange(cluster: Schedule, rng: Random) -> Schedule | None:
    at = rng.randrange(len(cluster.order) or 1)
    return with_fields(cluster, order=(*cluster.order[:at], *cluster.order[at + 1 :]))


def double_exchange(cluster: Schedule, rng: Random) -> Schedule | None:
    order = list(cluster.order)
    if not order:
        return None
    order.insert(rng.randint(0, len(order)), rng.choice(order))
    return with_fields(cluster, order=tuple(order))


def change_sides(cluster: Schedule, rng: Random) -> Schedule | None:
    """A side is dropped, doubled, another's or nobody's, or all are told in another order."""
    order = list(cluster.order)
    if not order:
        return None
    at = rng.randrange(len(order))
    sides = list(order[at].sides)
    place = rng.randrange(len(sides))
    match rng.randrange(5):
        case 0 if len(sides) > 1:
            sides.pop(place)
        case 1:
            sides.append(sides[place])
        case 2:
            sides[place] = (rng.choice(cluster.classes).name, sides[place][1])
        case 3:
            sides[place] = (sides[place][0], rng.choice(["nothing", "step"]))
        case _:
            rng.shuffle(sides)
    order[at] = Exchange(sides=tuple(sides))
    return with_fields(cluster, order=tuple(order))


def merge_exchanges(cluster: Schedule, rng: Random) -> Schedule | None:
    order = list(cluster.order)
    if len(order) < 2:
        return None
    at = rng.randrange(len(order) - 1)
    order[at : at + 2] = [Exchange(sides=order[at].sides + order[at + 1].sides)]
    return with_fields(cluster, order=tuple(order))


def split_exchange(cluster: Schedule, rng: Random) -> Schedule | None:
    many = [i for i, exchange in enumerate(cluster.order) if len(exchange.sides) > 1]
    if not many:
        return None
    at, order = rng.choice(many), list(cluster.order)
    sides = order[at].sides
    order[at : at + 1] = [Exchange(sides=sides[:1]), Exchange(sides=sides[1:])]
    return with_fields(cluster, order=tuple(order))
