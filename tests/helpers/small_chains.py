"""Random chains of two to four tasks, with machines on which every resource matters in turn."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from random import Random

from tests.hardware_profiles.machines import number
from tests.helpers.flat_machine import FLOP_PER_NS, flat_machine
from twinstream.hardware_profiles.schema import Machine, Number
from twinstream.schedule.chain import Chain, Recompute, Task
from twinstream.schedule.cost import Work
from twinstream.schedule.document import Caps
from twinstream.schedule.ops import KernelCall, Label, Mode, TaskOperand
from twinstream.schedule.tensors import Role, Tensor
from twinstream.schedule.workload import ModelRef, Workload

MIB = 2**20
UNIT_BYTES = 64 * MIB
MS = 1_000_000

Uses = dict[int, tuple[Mode, int]]  # by task: mode and version of the operand


@dataclass(frozen=True)
class SmallCase:
    chain: Chain
    machine: Machine
    caps: Caps


@dataclass(frozen=True)
class Sort:
    """A tensor of a small chain: how much of it there is, and which task does what with it."""

    name: str
    units: int
    role: Role
    uses: Uses

    @property
    def tensor(self) -> Tensor:
        size = self.units * UNIT_BYTES
        return Tensor(
            tensor_id=self.name, size_bytes=size, role=self.role, dtype="uint8", shape=(size,)
        )


@dataclass(frozen=True)
class Again:
    """A recompute option: which tensors it makes again and reads, before which task."""

    name: str
    before: int
    makes: tuple[str, ...]
    reads: tuple[str, ...]
    duration_ms: float


def small_case(seed: int) -> SmallCase:
    """A chain, a machine and caps, the same for the same seed."""
    random = Random(seed)
    chain = small_chain(random)
    return SmallCase(chain, small_machine(random), small_caps(random, chain))


def small_chain(random: Random) -> Chain:
    """Two to four tasks, one to three tensors that may move, often scratch and recomputes.

    In half of the chains all sizes are multiples of one, so that whole tensors waste no memory.
    """
    sizes = random.choice(((1, 2, 4, 4, 6, 8, 8, 12), (random.choice((2, 4, 8)),)))
    num_tasks = random.choice((2, 3, 4, 4, 4))
    num_tensors = random.choice((1, 2, 3, 3, 3))
    sorts = [
        _random_sort(random, f"x{i}", random.choice(sizes), num_tasks) for i in range(num_tensors)
    ]
    agains = _random_agains(random, sorts, num_tasks)
    sorts += _random_scratch(random, sorts, num_tasks)
    longest_ms = random.choice((2.0, 20.0))
    durations_ms = [
        longest_ms * random.choice((0.01, 0.05, 0.2, 0.5, 1.0)) for _ in range(num_tasks)
    ]
    traffic = [random.choice((0, 0, 256, 1024, 4096)) * MIB for _ in range(num_tasks)]
    return build_chain(sorts, durations_ms, hbm_bytes=traffic, agains=agains)


def build_chain(
    sorts: Sequence[Sort],
    durations_ms: Sequence[float],
    *,
    hbm_bytes: Sequence[int] | None = None,
    agains: Sequence[Again] = (),
) -> Chain:
    """One round of tasks that take so long alone (where HBM is not the slower)."""
    calls = {
        f"call{i}": _call(duration, (hbm_bytes or [0] * len(durations_ms))[i])
        for i, duration in enumerate(durations_ms)
    }
    calls |= {again.name: _call(again.duration_ms, 0) for again in agains}
    tasks = [
        Task(
            task_id=f"t{i}",
            call=f"call{i}",
            operands=tuple(
                TaskOperand(name=s.name, tensor=s.name, mode=s.uses[i][0], version=s.uses[i][1])
                for s in sorts
                if i in s.uses
            ),
            label=Label(kind="task"),
        )
        for i in range(len(durations_ms))
    ]
    by_name = {sort.name: sort for sort in sorts}
    return Chain(
        tensors=tuple(sort.tensor for sort in sorts),
        calls=calls,
        tasks=tuple(tasks),
        recomputes=tuple(_recompute(again, by_name) for again in agains),
        inputs=(),
        outputs=(),
        persistent=tuple(s.name for s in sorts if s.role in ("parameter", "optimizer_state")),
        round_starts=(0,),
        workload=Workload(seq_len=8, chunk_tokens=8, chunks_per_round=1, rounds_per_step=1),
        model=ModelRef(name="small", content_hash="0", spec={}),
        recipe={},
        model_flops=1,
    )


def small_machine(random: Random) -> Machine:
    """Latencies are 0. Rates in bytes per ns, so that 1 GiB takes 5 to 100 ms."""
    h2d, d2h = (random.choice((10.0, 20.0, 40.0, 80.0)) for _ in range(2))
    slower, faster = sorted((h2d, d2h))
    duplex = random.choice((None, None, slower, 0.7 * (h2d + d2h), 1.1 * faster))
    hbm = random.choice((None, 1000.0, 400.0, 0.8 * (h2d + d2h), 1.5 * faster))
    dram = random.choice((None, None, None, 0.9 * (h2d + d2h), faster))
    return link_machine(h2d=h2d, d2h=d2h, duplex=duplex, hbm=hbm, dram=dram)


def link_machine(
    *,
    h2d: float,
    d2h: float,
    duplex: float | None = None,
    hbm: float | None = None,
    dram: float | None = None,
) -> Machine:
    """A machine without latencies of these rates in bytes per ns; None is unconstrained."""
    return flat_machine(
        pcie_h2d_bytes_per_s=_rate(h2d),
        pcie_d2h_bytes_per_s=_rate(d2h),
        pcie_duplex_bytes_per_s=_rate(duplex),
        hbm_bytes_per_s=_rate(hbm),
        host_dram_bytes_per_s=_rate(dram),
        launch_latency_ns=number(0),
        copy_latency_ns=number(0),
        event_wait_latency_ns=number(0),
    )


def small_caps(random: Random, chain: Chain) -> Caps:
    """A device cap from the largest task's operands to everything; sometimes a host cap.

    Tight ones more often than not: that is where copies and recomputes happen.
    """
    least = largest_operands_bytes(chain)
    content = sum(t.size_bytes for t in chain.tensors if t.role != "scratch")
    grain = gcd(*(t.size_bytes for t in chain.tensors))
    device = least + _multiple(content * random.choice((0.0, 0.1, random.random())), grain)
    if random.random() < 0.5:
        return Caps(device_bytes=device)
    return Caps(device_bytes=device, host_bytes=_multiple(content * random.random(), grain))


def largest_operands_bytes(chain: Chain) -> int:
    """What the hungriest task has on the device."""
    sizes = {t.tensor_id: t.size_bytes for t in chain.tensors}
    return max(sum(sizes[o.tensor] for o in task.operands) for task in chain.tasks)


def _random_sort(random: Random, name: str, units: int, num_tasks: int) -> Sort:
    kind = random.choice(("temporary", "temporary", "frozen", "state", "state"))
    if kind == "temporary":
        return Sort(name, units, "activation", _temporary_uses(random, num_tasks))
    used = sorted(
        random.sample(range(num_tasks), random.choice((1, 1, 1, 2, 2, 3)[: 2 * num_tasks]))
    )
    updates = set() if kind == "frozen" else {random.choice(used)}
    if kind == "state" and random.random() < 0.2:
        updates = set(used)
    uses: Uses = {}
    version = 0
    for task in used:
        uses[task] = ("update" if task in updates else "read", version)
        version += task in updates
    return Sort(name, units, "parameter" if kind == "frozen" else "optimizer_state", uses)


def _temporary_uses(random: Random, num_tasks: int) -> Uses:
    """Written, perhaps updated, read once or twice."""
    count = random.choice((2, 2, 2, 3, 3, 4)[: 2 * num_tasks - 1])
    used = sorted(random.sample(range(num_tasks), count))
    uses: Uses = {used[0]: ("write", 1)}
    version = 1
    for task in used[1:]:
        updates = task != used[-1] and random.random() < 0.3
        uses[task] = ("update" if updates else "read", version)
        version += updates
    return uses


def _random_agains(random: Random, sorts: Sequence[Sort], num_tasks: int) -> list[Again]:
    """One or two options of one group: the second makes another tensor again as well."""
    once = [s for s in sorts if s.role == "activation" and _makers(s) == 1]
    if not once or random.random() < 0.3:
        return []
    random.shuffle(once)
    first = once[0]
    before = random.randint(min(first.uses) + 1, max(first.uses))
    also = [s for s in once[1:] if min(s.uses) < before <= max(s.uses)]
    durations = (1.0, 3.0, 8.0, 15.0)
    found = [
        Again(
            "again.0", before, (first.name,), _readable(random, sorts, {first.name}, before),
            random.choice(durations),
        )
    ]  # fmt: skip
    if also and random.random() < 0.5:
        makes = (first.name, also[0].name)
        found.append(
            Again(
                "again.1", before, makes, _readable(random, sorts, set(makes), before),
                random.choice(durations),
            )
        )  # fmt: skip
    return found


def _random_scratch(random: Random, sorts: Sequence[Sort], num_tasks: int) -> list[Sort]:
    """Fills the device at some tasks, so that little else stays there meanwhile."""
    grain = gcd(*(sort.units for sort in sorts))
    level = _multiple(sum(sort.units for sort in sorts) * random.uniform(0.9, 1.2), grain)
    found = []
    for task in range(num_tasks):
        room = level - sum(sort.units for sort in sorts if task in sort.uses)
        if room > 0 and random.random() < 0.75:
            units = max(grain, _multiple(room * random.choice((0.6, 1.0, 1.0, 1.0)), grain))
            found.append(Sort(f"scratch{task}", units, "scratch", {task: ("scratch", 0)}))
    return found


def _multiple(amount: float, grain: int) -> int:
    return grain * round(amount / grain)


def _makers(sort: Sort) -> int:
    return sum(mode != "read" for mode, _ in sort.uses.values())


def _readable(
    random: Random, sorts: Sequence[Sort], makes: set[str], before: int
) -> tuple[str, ...]:
    """Sometimes one tensor whose content is alive there anyway."""
    alive = [
        s.name
        for s in sorts
        if s.name not in makes and (s.role == "parameter" or (min(s.uses) < before <= max(s.uses)))
    ]
    return (random.choice(alive),) if alive and random.random() < 0.4 else ()


def _recompute(again: Again, sorts: dict[str, Sort]) -> Recompute:
    operands = [
        TaskOperand(name=name, tensor=name, mode=mode, version=_version_at(sorts[name], again))
        for names, mode in ((again.makes, "write"), (again.reads, "read"))
        for name in names
    ]
    task = Task(
        task_id=again.name, call=again.name, operands=tuple(operands), label=Label(kind="again")
    )
    return Recompute(task=task, before=f"t{again.before}", group="group")


def _version_at(sort: Sort, again: Again) -> int:
    version = 0
    for task, (mode, used) in sorted(sort.uses.items()):
        if task < again.before:
            version = used + (mode == "update")
    return version


def _call(duration_ms: float, hbm_bytes: int) -> KernelCall:
    flops = round(duration_ms * MS * FLOP_PER_NS)
    work = Work(unit="matmul", shape=(1,), flops=flops, hbm_bytes=hbm_bytes, launches=1)
    return KernelCall(kernel="nothing/eager", attributes={}, cost=(work,))


def _rate(bytes_per_ns: float | None) -> Number:
    return number(None if bytes_per_ns is None else bytes_per_ns * 1e9)
