"""Random small (chain, schedule) pairs that are safe and conforming, made without our planner.

A builder invents tasks and issues ops one by one, keeping track of what lies where: it copies
content in when an op needs it, overwrites what nobody needs, and at the end brings every
carried slot up to date. The waits come from the brute-force oracle: every conflict gets one,
then redundant ones are dropped at random.
"""

from random import Random

from hypothesis import strategies as st
from pydantic import JsonValue

from tests.helpers.schedule_oracle import (
    Arena,
    Wait,
    conflicts,
    content_problems,
    happens_before,
    parts_of,
)
from tests.schedule.conformity_oracle import conformity_problems
from tests.schedule.schedule_builder import Builder, DeadEndError, Pin
from twinstream.schedule.chain import Chain, Output, Recompute, Task
from twinstream.schedule.cost import Work
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import Attribute, KernelCall, Label, Mode, TaskOperand
from twinstream.schedule.tensors import DEVICE, HOST, Carried, Role
from twinstream.schedule.workload import MachineRef, ModelRef, Workload

WORKLOAD = Workload(seq_len=8, chunk_tokens=8, chunks_per_round=1, rounds_per_step=1)
MODEL = ModelRef(name="random", content_hash="0", spec={"layers": 1, "note": None})
RECIPE: dict[str, JsonValue] = {"optimizer": "adamw", "betas": [0.9, 0.95], "clip": None}
LABEL = Label(kind="block_forward", layer=0, round=0)
CALLS = ["call0", "call1", "call2"]
MODES: list[Mode] = ["read", "read", "update", "write", "write", "scratch"]
WORK = Work(unit="matmul", shape=(2, 3, 4), flops=48, hbm_bytes=52, launches=1)


def schedules() -> st.SearchStrategy[tuple[Chain, RankSchedule]]:
    """Safe, conforming (chain, schedule) pairs; smaller seeds do not mean smaller pairs."""
    return st.integers(min_value=0, max_value=2**32).map(lambda seed: build(Random(seed)))


def build(rng: Random) -> tuple[Chain, RankSchedule]:
    """A random chain and a safe schedule that carries it out."""
    builder = Builder(rng)
    while True:
        try:
            _grow(builder)
            break
        except DeadEndError:
            builder = Builder(rng)
    chain = Chain(
        tensors=tuple(builder.tensors.values()),
        calls={name: _call(i) for i, name in enumerate(CALLS)},
        tasks=tuple(builder.tasks),
        recomputes=tuple(builder.recomputes),
        inputs=tuple(builder.inputs),
        outputs=tuple(builder.outputs),
        persistent=tuple(builder.persistent),
        round_starts=(0,),
        workload=WORKLOAD,
        model=MODEL,
        recipe=RECIPE,
        model_flops=48,
    )
    schedule = RankSchedule(
        tensors=chain.tensors,
        slots=tuple(builder.slots.values()),
        calls=chain.calls,
        ops=tuple(builder.ops),
        carried=tuple(builder.carried),
        caps=_caps(builder),
        workload=WORKLOAD,
        model=MODEL,
        recipe=RECIPE,
        model_flops=48,
        machine=MachineRef(name="random", content_hash="0"),
        policy="random",
    )
    return chain, _with_waits(_carry_less(schedule, chain, rng), rng)


def _grow(builder: Builder) -> None:
    """Invent tensors and one pass over them."""
    rng = builder.rng
    builder.persistent = [f"weight{i}" for i in range(rng.randint(1, 3))]
    roles: dict[str, Role] = dict.fromkeys(builder.persistent, "parameter")
    roles |= {f"activation{i}": "activation" for i in range(rng.randint(1, 3))}
    roles |= {"tokens": "input", "loss": "loss", "temporary": "scratch"}
    for name, role in roles.items():
        divisible = role in ("parameter", "activation")
        builder.add_tensor(name, role, with_parts=divisible and builder.chance(0.4))
    persistent, builder.persistent = builder.persistent, []
    for name in persistent:
        _carry(builder, name)
    builder.pins, builder.persistent = [], persistent
    for number in range(rng.randint(2, 6)):
        _one_task(builder, number)
    for (leaf, version), sink in list(builder.unfetched.items()):
        builder.fetch(leaf, version, sink)
    for item in rng.sample(builder.carried, len(builder.carried)):
        _write_back(builder, item)
    _carry_more(builder)


def _one_task(builder: Builder, number: int) -> None:
    """One task, and what a planner may do before it: feed, offload, prefetch, recompute."""
    rng = builder.rng
    if builder.chance(0.3):
        builder.feed("tokens")
    if builder.chance(0.3):
        _write_back(builder, rng.choice(builder.carried))
    for held in rng.sample(builder.held, min(len(builder.held), rng.choice([0, 0, 1, 2]))):
        if builder.holders(held.leaf, None, held.version):
            builder.copy(held.leaf, None, held.version, rng.choice([HOST, DEVICE]))
    for _ in range(rng.choice([0, 0, 1, 2])):
        _recompute(builder, f"t{number}")
    task = _invent_task(builder, number)
    builder.tasks.append(task)
    builder.compute(task)
    made = [h for h in builder.held if h.version and builder.holders(h.leaf, None, h.version)]
    if made and builder.chance(0.3):
        held, sink = rng.choice(made), f"result{len(builder.outputs)}"
        if (held.leaf, held.version) not in builder.unfetched:
            output = Output(tensor=held.leaf, version=held.version, sink=sink)
            builder.outputs.append(output)
            builder.unfetched[held.leaf, held.version] = sink
            if builder.chance(0.5):
                builder.fetch(held.leaf, held.version, sink)


def _invent_task(builder: Builder, number: int) -> Task:
    operands: list[TaskOperand] = []
    made: set[str] = set()
    for i in range(builder.rng.randint(1, 4)):
        mode = builder.rng.choice(MODES)
        name = builder.rng.choice(list(builder.tensors))
        parts = len(parts_of(builder.tensors, name))
        num_parts = builder.rng.randint(1, parts) if parts and builder.chance(0.4) else None
        leaves = builder.leaves(name, num_parts)
        newest = max(builder.latest[leaf] for leaf in leaves)
        there = sorted({h.version for h in builder.held if h.leaf == leaves[0]})
        found = [v for v in there if builder.holders(name, num_parts, v)]
        version = {
            "read": builder.rng.choice((found if builder.chance(0.2) else found[-1:]) or [0]),
            "update": newest,
            "write": max(1, newest + builder.rng.choice([0, 1, 1, 1, 2])),
            "scratch": 0,
        }[mode]
        if mode in ("read", "update") and version not in found:
            continue
        if mode == "update" and (
            any(builder.latest[leaf] != newest for leaf in leaves)
            or any((leaf, newest) in builder.unfetched for leaf in leaves)
        ):
            continue
        if mode in ("update", "write"):
            if made.intersection(leaves):
                continue
            made.update(leaves)
        operands.append(
            TaskOperand(name=f"x{i}", tensor=name, version=version, mode=mode, num_parts=num_parts)
        )
    return Task(
        task_id=f"t{number}", call=builder.rng.choice(CALLS), operands=tuple(operands), label=LABEL
    )


def _recompute(builder: Builder, before: str) -> None:
    """Run an earlier task again, if what it reads is there and what it makes is newest."""
    for task in builder.rng.sample(builder.tasks, len(builder.tasks)):
        if all(_repeatable(builder, operand) for operand in task.operands):
            group = f"group{len(builder.recomputes)}"
            for _ in range(builder.rng.randint(1, 2)):
                name = f"{task.task_id}-again{len(builder.recomputes)}"
                again = task.model_copy(update={"task_id": name})
                builder.recomputes.append(Recompute(task=again, before=before, group=group))
            if builder.chance(0.8):
                builder.compute(again)
            return


def _repeatable(builder: Builder, operand: TaskOperand) -> bool:
    name, num_parts = operand.tensor, operand.num_parts
    match operand.mode:
        case "read":
            return bool(builder.holders(name, num_parts, operand.version))
        case "write":
            leaves = builder.leaves(name, num_parts)
            return all(builder.latest[leaf] == operand.version for leaf in leaves)
        case mode:
            return mode == "scratch"


def _carry(builder: Builder, name: str) -> None:
    """Place a persistent tensor's version 0: in host memory, on the device, or both."""
    tiers = builder.rng.choice([[HOST], [HOST], [DEVICE], [HOST, DEVICE], [HOST, HOST]])
    for tier in tiers:
        whole = builder.chance(0.7) or not parts_of(builder.tensors, name)
        for item in [name] if whole else builder.leaves(name):
            slot = builder.place(item, None, tier)
            builder.pins.append(Pin(builder.span(item, slot), "write"))
            builder.carried.append(Carried(tensor=item, slot=slot))
            builder.put(item, slot, None, 0)


def _write_back(builder: Builder, item: Carried) -> None:
    """Bring a carried slot up to the newest version, as a whole or by part."""
    stale = [leaf for leaf in builder.leaves(item.tensor) if not builder.is_newest(leaf, item.slot)]
    versions = {builder.latest[leaf] for leaf in builder.leaves(item.tensor)}
    whole = len(versions) == 1 and builder.holders(item.tensor, None, max(versions))
    if stale and whole and builder.chance(0.6):
        builder.copy(item.tensor, None, max(versions), item.slot)
    else:
        for leaf in stale:
            builder.copy(leaf, None, builder.latest[leaf], item.slot)


def _carry_more(builder: Builder) -> None:
    """Also carry some state that is valid at the end and lies apart from the other pairs."""
    state = {leaf for root in builder.persistent for leaf in (root, *builder.leaves(root))}
    for name in (name for name in builder.tensors if name in state):
        for slot in [s for s in builder.slots if builder.fits(name, s, None)]:
            taken = [builder.span(c.tensor, c.slot) for c in builder.carried]
            valid = all(builder.is_newest(leaf, slot) for leaf in builder.leaves(name))
            apart = not any(span.overlaps(builder.span(name, slot)) for span in taken)
            if valid and apart and builder.chance(0.5):
                builder.carried.append(Carried(tensor=name, slot=slot))


def _call(number: int) -> KernelCall:
    attributes: dict[str, Attribute] = {"causal": True, "number": number, "scale": 2.0, "by": "me"}
    return KernelCall(kernel=f"kernel{number}/eager", attributes=attributes, cost=(WORK,))


def _caps(builder: Builder) -> Caps:
    extents = {
        tier: max(
            (s.offset_bytes + s.size_bytes for s in builder.slots.values() if s.tier == tier),
            default=0,
        )
        for tier in (DEVICE, HOST)
    }
    caps = [builder.rng.choice([None, extent, extent + 100]) for extent in extents.values()]
    return Caps(device_bytes=caps[0], host_bytes=caps[1])


def _carry_less(schedule: RankSchedule, chain: Chain, rng: Random) -> RankSchedule:
    """Drop some pairs whose content a pass does not need, as far as the oracle is content."""
    for item in schedule.carried:
        if rng.random() < 0.8:
            continue
        kept = tuple(c for c in schedule.carried if c != item)
        fewer = schedule.model_copy(update={"carried": kept})
        arena = Arena(fewer, every_byte=False)
        if not content_problems(fewer, arena, 2) | conformity_problems(fewer, chain):
            schedule = fewer
    return schedule


def _with_waits(schedule: RankSchedule, rng: Random) -> RankSchedule:
    """Wait for every conflicting op, then drop redundant waits at random, or add some."""
    ops, size = schedule.ops, len(schedule.ops)
    _, pairs = conflicts(Arena(schedule, every_byte=False), num_passes=2)
    waits = {
        (second % size, first % size, second - second % size != first - first % size)
        for first, second in pairs
        if ops[first % size].stream != ops[second % size].stream
    }
    drops = rng.choice([0.0, 0.5, 1.0])
    for wait in rng.sample(sorted(waits), len(waits)):
        if rng.random() < drops:
            before = happens_before(schedule, waits - {wait}, 2)
            if all(first in before[second] for first, second in pairs):
                waits.remove(wait)
    for _ in range(rng.choice([0, 0, 3])):
        second, first = rng.randrange(size), rng.randrange(size)
        waits.add((second, first, True))
        if first < second and ops[first].stream != ops[second].stream:
            waits.add((second, first, False))
    return _waiting(schedule, waits)


def _waiting(schedule: RankSchedule, waits: set[Wait]) -> RankSchedule:
    ops = []
    for position, op in enumerate(schedule.ops):
        found: dict[bool, list[str]] = {False: [], True: []}
        for second, first, previous in sorted(waits):
            if second == position:
                found[previous].append(schedule.ops[first].op_id)
        ops.append(
            op.model_copy(
                update={"waits": tuple(found[False]), "waits_previous": tuple(found[True])}
            )
        )
    return schedule.model_copy(update={"ops": tuple(ops)})
