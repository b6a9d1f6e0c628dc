"""A training step as vTrain (arXiv:2312.12391) has it: a cluster's schedule and every op's time.

Read from src/predictor.py of VIA-Research/vTrain at f8dda84, where a stage stands for all its
ranks and runs one thing at a time:

- 1F1B; the table is the same with all forwards first.
- Two tp all-reduces follow every layer, forward and backward, and overlap nothing.
- A message holds its sender and costs its receiver nothing: twice the activations at a quarter of
  800 Gbit/s, also inside a node.
- When the last backward is through, each stage all-reduces its gradients over dp, in one piece.
  When all stages are through, each updates its weights.

vTrain's own configurations recompute on all stages but the last. The published table is without:
with it, a forward of a third of a layer's time misses a quarter of the pipelines' rows, by up to
22 %.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tests.helpers.fixed_costs import FixedCosts
from tests.helpers.sketches import CALL, sketch
from tests.simulator.cluster.vtrain_tables import BYTES, SEQ_LEN, Row, VtrainTimes
from twinstream.schedule.document import Axis, Exchange, Mesh, RankClass, Schedule, Side
from twinstream.schedule.ops import (
    Communicate,
    Compute,
    KernelCall,
    Label,
    Mode,
    Op,
    Operand,
    Stream,
)
from twinstream.schedule.workload import MachineRef
from twinstream.simulator.network_costs import ExchangeCost

VOCABULARY = 50257
MESSAGE_BYTES_PER_S = 25 * 2**30
LABEL = Label(kind="vtrain")
Direction = Literal["forward", "backward"]


class Part(NamedTuple):
    """A stretch of a stage's pass: what is computed, and the tp all-reduces after it."""

    name: str
    compute_ns: int
    reduce_ns: tuple[int, ...]


class Channel(NamedTuple):
    """What kind of communication, along which axis, on which queue."""

    collective: Literal["all_reduce", "send", "recv"]
    axis: str
    queue: str
    shift: int = 0


class Durations:
    """A cost model of given times: computes by (class, call), exchanges by their first side."""

    def __init__(self) -> None:
        self.computes: dict[tuple[int, str], int] = {}
        self.exchanges: dict[Side, int] = {}

    def rank(self, number: int) -> FixedCosts:
        return FixedCosts(lambda op: self.computes[number, op.call])

    def exchange(self, exchange: Exchange) -> ExchangeCost:
        return ExchangeCost(self.exchanges[exchange.sides[0]], 0.0)


@dataclass(frozen=True)
class VtrainStep:
    """Makes the schedule of a row.

    Args:
        forward_share: of a layer's time, the forward's: the table does not tell it, nor needs it.
        layer_by_layer: one op for each layer and all-reduce, instead of one for a stage's.
    """

    row: Row
    times: VtrainTimes
    forward_share: float = 1 / 3
    layer_by_layer: bool = False

    def build(self) -> tuple[Schedule, Durations]:
        issue = _Issue(self.row.pp)
        self._passes(issue)
        self._finish(issue)
        return issue.document(self.row), issue.durations

    def _passes(self, issue: "_Issue") -> None:
        """All micro-batches of all stages, each op when what it waits for is issued."""
        row = self.row
        left = [self._one_f_one_b(stage) for stage in range(row.pp)]
        while any(left):
            for stage, todo in enumerate(left):
                while todo and issue.has_arrived(stage, *todo[0]):
                    direction, number = todo.pop(0)
                    issue.pass_of(stage, direction, number, self._parts(stage, direction))
                    to = stage + (1 if direction == "forward" else -1)
                    if 0 <= to < row.pp:
                        issue.message(stage, to, direction, number, self._message_ns())

    def _one_f_one_b(self, stage: int) -> list[tuple[Direction, int]]:
        count = self.row.num_micro_batches
        ahead = min(self.row.pp - 1 - stage, count)
        found: list[tuple[Direction, int]] = [("forward", i) for i in range(ahead)]
        for number in range(count):
            if ahead + number < count:
                found.append(("forward", ahead + number))
            found.append(("backward", number))
        return found

    def _finish(self, issue: "_Issue") -> None:
        row = self.row
        if row.dp > 1:
            issue.barrier("last_backward")
            for stage in range(row.pp):
                time_ns = self.times.all_reduce_ns(self._gradient_bytes(stage), row.dp)
                issue.collective("dp", {stage: "gradients"}, time_ns)
        issue.barrier("gradients_summed")
        times = self.times.layers(row)
        for stage in range(row.pp):
            update_ns = row.layers_of_a_stage * times.layer_update_ns
            update_ns += times.embedding_update_ns if stage == 0 else 0
            update_ns += times.head_update_ns if stage == row.pp - 1 else 0
            issue.compute(stage, "update", "update", update_ns)

    def _parts(self, stage: int, direction: Direction) -> list[Part]:
        row, times = self.row, self.times.layers(self.row)
        reduce_ns = self.times.all_reduce_ns(row.activation_bytes, row.tp) if row.tp > 1 else 0
        layer = Part("layer", self._share(times.layer_ns, direction), (reduce_ns,) * 2)
        parts = [layer] * row.layers_of_a_stage
        if stage == 0:
            parts.insert(0, Part("embedding", self._share(times.embedding_ns, direction), ()))
        if stage == row.pp - 1:
            parts.append(Part("head", self._share(times.head_ns, direction), ()))
        if not self.layer_by_layer:
            sums = [sum(part.reduce_ns) for part in parts]
            return [Part("stage", sum(part.compute_ns for part in parts), (sum(sums),))]
        return parts if direction == "forward" else parts[::-1]

    def _share(self, time_ns: int, direction: Direction) -> int:
        forward_ns = int(time_ns * self.forward_share)
        return forward_ns if direction == "forward" else time_ns - forward_ns

    def _message_ns(self) -> int:
        return round(2 * self.row.activation_bytes / MESSAGE_BYTES_PER_S * 1e9)

    def _gradient_bytes(self, stage: int) -> int:
        hidden, tp = self.row.hidden, self.row.tp
        layer = 12 * hidden * hidden // tp + 7 * hidden // tp + 6 * hidden
        words = VOCABULARY // tp * hidden  # embedding and head each have their own
        count = self.row.layers_of_a_stage * layer
        count += words + SEQ_LEN * hidden if stage == 0 else 0
        count += words if stage == self.row.pp - 1 else 0
        return count * BYTES


class _Issue:
    """Ops of all stages as they are issued; a stage's computes and collectives form one chain."""

    def __init__(self, num_stages: int) -> None:
        self.durations = Durations()
        self._stages = range(num_stages)
        self._ops: list[list[Op]] = [[] for _ in self._stages]
        self._order: list[Exchange] = []
        self._last: list[Op | None] = [None for _ in self._stages]
        self._arrived: dict[tuple[int, Direction, int], str] = {}
        self._sequence: Counter[tuple[int, Channel]] = Counter()

    def has_arrived(self, stage: int, direction: Direction, number: int) -> bool:
        first = 0 if direction == "forward" else self._stages[-1]
        return stage == first or (stage, direction, number) in self._arrived

    def pass_of(self, stage: int, direction: Direction, number: int, parts: list[Part]) -> None:
        for place, part in enumerate(parts):
            name = f"{direction}.{number}.{place}"
            got = self._arrived.get((stage, direction, number)) if place == 0 else None
            self.compute(stage, name, f"{direction}.{part.name}", part.compute_ns, got)
            for turn, time_ns in enumerate(part.reduce_ns):
                if time_ns:
                    self.collective("tp", {stage: f"{name}.reduce.{turn}"}, time_ns)

    def compute(
        self, stage: int, op_id: str, call: str, time_ns: int, got: str | None = None
    ) -> None:
        assert self.durations.computes.setdefault((stage, call), time_ns) == time_ns
        waits = self._after_last(stage, "compute") + ((got,) if got else ())
        op = Compute(
            op_id=op_id, stream=Stream(queue="compute"), waits=waits, task=op_id, call=call,
            operands=(), label=LABEL,
        )  # fmt: skip
        self._ops[stage].append(op)
        self._last[stage] = op

    def collective(self, axis: str, op_ids: Mapping[int, str], time_ns: int) -> None:
        """An all-reduce along an axis, of these stages."""
        for stage, op_id in op_ids.items():
            waits = self._after_last(stage, axis)
            channel = Channel("all_reduce", axis, queue=axis)
            self._last[stage] = self._communicate(stage, op_id, channel, waits)
        self._exchange(op_ids, time_ns)

    def barrier(self, name: str) -> None:
        if len(self._stages) > 1:
            self.collective("pp", dict.fromkeys(self._stages, name), 0)

    def message(self, stage: int, to: int, direction: Direction, number: int, time_ns: int) -> None:
        """The sender goes on when it is through; the receiver has a queue for each direction."""
        sent, got = f"send.{direction}.{number}", f"receive.{direction}.{number}"
        sends = Channel("send", "pp", "send", to - stage)
        receives = Channel("recv", "pp", f"receive.{direction}", stage - to)
        waits = self._after_last(stage, sends.queue)
        self._last[stage] = self._communicate(stage, sent, sends, waits)
        self._communicate(to, got, receives, ())
        self._arrived[to, direction, number] = got
        self._exchange({stage: sent, to: got}, time_ns)

    def _after_last(self, stage: int, queue: str) -> tuple[str, ...]:
        last = self._last[stage]
        return (last.op_id,) if last is not None and last.stream.queue != queue else ()

    def _communicate(
        self, stage: int, op_id: str, channel: Channel, waits: tuple[str, ...]
    ) -> Communicate:
        mode: Mapping[str, Mode] = {"send": "read", "recv": "write"}
        operand = Operand(
            name="x", tensor="x", version=0, slot="device.x",
            mode=mode.get(channel.collective, "update"),
        )  # fmt: skip
        op = Communicate(
            op_id=op_id, stream=Stream(queue=channel.queue), waits=waits,
            collective=channel.collective, axes=(channel.axis,), shift=channel.shift,
            sequence=self._sequence[stage, channel], operands=(operand,), label=LABEL,
        )  # fmt: skip
        self._sequence[stage, channel] += 1
        self._ops[stage].append(op)
        return op

    def _exchange(self, op_ids: Mapping[int, str], time_ns: int) -> None:
        sides = tuple((f"stage{stage}", op_id) for stage, op_id in op_ids.items())
        self._order.append(Exchange(sides=sides))
        self.durations.exchanges[sides[0]] = time_ns

    def document(self, row: Row) -> Schedule:
        names = [f"stage{stage}" for stage in self._stages]
        sizes = {"pp": row.pp, "dp": row.dp, "tp": row.tp}
        return Schedule(
            mesh=Mesh(
                axes=tuple(Axis(name=name, size=size) for name, size in sizes.items()),
                ranks_per_node=8,
            ),
            classes=tuple(
                RankClass(name=name, schedule=name, cells={"pp": (stage,)})
                for stage, name in enumerate(names)
            ),
            schedules={
                name: sketch(self._ops[stage], calls=self._calls(stage))
                for stage, name in enumerate(names)
            },
            order=tuple(self._order),
            model={"hidden": row.hidden, "num_layers": row.num_layers},
            layout=dict(sizes),
            seq_len=SEQ_LEN,
            global_batch=row.global_batch,
            model_flops=1,
            machine=MachineRef(name="vtrain", content_hash="0"),
        )

    def _calls(self, stage: int) -> dict[str, KernelCall]:
        return {call: CALL for at, call in self.durations.computes if at == stage}
