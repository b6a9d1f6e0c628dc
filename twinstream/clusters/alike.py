"""A pipeline of one forward, one backward (1f1b) from a few of its stages and microbatches.

Stages that have as many layers do the same, and so do microbatches but the first and last of a
kind. Each role of a stage is lowered with few of them; which block of those every other one is like
makes its program.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import stages_of
from twinstream.models.lowering.lower import lower
from twinstream.models.lowering.parts.groups import mesh_of
from twinstream.planner.emit.task_ops import resident_schedule
from twinstream.planner.planner import gc_paused
from twinstream.schedule.analysis.idle import ExposedTime, cause_of
from twinstream.schedule.analysis.occupancy import slot_bytes_by_role
from twinstream.schedule.document import Caps, Exchange, RankClass, RankSchedule, Schedule, Side
from twinstream.schedule.ops import Communicate, Compute, Op
from twinstream.schedule.workload import MachineRef
from twinstream.simulator.blocks import (
    COMPUTE,
    Block,
    BlockOp,
    Interned,
    IrregularError,
    StageMeeting,
    StageProgram,
)
from twinstream.simulator.costs import CostModel
from twinstream.simulator.engine import OpPrice
from twinstream.simulator.network_costs import ClusterCosts
from twinstream.simulator.pipeline import PipelineRun
from twinstream.simulator.pipeline_idle import IdleTimes, idle_times
from twinstream.simulator.states import KnownStates, States

_FEW = 4  # microbatches of a kind that are lowered where there are more
_SLOTS = 2  # of a message's pool that take turns
_SAME = 2  # blocks at the beginning of a pass that are lowered as they are
_NEAR_END = -3  # blocks from the end of a pass that are, too
_LEAST_LAYER_PASSES = 600  # of a step that has fewer, all ops are simulated in as little time
_TIED = "tied_gradients"  # what tasks of their copies are called
_REF = MachineRef(name="", content_hash="")
Kind = Literal["first", "middle", "last"]
_Op = Compute | Communicate


def is_alike(job: Job) -> bool:
    """Whether a job's stages are taken to be alike, and it is worth it."""
    layout = job.layout
    passes = job.num_microbatches * job.shape.num_layers
    return (
        layout.pipeline == "1f1b"
        and layout.pp > _SAME
        and layout.cp == 1
        and layout.zero <= 1
        and not layout.offload
        and not job.is_own
        and len(job.shape.layer_kinds) == 1
        and passes >= _LEAST_LAYER_PASSES
        and min(map(len, stages_of(layout, job.shape.num_layers))) > 0
    )


@dataclass(frozen=True)
class Role:
    """What stages are alike by.

    Fields:
        kind, layers: where they are, and how many layers they have.
        ahead, pairs: microbatches whose forward is ahead of all backward, and those after that.
        turns: after how many microbatches the same ops wait for slots of the pass before.
    """

    kind: Kind
    layers: int
    ahead: int
    pairs: int
    turns: int

    @classmethod
    def of(cls, job: Job, stage: int, turns: int) -> "Role":
        """Of a stage of a job."""
        pp, count = job.layout.pp, job.num_microbatches
        layers = len(stages_of(job.layout, job.shape.num_layers)[stage])
        ahead = min(pp - 1 - stage, count)
        kind: Kind = "first" if stage == 0 else "last" if stage == pp - 1 else "middle"
        return cls(kind, layers, ahead, count - ahead, turns)

    @property
    def few(self) -> "Role":
        """The same with as few microbatches as have all that differ."""
        ahead, pairs = _few(self.ahead, self.turns), _few(self.pairs, self.turns)
        return replace(self, ahead=ahead, pairs=pairs)

    @property
    def num_blocks(self) -> int:
        """Of a pass: with none ahead a microbatch's forward and backward are one."""
        return 2 * (self.ahead + self.pairs) if self.ahead else self.pairs

    def lowered(self, job: Job) -> RankSchedule:
        """What it does, with stages beside it that have as many layers."""
        beside, stage = {"first": (1, 0), "middle": (2, 1), "last": (2, 1)}[self.kind]
        stages = (self.layers,) * (self.ahead + beside)
        layout = job.layout.model_copy(update={"pp": len(stages), "stage_layers": stages})
        shape = job.shape.model_copy(update={"num_layers": sum(stages)})
        batch = (self.ahead + self.pairs) * layout.dp * layout.micro_batch
        few = job.model_copy(update={"layout": layout, "shape": shape, "global_batch": batch})
        chain = lower(shape, few.workload, few.recipe, layout, stage)
        return resident_schedule(chain, _REF, Caps())

    def places(self) -> list[int]:
        """Of every block that of `few` which it is like."""
        few = self.few
        if not self.ahead:
            return list(_stretched(0, few.pairs, self.pairs, last=1))
        found = list(_stretched(0, few.ahead, self.ahead, last=1))
        for pair in _stretched(0, few.pairs, self.pairs, last=0):
            found += [few.ahead + 2 * pair, few.ahead + 2 * pair + 1]
        return found + list(_stretched(few.ahead + 2 * few.pairs, few.ahead, self.ahead, last=1))


def _few(count: int, turns: int) -> int:
    return count if count < _FEW else _FEW + (count - _FEW) % turns


def _stretched(start: int, few: int, count: int, *, last: int) -> Iterator[int]:
    """Places of `few` for so many: the first and last stay, the one behind the first repeats."""
    for at in range(count):
        if few == count or at < _SAME:
            yield start + at
        else:
            yield start + (_SAME if at < count - last else few - (count - at))


@dataclass(frozen=True)
class SteadyPace:
    """What so many further microbatches take, and where that goes in every stage."""

    microbatches: int
    period_ns: int
    exposed: tuple[ExposedTime, ...]


class AlikePipeline:
    """A job's stages, lowered role by role.

    Args:
        lowered: roles of other numbers of microbatches, which are known already.
    """

    def __init__(self, job: Job, ranks_per_node: int, lowered: dict[Role, RankSchedule]) -> None:
        job = job.with_megatron_kernels()
        self._job, self._lowered = job, lowered
        for turns in (1, _SLOTS):
            self.roles = [Role.of(job, stage, turns) for stage in range(job.layout.pp)]
            few = dict.fromkeys(role.few for role in self.roles)
            self.parts = {role: self._part(role) for role in few}
            if not any(_waits_for_slots(part) for part in self.parts.values()):
                break
        names = {role: f"role {number}" for number, role in enumerate(self.parts)}
        self.document = Schedule.model_construct(
            schema_version=1, mesh=mesh_of(job, ranks_per_node), order=(),
            classes=tuple(
                RankClass(name=f"stage {stage}", schedule=names[role.few], cells={"pp": (stage,)})
                for stage, role in enumerate(self.roles)
            ),
            schedules={names[role]: part for role, part in self.parts.items()},
            model={}, layout={"tp_overlap": job.layout.tp_overlap}, seq_len=job.seq_len,
            global_batch=job.global_batch, model_flops=0, machine=_REF,
        )  # fmt: skip

    def _part(self, role: Role) -> RankSchedule:
        if role not in self._lowered:
            with gc_paused(cycles=False):
                self._lowered[role] = role.lowered(self._job)
        return self._lowered[role]

    def stage_bytes(self) -> list[dict[str, int]]:
        """Return bytes of slots by role of tensors, of every stage.

        What is kept grows by as much with every microbatch that is ahead.
        """
        few = {role: slot_bytes_by_role(part) for role, part in self.parts.items()}
        found = []
        for role in self.roles:
            sizes, further = few[role.few], role.ahead - role.few.ahead
            if further:
                other = replace(role.few, ahead=_FEW - 1)
                if other not in few:
                    few[other] = slot_bytes_by_role(self._part(other))
                step, less = role.few.ahead - other.ahead, few[other]
                sizes = {
                    name: size + (size - less[name]) * further // step
                    for name, size in sizes.items()
                }
            found.append(sizes)
        return found

    def timed(
        self, cluster: Cluster, machine: Machine, known: KnownStates
    ) -> tuple[int, tuple[ExposedTime, ...], SteadyPace | None]:
        """Return how long the second of two steps takes, ns, where it goes in every stage, and
        what repeats in it.

        Args:
            known: states of other pipelines; those of this one are added.

        Raises:
            IrregularError: stages are not so alike.
            MissingNumberError, MissingNetworkNumberError: a profile lacks a number.
        """
        costs = ClusterCosts(self.document, cluster, machine)
        with gc_paused(cycles=False):
            capacity = tuple(costs.rank(0).capacity.values())
            states = known.setdefault(capacity, States(Interned(capacity)))
            made = _Programs(self, costs, states.interned)
            run = PipelineRun(states, made.stages, made.meetings)
            first_ns, second_ns = run.pass_ends_ns()
            step, again = idle_times(made.stages, run.log, run.repetition, states.released)
        pace = None
        if (repeats := run.repetition) is not None:  # a microbatch is one block of the last stage
            turns = self.roles[0].turns  # a microbatch more may wait for another slot
            exposed = tuple([one.with_further(one, turns - 1) for one in self._exposed(again)])
            pace = SteadyPace(turns * repeats.blocks[-1], turns * repeats.period_ns, exposed)
        return second_ns - first_ns, self._exposed(step), pace

    def _exposed(self, idle: Sequence[IdleTimes]) -> tuple[ExposedTime, ...]:
        ranks = self._job.layout.num_gpus // self._job.layout.pp
        return tuple(
            ExposedTime(
                name=f"stage {stage}", num_ranks=ranks, step_ns=one.took_ns,
                compute_ns=one.took_ns - sum(one.causes_ns.values()), causes_ns=one.causes_ns,
            )
            for stage, one in enumerate(idle)
        )  # fmt: skip


def _ops_of(part: RankSchedule) -> list[_Op]:
    """All of its ops: with everything on the device there are no others."""
    return [op for op in part.ops if isinstance(op, Compute | Communicate)]


def _blocks_of(part: RankSchedule) -> list[list[_Op]]:
    """Ops that follow one another of a microbatch and direction; what is of none goes with them."""
    blocks: list[list[_Op]] = []
    last: int | None = None
    for op in _ops_of(part):
        if not blocks or op.label.round not in (None, last):
            blocks.append([])
            last = op.label.round
        blocks[-1].append(op)
    return blocks


def _waits_for_slots(part: RankSchedule) -> bool:
    """Whether ops wait for nothing but messages of the pass before, whose slots they take: which
    ones do depends on how many microbatches there are. Tied embeddings have one slot."""
    sent = {op.op_id for op in part.ops if _meets_stages(op)}
    alone = [op for op in _ops_of(part) if not op.waits and op.label.kind != _TIED]
    return any(op.op_id not in sent and not sent.isdisjoint(op.waits_previous) for op in alone)


def _meets_stages(op: Op) -> bool:
    return isinstance(op, Communicate) and "pp" in op.axes


class _Programs:
    """Programs of all stages, and where they meet."""

    def __init__(self, pipeline: AlikePipeline, costs: ClusterCosts, interned: Interned) -> None:
        self._roles, self._costs, self._interned = pipeline.roles, costs, interned
        self._names = [one.name for one in pipeline.document.classes]
        self._resources = {name: at for at, name in enumerate(costs.rank(0).capacity)}
        parts = pipeline.parts
        queues = sorted({op.stream.queue for part in parts.values() for op in part.ops})
        queues.remove("compute")
        self._streams = {"compute": COMPUTE} | {name: at for at, name in enumerate(queues, 1)}
        self._meeting_ops: dict[Role, dict[str, Communicate]] = {
            role: _first_by_queue(part.ops) for role, part in parts.items()
        }
        self._between = {self._streams[q] for one in self._meeting_ops.values() for q in one}
        self._met: dict[tuple[tuple[int, int], ...], int] = {}
        self.meetings: list[StageMeeting] = []
        known: dict[Role, tuple[list[Block], list[Block]]] = {}
        self.stages: list[StageProgram] = []
        for stage, role in enumerate(self._roles):
            few = role.few
            if few not in known:
                blocks = _blocks_of(parts[few])
                if len(blocks) != few.num_blocks:
                    raise IrregularError
                known[few] = self._passes(blocks, stage)
            meets = {
                self._streams[queue]: self._meeting(stage, op)
                for queue, op in self._meeting_ops[few].items()
            }
            places = role.places()
            found = [one[at] for one in known[few] for at in places]
            self.stages.append(StageProgram(found, meets))

    def _meeting(self, stage: int, op: Communicate) -> int:
        """The number of the exchanges of a stage's queue."""
        queue, pp = op.stream.queue, len(self._roles)
        sides = [(one, queue) for one in range(pp)]
        if op.shift:
            way, end = queue.split(".")
            ways, ends = {"send": "recv", "recv": "send"}, {"next": "prev", "prev": "next"}
            sides = sorted([(stage, queue), ((stage + op.shift) % pp, f"{ways[way]}.{ends[end]}")])
        key = tuple([(one, self._streams[name]) for one, name in sides])
        if key not in self._met:
            self._met[key] = len(self.meetings)
            ops = [self._meeting_ops[self._roles[one].few][name].op_id for one, name in sides]
            price = self._exchanged(
                [(self._names[s], o) for (s, _), o in zip(sides, ops, strict=True)]
            )
            self.meetings.append(StageMeeting(key, price))
        return self._met[key]

    def _exchanged(self, sides: Sequence[Side]) -> OpPrice:
        cost, each = self._costs.exchange(Exchange.made(sides=tuple(sides))), len(self._resources)
        amounts: dict[int, float] = {}
        for side, drawn in enumerate(cost.sides):
            for resource, amount in drawn:
                number = side * each + self._resources[resource]
                amounts[number] = amounts.get(number, 0.0) + amount
        return self._interned.price(cost.fixed_ns, cost.alone_ns, amounts)

    def _passes(self, cut: list[list[_Op]], stage: int) -> tuple[list[Block], list[Block]]:
        """Blocks of the first pass, and of later ones."""
        where: dict[str, tuple[int, int, int]] = {}
        for at, ops in enumerate(cut):
            counts = dict.fromkeys(self._streams.values(), 0)
            for op in ops:
                stream = self._streams[op.stream.queue]
                where[op.op_id] = at, stream, counts[stream]
                counts[stream] += 1
        rank = self._costs.rank(stage)
        prices = {op.op_id: self._price(op, rank, stage) for ops in cut for op in ops}
        found: tuple[list[Block], list[Block]] = [], []
        for later, blocks in enumerate(found):
            for at, ops in enumerate(cut):
                streams: list[list[BlockOp]] = [[] for _ in self._streams]
                for op in ops:
                    before = op.waits_previous if later else ()
                    waits = [(b - at, s, n) for b, s, n in map(where.__getitem__, op.waits)]
                    if not _meets_stages(op):
                        ends = [(b - len(cut), s, n) for b, s, n in map(where.__getitem__, before)]
                        waits += self._still_open(at, ends)
                    delay_ns = rank.wait_ns if op.waits or before else 0
                    made = BlockOp(prices[op.op_id], tuple(waits), delay_ns, cause_of(op))
                    streams[self._streams[op.stream.queue]].append(made)
                told = tuple([tuple(one) for one in streams])
                blocks.append(self._interned.block(told, ends_pass=at == len(cut) - 1))
        return found

    def _still_open(
        self, at: int, ends: Iterable[tuple[int, int, int]]
    ) -> Iterator[tuple[int, int, int]]:
        """Waits for the pass before that may still be open in a block.

        Messages of the pass before are over by then: a stage begins with a pass once the next one
        has begun with the end of the last. Nor does a message wait for its slot then: the other
        stage is through with the pass before later than that.
        """
        for back, stream, place in ends:
            if at < _SAME and (back >= _NEAR_END or stream not in self._between):
                yield back - at, stream, place
            elif stream not in self._between and stream != COMPUTE:
                raise IrregularError

    def _price(self, op: Op, rank: CostModel, stage: int) -> OpPrice | None:
        if _meets_stages(op):
            return None
        if isinstance(op, Communicate):
            return self._exchanged([(self._names[stage], op.op_id)])
        cost = rank.cost(op)
        if cost.flow is None:
            return self._interned.price(cost.fixed_ns, 0.0, {})
        amounts = {self._resources[name]: amount for name, amount in cost.flow.amounts}
        return self._interned.price(cost.fixed_ns, cost.flow.alone_ns, amounts)


def _first_by_queue(ops: Iterable[Op]) -> dict[str, Communicate]:
    """Of every queue whose ops meet those of other stages the first."""
    found: dict[str, Communicate] = {}
    for op in ops:
        if isinstance(op, Communicate) and _meets_stages(op):
            found.setdefault(op.stream.queue, op)
    return found
