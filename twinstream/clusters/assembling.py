"""The schedule of a mesh from the chains of its stages: every exchange in one order."""

from collections import defaultdict, deque

from twinstream.models.lowering.lower import lower
from twinstream.models.lowering.parts.groups import mesh_of
from twinstream.models.parallel.job import Job
from twinstream.planner.emit.task_ops import resident_schedule
from twinstream.planner.planner import gc_paused
from twinstream.schedule.document import Caps, Exchange, RankClass, RankSchedule, Schedule
from twinstream.schedule.ops import Communicate, Op
from twinstream.schedule.workload import MachineRef

_Key = tuple[object, ...]
_Node = list[tuple[int, int]]  # an op, or the sides of an exchange: class and place in its ops


def assembled(
    job: Job, ranks_per_node: int, machine: MachineRef, caps: Caps | None = None, *,
    folded: bool = False,
) -> Schedule:  # fmt: skip
    """One class of ranks for each stage, all of it in device memory.

    Args:
        folded: layers are single ops, whatever is said inside them; to be timed by other means.
            So they always are where twinstream's own kernels compute them.

    Raises:
        LayoutError: the layout cannot be.
    """
    job = job.with_megatron_kernels()
    folded = folded or job.is_own
    mesh = mesh_of(job, ranks_per_node)
    schedules, classes = dict[str, RankSchedule](), []
    with gc_paused(cycles=False):
        for stage in range(job.layout.pp):
            name = f"stage {stage}"
            chain = lower(job.shape, job.workload, job.recipe, job.layout, stage, folded=folded)
            schedules[name] = resident_schedule(chain, machine, caps or Caps())
            classes.append(RankClass(name=name, schedule=name, cells={"pp": (stage,)}))
        document = Schedule.model_construct(
            schema_version=1, mesh=mesh, classes=tuple(classes), schedules=schedules, order=(),
            model=job.shape.model_dump(mode="json"), layout=job.layout.model_dump(mode="json"),
            seq_len=job.seq_len, global_batch=job.global_batch,
            precision="bf16", attention="flash",
            model_flops=schedules["stage 0"].model_flops, machine=machine,
        )  # fmt: skip
        return in_one_order(document)


def in_one_order(schedule: Schedule) -> Schedule:
    """The document with its exchanges in one order, and every class's ops issued in it.

    Classes that have the same cells of all axes but those of an op are sides of an exchange; the
    sides of a message are where the shift leads. The order is one in which all ops of all classes
    can run one after the other: streams in order, waits first, the sides of an exchange together.
    Ops that never can (a deadlock) are left behind the others, as they were.
    """
    ops = [schedule.of(one).ops for one in schedule.classes]
    names = [one.name for one in schedule.classes]
    run = _run_order(ops, _meetings(schedule))
    order: list[Exchange] = []
    issued: list[list[Op]] = [[] for _ in ops]
    for node in run:
        found = [ops[number][at] for number, at in node]
        for (number, _), op in zip(node, found, strict=True):
            issued[number].append(op)
        if found[0].kind == "communicate":
            sides = [(names[n], op.op_id) for (n, _), op in zip(node, found, strict=True)]
            order.append(Exchange.made(sides=tuple(sides)))
    schedules = {
        one.schedule: schedule.of(one).model_copy(update={"ops": tuple(issued[number])})
        for number, one in enumerate(schedule.classes)
    }
    return schedule.model_copy(update={"order": tuple(order), "schedules": schedules})


def _meetings(schedule: Schedule) -> list[_Node]:
    """The sides of every exchange."""
    numbers: dict[_Key, int] = {}
    found: dict[tuple[int, int], _Node] = defaultdict(list)
    for number, one in enumerate(schedule.classes):
        groups: dict[_Key, int] = {}
        for at, op in enumerate(schedule.of(one).ops):
            if op.kind == "communicate":
                kind = op.axes, op.stream.queue, op.shift, op.collective
                if kind not in groups:
                    key = _group_key(schedule, one, op)
                    groups[kind] = numbers.setdefault(key, len(numbers))
                found[groups[kind], op.sequence].append((number, at))
    return list(found.values())


def _run_order(ops: list[tuple[Op, ...]], meetings: list[_Node]) -> list[_Node]:
    """Nodes as they can run, first come first."""
    nodes = meetings.copy()
    node_of = [[-1] * len(one) for one in ops]
    for place, sides in enumerate(meetings):
        for number, at in sides:
            node_of[number][at] = place
    for number, places in enumerate(node_of):
        for at, place in enumerate(places):
            if place < 0:
                places[at] = len(nodes)
                nodes.append([(number, at)])
    after: list[list[int]] = [[] for _ in nodes]
    left = [0] * len(nodes)
    for one, places in zip(ops, node_of, strict=True):
        node_by_id: dict[str, int] = {
            op.op_id: place for op, place in zip(one, places, strict=True)
        }
        last: dict[str, int] = {}
        for op, place in zip(one, places, strict=True):
            for wait in op.waits:
                after[node_by_id[wait]].append(place)
            left[place] += len(op.waits)
            queue = op.stream.queue
            if queue in last:
                after[last[queue]].append(place)
                left[place] += 1
            last[queue] = place
    ready = deque(node for node, count in enumerate(left) if not count)
    found = []
    while ready:
        node = ready.popleft()
        found.append(nodes[node])
        for other in after[node]:
            left[other] -= 1
            if not left[other]:
                ready.append(other)
    return found + [nodes[node] for node, count in enumerate(left) if count]


def _group_key(schedule: Schedule, one: RankClass, op: Communicate) -> _Key:
    """Equal for all sides of an op's exchanges: who talks, over which communicator."""
    mesh = schedule.mesh
    others = tuple(
        (axis.name, one.cell(axis.name, axis.size))
        for axis in mesh.axes
        if axis.name not in op.axes
    )
    if not op.shift:
        return (op.axes, op.stream.queue, others)
    (axis,) = op.axes
    size = mesh.length(axis)
    cell = one.cell(axis, size)
    sent = op.shift if op.collective == "send" else -op.shift
    begins = cell if op.collective == "send" else tuple(sorted((x - sent) % size for x in cell))
    return (op.axes, sent, begins, others)
