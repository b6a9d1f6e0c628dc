"""Ways to damage a schedule that keep it a well-formed document.

Each takes a schedule and a source of randomness and returns a changed schedule, or None when
the schedule has nothing of the kind. Some damage happens to be harmless; the oracle tells.
"""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, TypeVar

from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Compute, Copy, Feed, Fetch, Op, Operand
from twinstream.schedule.tensors import Carried, Tier

Damage = Callable[[RankSchedule, Random], RankSchedule | None]
Item = TypeVar("Item")


def _pick(rng: Random, items: list[Item]) -> Item | None:
    return rng.choice(items) if items else None


def _with_ops(schedule: RankSchedule, ops: list[Op]) -> RankSchedule:
    """The ops, without the waits for ops that are gone."""
    left = {op.op_id for op in ops}
    kept = [
        op.model_copy(
            update={
                "waits": tuple(w for w in op.waits if w in left),
                "waits_previous": tuple(w for w in op.waits_previous if w in left),
            }
        )
        for op in ops
    ]
    return schedule.model_copy(update={"ops": tuple(kept)})


def _change(schedule: RankSchedule, index: int, **update: Any) -> RankSchedule:
    ops = list(schedule.ops)
    ops[index] = ops[index].model_copy(update=update)
    return schedule.model_copy(update={"ops": tuple(ops)})


def _indices(schedule: RankSchedule, *kinds: type[Op]) -> list[int]:
    return [i for i, op in enumerate(schedule.ops) if isinstance(op, kinds)]


def _drop_one(schedule: RankSchedule, rng: Random, indices: list[int]) -> RankSchedule | None:
    index = _pick(rng, indices)
    if index is None:
        return None
    return _with_ops(schedule, [op for i, op in enumerate(schedule.ops) if i != index])


def _double_one(schedule: RankSchedule, rng: Random, indices: list[int]) -> RankSchedule | None:
    index = _pick(rng, indices)
    if index is None:
        return None
    ops = list(schedule.ops)
    again = ops[index].model_copy(update={"op_id": f"{ops[index].op_id}-doubled"})
    ops.insert(rng.choice([index + 1, rng.randint(index + 1, len(ops))]), again)
    return schedule.model_copy(update={"ops": tuple(ops)})


def _swap_payload(
    schedule: RankSchedule, rng: Random, indices: list[int], fields: list[str]
) -> RankSchedule | None:
    """Two ops keep ids, streams and waits and exchange what they do."""
    if len(indices) < 2:
        return None
    ops = list(schedule.ops)
    first, second = rng.sample(indices, 2)
    ops[first], ops[second] = (
        ops[a].model_copy(update={name: getattr(ops[b], name) for name in fields})
        for a, b in ((first, second), (second, first))
    )
    return schedule.model_copy(update={"ops": tuple(ops)})


def drop_wait(schedule: RankSchedule, rng: Random, field: str = "waits") -> RankSchedule | None:
    index = _pick(rng, [i for i, op in enumerate(schedule.ops) if getattr(op, field)])
    if index is None:
        return None
    waits = list(getattr(schedule.ops[index], field))
    waits.pop(rng.randrange(len(waits)))
    return _change(schedule, index, **{field: tuple(waits)})


def retarget_wait(schedule: RankSchedule, rng: Random, field: str = "waits") -> RankSchedule | None:
    """Wait for some other op, which may be issued later, run on the same stream or not exist."""
    index = _pick(rng, [i for i, op in enumerate(schedule.ops) if getattr(op, field)])
    if index is None:
        return None
    waits = list(getattr(schedule.ops[index], field))
    waits[rng.randrange(len(waits))] = rng.choice([*(op.op_id for op in schedule.ops), "nobody"])
    return _change(schedule, index, **{field: tuple(waits)})


def swap_copies(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    fields = ["tensor", "version", "source", "destination", "num_parts"]
    return _swap_payload(schedule, rng, _indices(schedule, Copy), fields)


def swap_computes(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    fields = ["task", "call", "operands", "label"]
    return _swap_payload(schedule, rng, _indices(schedule, Compute), fields)


def drop_write_back(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    """Drop a copy into a slot that is carried."""
    carried = {item.slot for item in schedule.carried}
    copies = [
        i for i, op in enumerate(schedule.ops)
        if isinstance(op, Copy) and op.destination in carried
    ]  # fmt: skip
    return _drop_one(schedule, rng, copies)


def move_op(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    """Issue an op earlier or later, most often by one place."""
    ops = list(schedule.ops)
    index = rng.randrange(len(ops))
    op = ops.pop(index)
    ops.insert(rng.choice([max(0, index - 1), index + 1, rng.randint(0, len(ops))]), op)
    return schedule.model_copy(update={"ops": tuple(ops)})


def move_stream(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    index = rng.randrange(len(schedule.ops))
    return _change(schedule, index, stream=rng.choice(schedule.ops).stream)


def _change_operand(
    schedule: RankSchedule, rng: Random, change: Callable[[Operand], dict[str, Any]]
) -> RankSchedule | None:
    places = [
        (i, k)
        for i, op in enumerate(schedule.ops)
        if isinstance(op, Compute)
        for k in range(len(op.operands))
    ]
    place = _pick(rng, places)
    if place is None:
        return None
    op = schedule.ops[place[0]]
    assert isinstance(op, Compute)
    operands = list(op.operands)
    operands[place[1]] = operands[place[1]].model_copy(update=change(operands[place[1]]))
    return _change(schedule, place[0], operands=tuple(operands))


def move_operand(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    slot = rng.choice(schedule.slots).slot_id
    return _change_operand(schedule, rng, lambda _: {"slot": slot})


def change_operand_version(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    step = rng.choice([-1, 1])
    return _change_operand(schedule, rng, lambda o: {"version": max(0, o.version + step)})


def change_operand_mode(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    mode = rng.choice(["read", "write", "update", "scratch"])
    return _change_operand(schedule, rng, lambda _: {"mode": mode})


def change_num_parts(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    num_parts = rng.choice([None, 1, 2, 3])
    return _change_operand(schedule, rng, lambda _: {"num_parts": num_parts})


def drop_operand(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    index = _pick(rng, _indices(schedule, Compute))
    op = schedule.ops[index] if index is not None else None
    if index is None or not isinstance(op, Compute) or not op.operands:
        return None
    return _change(schedule, index, operands=op.operands[: rng.randrange(len(op.operands))])


def change_call(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    index = _pick(rng, _indices(schedule, Compute))
    call = rng.choice(list(schedule.calls))
    return None if index is None else _change(schedule, index, call=call)


def change_kernel(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    name = rng.choice(list(schedule.calls))
    call = schedule.calls[name].model_copy(update={"kernel": "another/eager"})
    return schedule.model_copy(update={"calls": {**schedule.calls, name: call}})


def change_copy(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    """A wrong version, source or destination."""
    index = _pick(rng, _indices(schedule, Copy))
    if index is None:
        return None
    slot = rng.choice(schedule.slots).slot_id
    update: dict[str, Any] = rng.choice(
        [{"version": rng.randrange(3)}, {"source": slot}, {"destination": slot}]
    )
    return _change(schedule, index, **update)


def _change_slot(
    schedule: RankSchedule, rng: Random, field: str, steps: list[int]
) -> RankSchedule | None:
    used = {use.slot for op in schedule.ops if isinstance(op, Compute) for use in op.operands}
    index = _pick(rng, [i for i, s in enumerate(schedule.slots) if s.slot_id in used])
    if index is None:
        return None
    slots = list(schedule.slots)
    value = getattr(slots[index], field) + rng.choice(steps)
    slots[index] = slots[index].model_copy(update={field: max(int(field == "size_bytes"), value)})
    return schedule.model_copy(update={"slots": tuple(slots)})


def change_tensor(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    """Another size or offset, in the schedule but not in the chain."""
    tensors = list(schedule.tensors)
    index = rng.randrange(len(tensors))
    field = rng.choice(["size_bytes", "offset_bytes"])
    value = max(1, getattr(tensors[index], field) + rng.choice([-64, -1, 1, 64]))
    tensors[index] = tensors[index].model_copy(update={field: value})
    return schedule.model_copy(update={"tensors": tuple(tensors)})


def lower_cap(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    caps = {k: v for k, v in schedule.caps if v}
    if not caps:
        return None
    name = rng.choice(list(caps))
    lower = {name: max(0, caps[name] - rng.choice([1, 100, 101]))}
    return schedule.model_copy(update={"caps": schedule.caps.model_copy(update=lower)})


def move_slot(schedule: RankSchedule, rng: Random) -> RankSchedule:
    """A slot in memory that nothing has."""
    tier = Tier(kind=rng.choice(["device", "host", "disk"]), index=1)
    slot = rng.choice(schedule.slots)
    slots = (s.model_copy(update={"tier": tier}) if s is slot else s for s in schedule.slots)
    return schedule.model_copy(update={"slots": tuple(slots)})


def change_flops(schedule: RankSchedule, rng: Random) -> RankSchedule:
    return schedule.model_copy(update={"model_flops": schedule.model_flops + rng.randint(1, 9)})


def drop_carried(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    item = _pick(rng, list(schedule.carried))
    carried = tuple(c for c in schedule.carried if c != item)
    return None if item is None else schedule.model_copy(update={"carried": carried})


def add_carried(schedule: RankSchedule, rng: Random) -> RankSchedule | None:
    tensor, slot = rng.choice(schedule.tensors), rng.choice(schedule.slots)
    added = Carried(tensor=tensor.tensor_id, slot=slot.slot_id)
    return schedule.model_copy(update={"carried": (added, *schedule.carried)})


def _to_any(damage: Callable[..., RankSchedule | None], *kinds: type[Op]) -> Damage:
    """The damage to one of the ops of some kinds."""
    return lambda schedule, rng: damage(schedule, rng, _indices(schedule, *kinds))


DAMAGES: dict[str, Damage] = {
    damage.__name__: damage
    for damage in (
        drop_wait, retarget_wait, swap_copies, swap_computes, drop_write_back, move_op,
        move_stream, move_operand, change_operand_version, change_operand_mode, change_num_parts,
        drop_operand, change_call, change_kernel, change_copy, change_tensor, lower_cap,
        drop_carried, add_carried, move_slot, change_flops,
    )
} | {
    "drop_wait_previous": partial(drop_wait, field="waits_previous"),
    "retarget_wait_previous": partial(retarget_wait, field="waits_previous"),
    "drop_compute": _to_any(_drop_one, Compute),
    "double_compute": _to_any(_double_one, Compute),
    "drop_copy": _to_any(_drop_one, Copy),
    "double_copy": _to_any(_double_one, Copy),
    "drop_host_op": _to_any(_drop_one, Feed, Fetch),
    "double_host_op": _to_any(_double_one, Feed, Fetch),
    "shift_offset": partial(
        _change_slot, field="offset_bytes", steps=[-256, -256, 256, 256, 512, 64]
    ),
    "shift_origin": partial(_change_slot, field="origin_bytes", steps=[-100, -1, 1, 64]),
    "shrink_slot": partial(_change_slot, field="size_bytes", steps=[-1, -64, -256]),
}  # fmt: skip
