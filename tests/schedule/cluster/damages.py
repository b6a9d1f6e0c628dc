"""Ways to damage the schedule of a cluster. Some damage happens to be harmless; the oracle tells.

Each takes a schedule and a source of randomness and returns a changed schedule, or None when there
is nothing of the kind.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from tests.schedule.cluster.document_damages import (
    change_cell,
    change_sides,
    double_exchange,
    drop_exchange,
    merge_exchanges,
    move_coordinate,
    replaced,
    split_class,
    split_exchange,
    swap_cells,
    swap_exchanges,
    take_anothers_schedule,
    with_fields,
)
from twinstream.schedule.derived.waits import derive_waits
from twinstream.schedule.document import RankSchedule, Schedule
from twinstream.schedule.ops import Communicate, Compute, Op, Operand, Stream

Damage = Callable[[Schedule, Random], Schedule | None]
OfSchedule = Callable[[RankSchedule, Random], RankSchedule | None]


def _to_a_class(damage: OfSchedule) -> Damage:
    """To the schedule of one class, or of all that share it."""

    def damaged(cluster: Schedule, rng: Random) -> Schedule | None:
        one = rng.choice(cluster.classes)
        made = damage(cluster.of(one), rng)
        if made is None:
            return None
        if rng.random() < 0.3:
            return with_fields(cluster, schedules={**cluster.schedules, one.schedule: made})
        name = f"{one.name} damaged"
        classes = replaced(cluster.classes, one, one.model_copy(update={"schedule": name}))
        return with_fields(cluster, classes=classes, schedules={**cluster.schedules, name: made})

    return damaged


def _talk(schedule: RankSchedule) -> list[int]:
    return [i for i, op in enumerate(schedule.ops) if isinstance(op, Communicate)]


def _with_ops(
    schedule: RankSchedule, ops: Iterable[Op], *, count: bool = True, wait: bool = True
) -> RankSchedule:
    """The ops, counted and with waits derived anew if so asked; never for ops that are gone."""
    made = list(ops)
    left = {op.op_id for op in made}
    counts: Counter[tuple[Any, ...]] = Counter()
    for i, op in enumerate(made):
        if isinstance(op, Communicate) and count:
            name = op.collective if op.collective in ("send", "recv") else op.stream.queue
            key = (op.axes, op.shift, name)
            op = op.model_copy(update={"sequence": counts[key]})
            counts[key] += 1
        kept = {
            name: tuple(w for w in getattr(op, name) if w in left)
            for name in ("waits", "waits_previous")
        }
        made[i] = op.model_copy(update=kept)
    derived = derive_waits(tuple(made), schedule.tensors, schedule.slots) if wait else tuple(made)
    return schedule.model_copy(update={"ops": derived})


def _change(schedule: RankSchedule, index: int, **update: Any) -> RankSchedule:
    ops = list(schedule.ops)
    ops[index] = ops[index].model_copy(update=update)
    return schedule.model_copy(update={"ops": tuple(ops)})


def _one(schedule: RankSchedule, rng: Random) -> tuple[int, Communicate] | None:
    found = _talk(schedule)
    if not found:
        return None
    index = rng.choice(found)
    op = schedule.ops[index]
    assert isinstance(op, Communicate)
    return index, op


# --- what a class says


def change_sequence(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    if (found := _one(schedule, rng)) is None:
        return None
    other = rng.choice([0, 1, found[1].sequence + 1])
    return _change(schedule, found[0], sequence=other)


def swap_collectives(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    places = _talk(schedule)
    if len(places) < 2:
        return None
    start = rng.randrange(len(places) - 1)
    a, b = rng.choice([(places[start], places[start + 1]), tuple(sorted(rng.sample(places, 2)))])
    ops = list(schedule.ops)
    ops[a], ops[b] = ops[b], ops[a]
    return _with_ops(schedule, ops, count=rng.random() < 0.8)


def move_collective(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    if (found := _one(schedule, rng)) is None:
        return None
    ops = list(schedule.ops)
    op = ops.pop(found[0])
    ops.insert(rng.randint(0, len(ops)), op)
    return _with_ops(schedule, ops)


def drop_side(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    if (found := _one(schedule, rng)) is None:
        return None
    ops = [op for i, op in enumerate(schedule.ops) if i != found[0]]
    return _with_ops(schedule, ops, count=rng.random() < 0.8, wait=rng.random() < 0.5)


def double_side(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    if (found := _one(schedule, rng)) is None:
        return None
    ops = list(schedule.ops)
    ops.insert(found[0] + 1, found[1].model_copy(update={"op_id": "again"}))
    return _with_ops(schedule, ops)


def change_queue(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    """Of one op, or of all that are in the queue."""
    if (found := _one(schedule, rng)) is None:
        return None
    old, new = found[1].stream, rng.choice([*(op.stream for op in schedule.ops), Stream(queue="z")])
    whole = rng.random() < 0.5
    ops = [
        op.model_copy(update={"stream": new})
        if isinstance(op, Communicate) and (op is found[1] or (whole and op.stream == old))
        else op
        for op in schedule.ops
    ]
    return _with_ops(schedule, ops)


def to_one_queue(schedule: RankSchedule, _: Random) -> RankSchedule:
    """All that is said in one queue, so that sends and receives stand in each other's way."""
    ops = [
        op.model_copy(update={"stream": Stream(queue="comm")})
        if isinstance(op, Communicate) else op
        for op in schedule.ops
    ]  # fmt: skip
    return _with_ops(schedule, ops)


def cross_sends(cluster: Schedule, rng: Random) -> Schedule | None:
    """All that a class says is in one queue, and one class says two things the other way round."""
    schedules = {name: to_one_queue(one, rng) for name, one in cluster.schedules.items()}
    return _to_a_class(swap_collectives)(with_fields(cluster, schedules=schedules), rng)


def add_wait(schedule: RankSchedule, rng: Random, field: str = "waits") -> RankSchedule | None:
    """A communication waits for another op, most often one that communicates, if it can itself."""
    if (found := _one(schedule, rng)) is None:
        return None
    rings = [
        i for i in _talk(schedule) if schedule.ops[i - 1].op_id[4:] == schedule.ops[i].op_id[4:]
    ]
    index = rng.choice(rings) if rings and rng.random() < 0.5 else found[0]
    op = schedule.ops[index]
    before = schedule.ops[:index] if field == "waits" else schedule.ops
    others = [other for other in before if other.stream != op.stream]
    talking = [other for other in others if isinstance(other, Communicate)]
    chosen = rng.choice([talking[-1:] or others, others])
    if not chosen:
        return None
    waits = (*getattr(op, field), rng.choice(chosen).op_id)
    return _change(schedule, index, **{field: waits})


def add_wait_previous(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    return add_wait(schedule, rng, "waits_previous")


def wait_on_the_wrong_pass(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    """The same pass instead of the one before, or the other way round."""
    source, target = rng.sample(["waits", "waits_previous"], 2)
    waiting = [i for i, op in enumerate(schedule.ops) if getattr(op, source)]
    if not waiting:
        return None
    index = rng.choice(waiting)
    waits = list(getattr(schedule.ops[index], source))
    wait = waits.pop(rng.randrange(len(waits)))
    others = (*getattr(schedule.ops[index], target), wait)
    return _change(schedule, index, **{source: tuple(waits), target: others})


def drop_wait(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    field = rng.choice(["waits", "waits_previous"])
    waiting = [i for i, op in enumerate(schedule.ops) if getattr(op, field)]
    if not waiting:
        return None
    index = rng.choice(waiting)
    waits = list(getattr(schedule.ops[index], field))
    waits.pop(rng.randrange(len(waits)))
    return _change(schedule, index, **{field: tuple(waits)})


def change_bytes(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    """Another size or type of a tensor that is said, in this class only."""
    if (found := _one(schedule, rng)) is None:
        return None
    name = rng.choice(found[1].operands).tensor
    [tensor] = [t for t in schedule.tensors if t.tensor_id == name]
    changes: list[dict[str, Any]] = [{"size_bytes": tensor.size_bytes + rng.choice([-8, 1, 48])},
                                     {"dtype": "float32"}]  # fmt: skip
    made = tensor.model_copy(update=rng.choice(changes))
    tensors = replaced(schedule.tensors, tensor, made)
    return schedule.model_copy(update={"tensors": tensors})


def change_version(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    """Of all uses from one on, so that the class itself stays safe."""
    if (found := _one(schedule, rng)) is None:
        return None
    index, name = found[0], rng.choice(found[1].operands).tensor
    start = rng.choice([0, index])
    step = rng.choice([1, 1, 2])

    def change(operand: Operand) -> Operand:
        hit = operand.tensor == name and operand.version > 0
        return operand.model_copy(update={"version": operand.version + step}) if hit else operand

    return _map_operands(schedule, change, start)


def rename_tensor(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    """Two tensors of one size change places everywhere in the class."""
    if (found := _one(schedule, rng)) is None:
        return None
    operand = rng.choice(found[1].operands)
    other = ("y" if operand.tensor[0] == "x" else "x") + operand.tensor[1:]
    if other not in {t.tensor_id for t in schedule.tensors}:
        return None
    swap = {operand.tensor: other, other: operand.tensor}
    return _map_operands(
        schedule, lambda o: o.model_copy(update={"tensor": swap.get(o.tensor, o.tensor)}), 0
    )


def _map_operands(
    schedule: RankSchedule, change: Callable[[Operand], Operand], start: int
) -> RankSchedule:
    ops = [
        op.model_copy(update={"operands": tuple(map(change, op.operands))})
        if i >= start and isinstance(op, Communicate | Compute) else op
        for i, op in enumerate(schedule.ops)
    ]  # fmt: skip
    return schedule.model_copy(update={"ops": tuple(ops)})


def change_mode(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    if (found := _one(schedule, rng)) is None:
        return None
    operands = list(found[1].operands)
    place = rng.randrange(len(operands))
    mode = rng.choice(["read", "write", "update", "scratch"])
    operands[place] = operands[place].model_copy(update={"mode": mode})
    return _change(schedule, found[0], operands=tuple(operands))


def change_collective(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    if (found := _one(schedule, rng)) is None or found[1].shift:
        return None
    kinds = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
    return _change(schedule, found[0], collective=rng.choice(kinds))


def change_reduction(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    found = _one(schedule, rng)
    return None if found is None else _change(schedule, found[0], reduction="rank_order")


def change_axes(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    if (found := _one(schedule, rng)) is None:
        return None
    axes = rng.choice([("ep",), (*found[1].axes, found[1].axes[0]), ("dp",), ("tp",), ("pp", "dp"),
                       found[1].axes[::-1]])  # fmt: skip
    if found[1].shift:
        axes = axes[:1]
    return _with_ops(
        schedule, replaced(schedule.ops, found[1], found[1].model_copy(update={"axes": axes}))
    )


def change_shift(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    if (found := _one(schedule, rng)) is None or not found[1].shift:
        return None
    shift = rng.choice([-found[1].shift, 2 * found[1].shift, found[1].shift + 4])
    made = found[1].model_copy(update={"shift": shift})
    return _with_ops(schedule, replaced(schedule.ops, found[1], made))


DAMAGES: dict[str, Damage] = {
    damage.__name__: _to_a_class(damage)
    for damage in (
        change_sequence, swap_collectives, move_collective, drop_side, double_side, change_queue,
        to_one_queue, add_wait, add_wait_previous, wait_on_the_wrong_pass, drop_wait, change_bytes,
        change_version, rename_tensor, change_mode, change_collective, change_reduction,
        change_axes, change_shift,
    )
} | {
    damage.__name__: damage
    for damage in (
        take_anothers_schedule, change_cell, move_coordinate, swap_cells, split_class,
        cross_sends, swap_exchanges, drop_exchange, double_exchange, change_sides, merge_exchanges,
        split_exchange,
    )
}  # fmt: skip
