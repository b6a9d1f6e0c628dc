"""A cluster's schedule within the memories of its nodes: each class planned by the planner.

Layers of one microbatch are one task to the planner, with what is said inside them; what it decides
is simulated with all stages, and all that they share, by `simulate`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from twinstream.clusters.assembling import in_one_order
from twinstream.clusters.planned_stage import plan_stage
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.cost import copy_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.lowering.lower import lower
from twinstream.models.parallel.job import Job
from twinstream.planner.emit.merged_chain import MergedChain
from twinstream.planner.planner import gc_paused
from twinstream.planner.request import caps_of
from twinstream.planner.search.one_chain import OneChain
from twinstream.schedule.analysis.occupancy import slot_bytes_by_role
from twinstream.schedule.chain import COMMUNICATE, Chain, SlotPools, Task
from twinstream.schedule.cluster.verify import require_safe
from twinstream.schedule.cost import Work
from twinstream.schedule.document import Caps, RankSchedule, Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import KernelCall, Label, TaskOperand
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.sizes import gib
from twinstream.schedule.tensors import DEVICE, Tensor
from twinstream.simulator.network_costs import ClusterCosts, share_of
from twinstream.simulator.replay import replay_cluster

_SIMULATED_TASKS = 5000  # in all plans of a stage that are simulated
_MOST_ATTEMPTS = 8
_MOST_BLOCKS = 450  # of a stage: of larger ones layers are planned together
_WORKING_SET = 0.2  # of the device, that layers planned together may take
_LEAST_BYTES = 2**20  # smaller tensors are not worth a copy

_Key = tuple[object, ...]


class OffloadError(TwinstreamError):
    """A stage fits neither the device nor, with the host's help, both memories.

    `role_bytes` is what it takes with everything on the device; `least_device_bytes` and
    `least_host_bytes` are caps below which nothing fits, the other cap as it is (None where no
    size would do).
    """

    def __init__(
        self, name: str, caps: Caps, role_bytes: Mapping[str, int], least_device_bytes: int | None,
        least_host_bytes: int | None,
    ) -> None:  # fmt: skip
        self.role_bytes = role_bytes
        self.least_device_bytes, self.least_host_bytes = least_device_bytes, least_host_bytes
        needs = ", ".join(f"{role} {gib(size)}" for role, size in role_bytes.items())
        has = _rooms_text(" and ", (caps.device_bytes, caps.host_bytes), "memory")
        least = _rooms_text(" or ", (least_device_bytes, least_host_bytes), "memory a GPU")
        super().__init__(
            f"{name} does not fit, not even with offload: a GPU has {has}, and the stage takes "
            f"{needs}. "
            + (f"It takes at least {least}, the other as it is. " if least else "")
            + "More stages or shards (--zero, --dp), smaller microbatches or recompute take less."
        )


def _rooms_text(between: str, sizes: tuple[int | None, int | None], of_what: str) -> str:
    rooms = zip(("device", "host"), sizes, strict=True)
    return between.join(f"{gib(size)} of {of} {of_what}" for of, size in rooms if size is not None)


def offloaded(
    document: Schedule,
    job: Job,
    cluster: Cluster,
    machine: Machine,
    caps: Caps | None = None,
) -> Schedule:
    """The document with every stage within its GPUs' memory and their share of the host's.

    What a stage keeps where and when it is copied is for the ordinary planner, which sees each
    stage by itself, as long as its tasks take with everything on the device. A stage that fits
    stays as it is.

    Args:
        document: lowered from the job, with everything on the device.
        job: whose layout has `offload`: its layers have tasks of their own.
        machine: of a node.
        caps: of one GPU; None: all that the node has.

    Raises:
        OffloadError: a stage does not fit.
        MissingNumberError: a profile lacks a number that is needed.
    """
    assert job.layout.offload, "layers together in one task cannot leave one by one"
    job = job.with_megatron_kernels()
    share = share_of(machine, min(cluster.count("gpus_per_node"), document.mesh.size))
    caps = caps or caps_of(share, None, None)
    room = caps.arena_bytes("device")
    with gc_paused():
        costs = ClusterCosts(document, cluster, machine)
        timeline = replay_cluster(document, costs, cluster.name, num_passes=2)
        schedules: dict[str, RankSchedule] = {}
        for stage, one in enumerate(document.classes):
            schedule = document.of(one)
            if room is None or arena_bytes(schedule, DEVICE) <= room:
                schedules[one.schedule] = schedule.model_copy(update={"caps": caps})
                continue
            chain = lower(job.shape, job.workload, job.recipe, job.layout, stage)
            starts = timeline.classes[one.name].passes[-1].start_ns
            start_ns = dict(zip((op.op_id for op in schedule.ops), starts, strict=True))
            whole = _Stage(chain, schedule, start_ns, timeline.step_ns)
            planned = _planned(one.name, whole, share, caps)
            schedules[one.schedule] = planned.model_copy(update={"machine": schedule.machine})
        found = in_one_order(document.model_copy(update={"schedules": schedules}))
    require_safe(found)
    return found


@dataclass(frozen=True)
class _Stage:
    """A stage, and when its tasks begin in a pass with everything on the device."""

    chain: Chain
    resident: RankSchedule
    start_ns: Mapping[str, int]
    pass_ns: float


def _planned(name: str, stage: _Stage, machine: Machine, caps: Caps) -> RankSchedule:
    """The stage's schedule with copies, within the caps.

    Where nothing fits otherwise, what is exchanged gets its bytes from the planner, too.
    """
    for tight in (False, True):
        merged = _merged(stage, machine, caps, tight=tight)
        attempts = min(_MOST_ATTEMPTS, max(2, _SIMULATED_TASKS // len(merged.planned.tasks)))
        found = plan_stage(merged, machine, caps, most_attempts=attempts)
        if found is not None:
            return found.schedule
    least_device, least_host = OneChain(merged.planned, machine, merged.left_of(caps)).least_bytes()
    raise OffloadError(
        name, caps, slot_bytes_by_role(stage.resident),
        None if least_device is None else round(least_device) + merged.apart_bytes,
        None if least_host is None else round(least_host),
    )  # fmt: skip


def _merged(stage: _Stage, machine: Machine, caps: Caps, *, tight: bool) -> MergedChain:
    """The stage's chain with a task for each block.

    Each is as long as it takes with everything on the device. That includes waiting for other
    stages, so that copies are planned to hide there, too.
    """
    chain = stage.chain
    placed, movable = _places(stage, machine, tight=tight)
    room = caps.arena_bytes("device") or 0
    blocks = _few_blocks(chain, placed, 0 if tight else round(_WORKING_SET * room))
    calls: dict[str, KernelCall] = {}
    tasks, members = [], {}
    for number, (block, time_ns) in enumerate(zip(blocks, _block_ns(blocks, stage), strict=True)):
        task_id, call = f"block.{number}", f"{block.label.kind}.{round(time_ns)}"
        works = (_lasting(time_ns, machine),) if round(time_ns) else ()
        calls.setdefault(call, KernelCall(kernel="cluster.block", attributes={}, cost=works))
        operands = block.operands()
        tasks.append(Task.made(task_id=task_id, call=call, operands=operands, label=block.label))
        members[task_id] = block.tasks
    tensors = [
        tensor if tensor.tensor_id in movable else tensor.model_copy(update={"role": "scratch"})
        for tensor in chain.tensors
        if tensor.tensor_id in placed
    ]
    planned = chain.model_copy(
        update={
            "tensors": tuple(tensors),
            "calls": calls,
            "tasks": tuple(tasks),
            "persistent": tuple(name for name in chain.persistent if name in placed),
            "workload": chain.workload.model_copy(update={"rounds_per_step": 1}),
            "pools": SlotPools({}),
        }
    )
    used = {operand.tensor for task in chain.tasks for operand in task.operands}
    apart = [t.tensor_id for t in chain.tensors if t.tensor_id in used - placed]
    whole = chain.model_copy(update={"pools": chain.pools.without(placed)})
    return MergedChain(whole, planned, members, apart)


@dataclass
class _Block:
    """Tasks in a row, which find all they use on the device.

    `reads` has the version that each placed tensor must have at the beginning, `makes` what it has
    at the end where that is another. `first` is its first computation.
    """

    label: Label
    tasks: list[Task] = field(default_factory=list)
    reads: dict[str, int] = field(default_factory=dict)
    makes: dict[str, int] = field(default_factory=dict)
    order: dict[str, None] = field(default_factory=dict)
    first: str | None = None

    def add(self, task: Task, placed: frozenset[str]) -> None:
        """Take in one more task."""
        self.tasks.append(task)
        for operand in task.operands:
            name = operand.tensor
            if name not in placed:
                continue
            if name not in self.order:
                self.order[name] = None
                if operand.mode in ("read", "update"):
                    self.reads[name] = operand.version
            if operand.mode == "update":
                self.makes[name] = operand.version + 1
            elif operand.mode == "write":
                self.makes[name] = operand.version

    def operands(self) -> tuple[TaskOperand, ...]:
        """As those of one task: what is read and made is an operand twice."""
        found, made = [], TaskOperand.made
        for name in self.order:
            for end, versions, mode in (("in", self.reads, "read"), ("out", self.makes, "write")):
                if name in versions:
                    found.append(
                        made(
                            name=f"{name}.{end}", tensor=name, version=versions[name], mode=mode,
                            num_parts=None,
                        )
                    )  # fmt: skip
        return tuple(found)


def _few_blocks(chain: Chain, placed: frozenset[str], most_bytes: int) -> list[_Block]:
    """Blocks of as few layers as make no more than `_MOST_BLOCKS`.

    Those of several layers work on no more than `most_bytes`.
    """
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in chain.tensors}
    found = _blocks(chain, placed, 1)
    together = 1
    while len(found) > _MOST_BLOCKS:
        together *= 2
        larger = _blocks(chain, placed, together)
        if max(sum(sizes[name] for name in block.order) for block in larger) > most_bytes:
            break
        if len(larger) == len(found):
            break
        found = larger
    return found


def _blocks(chain: Chain, placed: frozenset[str], together: int) -> list[_Block]:
    """Computation of one microbatch in a row is a block, and what is said in between.

    It is that of one layer, or of so many together.
    """
    found: list[_Block] = []
    current: _Key = ()
    for task in chain.tasks:
        computes = chain.calls[task.call].kernel != COMMUNICATE
        key = _key(task, together) if computes else current
        if not found or (key != current and found[-1].first is not None):
            found.append(_Block(task.label))
        if computes:
            current = key
            if found[-1].first is None:
                found[-1].label, found[-1].first = task.label, task.task_id
        found[-1].add(task, placed)
    return found


def _key(task: Task, together: int) -> _Key:
    label = task.label
    if label.layer is None or label.round is None:  # of no layer, or of no microbatch
        return (task.task_id,)
    return label.layer // together, label.round


def _block_ns(blocks: Sequence[_Block], stage: _Stage) -> list[float]:
    """From the start of a block's first computation to that of the next, around the pass."""
    found = [0.0] * len(blocks)
    at = [(i, stage.start_ns[b.first]) for i, b in enumerate(blocks) if b.first is not None]
    ends = [start for _, start in at[1:]] + [at[0][1] + stage.pass_ns]
    for (number, start_ns), end_ns in zip(at, ends, strict=True):
        found[number] = max(0.0, end_ns - start_ns)
    return found


def _lasting(time_ns: float, machine: Machine) -> Work:
    """Work that takes so long and hardly any memory traffic."""
    flops = time_ns / 1e9 * machine.number("peak_fp32_flop_per_s")
    return Work(unit="vector", shape=(1,), flops=max(1, round(flops)), hbm_bytes=0, launches=0,
                dtype="float32")  # fmt: skip


@dataclass
class _Life:
    """What is seen of a tensor: its longest time between two uses of one content, and by whom."""

    first_ns: float | None = None
    last_ns: float = 0.0
    longest_ns: float = 0.0
    exchanged: bool = False
    ahead: bool = False


def _places(
    stage: _Stage, machine: Machine, *, tight: bool
) -> tuple[frozenset[str], frozenset[str]]:
    """Tensors that have their bytes from the planner, and those of them that may leave the device.

    May leave what rests at least as long as it takes to copy it out and back in. Beside that the
    planner places what only computation uses; of a `tight` stage all, so that nothing has bytes to
    itself, and exchanges may have to wait for them. What is received or gathered ahead of its use
    keeps slots of its own, as many as it takes to overlap, and so does a block of a ring, which is
    in two at a time.
    """
    lives = _lives(stage)
    in_slots = {name.partition("#")[0] for several in stage.chain.pools.several.values()
                for name in several.values()}  # fmt: skip
    placed, movable = set(), set()
    for tensor in stage.chain.tensors:
        name = tensor.tensor_id
        life = lives.get(name)
        if life is None or tensor.size_bytes < _LEAST_BYTES or name in in_slots:
            continue
        if life.ahead and not tight:
            continue
        rests = life.longest_ns >= _there_and_back_ns(tensor, machine)
        if rests:
            movable.add(name)
        if rests or tight or not life.exchanged:
            placed.add(name)
    return frozenset(placed), frozenset(movable)


def _lives(stage: _Stage) -> Mapping[str, _Life]:
    chain = stage.chain
    roles = {tensor.tensor_id: tensor.role for tensor in chain.tensors}
    persistent = set(chain.persistent)
    found: dict[str, _Life] = {}
    for task in chain.tasks:
        start_ns, call = stage.start_ns[task.task_id], chain.calls[task.call]
        for operand in task.operands:
            life = found.setdefault(operand.tensor, _Life())
            if life.first_ns is None:
                life.first_ns = start_ns
            elif operand.mode in ("read", "update"):
                life.longest_ns = max(life.longest_ns, start_ns - life.last_ns)
            life.last_ns = start_ns
            if call.kernel == COMMUNICATE:
                life.exchanged = True
                gathered = roles[operand.tensor] == "parameter" and operand.tensor not in persistent
                received = call.attributes["collective"] == "recv"
                life.ahead |= operand.mode == "write" and (received or gathered)
    for name in persistent & found.keys():
        life = found[name]
        if life.first_ns is not None:
            over_ns = stage.pass_ns - life.last_ns + life.first_ns
            life.longest_ns = max(life.longest_ns, over_ns)
    return found


def _there_and_back_ns(tensor: Tensor, machine: Machine) -> float:
    return copy_alone_ns(tensor.size_bytes, "d2h", machine) + copy_alone_ns(
        tensor.size_bytes, "h2d", machine
    )
