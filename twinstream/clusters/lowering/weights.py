"""Parameters of a stage through a step: gathered, their gradients reduced, and updated."""

from collections.abc import Mapping
from dataclasses import dataclass

from twinstream.clusters.job import Job
from twinstream.clusters.lowering.builder import Held, StageBuilder, Use
from twinstream.clusters.lowering.groups import Group
from twinstream.models.spec import ITEMSIZE_BYTES
from twinstream.schedule.cost import Work


@dataclass(eq=False)
class _State:
    """Where a group's tensors are; `parameters` is None while they are not gathered."""

    group: Group
    index: int | None
    parameters: Held | None
    shard: Held | None
    gradient: Held | None
    gradient_shard: Held | None
    optimizer: Held
    begun: bool = False
    summed: bool = False


class StageWeights:
    """All groups of a stage by name, in the order of the forward pass.

    ZeRO 0 and 1 keep parameters and summed gradients whole, 2 gradients in shards, 3 both.
    """

    def __init__(self, builder: StageBuilder, job: Job, groups: Mapping[str, Group]) -> None:
        self._b, self._job = builder, job
        self._zero = job.layout.zero
        self._states = {name: self._declare(name, group) for name, group in groups.items()}
        self._late: list[str] = []

    def sharded(self, name: str) -> bool:
        """Whether a group's parameters are gathered for every use."""
        state = self._states[name]
        return self._zero == 3 and state.group.num_shards > 1

    def gather(self, name: str, tag: str) -> None:
        """Gather a group's parameters, if they are in shards."""
        state = self._states[name]
        if not self.sharded(name) or state.parameters is not None:
            return
        assert state.shard is not None
        state.parameters = self._b.take(
            f"gathered.{state.group.name}", state.group.bytes, "parameter", self._job.dtype, spare=1
        )
        uses: list[Use] = [
            ("shard", state.shard, "read"),
            ("parameters", state.parameters, "write"),
        ]
        label = self._b.label("gather_parameters", state.index)
        self._b.communicate(
            f"gather.{name}.{tag}", "all_gather", state.group.axes, "dp.gather", uses, label
        )

    def drop(self, name: str) -> None:
        """Gathered parameters are not needed any more."""
        state = self._states[name]
        if self.sharded(name) and state.parameters is not None:
            self._b.give_back(f"gathered.{state.group.name}", state.parameters)
            state.parameters = None

    def read(self, name: str) -> Use:
        """The parameters, as an operand."""
        found = self._states[name].parameters
        assert found is not None, f"{name} is not gathered"
        return (f"parameters.{name}", found, "read")

    def gradient(self, name: str) -> Use:
        """The gradient that a backward pass adds to, as an operand."""
        state = self._states[name]
        if state.gradient is None:
            state.gradient = self._b.take(
                f"gradient.{state.group.name}", state.group.gradient_bytes, "gradient",
                self._job.layout.gradient_dtype, spare=1,
            )  # fmt: skip
            state.begun = False
        mode = "update" if state.begun else "write"
        state.begun = True
        return (f"gradient.{name}", state.gradient, mode)  # type: ignore[return-value]

    def after_backward(self, name: str, tag: str, *, last: bool) -> None:
        """Reduce a group's gradient of a microbatch, or note that it is complete."""
        state = self._states[name]
        group = state.group
        if self._scattered(group):
            self._scatter(state, name, tag, last=last)
        elif last and (group.num_shards > 1 or group.outer):
            if self._job.layout.dp_overlap:
                self._reduce(state, name)
            else:
                self._late.append(name)

    def finish(self, everyone: tuple[str, ...]) -> None:
        """What was left to the end, the norm of all gradients over all axes, the updates."""
        for name in self._late:
            self._reduce(self._states[name], name)
        norm = self._norm()
        if everyone:
            self._b.communicate(
                "reduce_norm", "all_reduce", everyone, "norm", [("norm", norm, "update")],
                self._b.label("reduce_norm"),
            )  # fmt: skip
        for name, state in self._states.items():
            self._update(state, name, norm)
        if not self._job.layout.dp_overlap and self._zero in (1, 2):
            self._all_gathered()

    def _all_gathered(self) -> None:
        """Nothing of the next step begins before all parameters are there."""
        uses: list[Use] = [
            (f"parameters.{name}", state.parameters, "read")
            for name, state in self._states.items()
            if state.parameters is not None
        ]
        self._b.compute("gathered", "gathered", (), uses, self._b.label("gathered"))

    def _scattered(self, group: Group) -> bool:
        return self._zero >= 2 and group.num_shards > 1

    def _declare(self, name: str, group: Group) -> _State:
        b, dtype = self._b, self._job.dtype
        gradient_dtype = self._job.layout.gradient_dtype
        split = self._zero >= 1 and group.num_shards > 1
        parameters = shard = gradient = gradient_shard = None
        if self._zero == 3 and split:
            shard_bytes = group.shard * group.itemsize
            shard = b.keep(f"parameter.{name}.shard", shard_bytes, "parameter", dtype)
        else:
            parameters = b.keep(f"parameter.{name}", group.bytes, "parameter", dtype)
        if self._scattered(group):
            size = group.shard * ITEMSIZE_BYTES[gradient_dtype]
            gradient_shard = b.take(f"gradient.{name}", size, "gradient", gradient_dtype)
        else:
            gradient = b.take(f"gradient.{name}", group.gradient_bytes, "gradient", gradient_dtype)
        state = b.keep(f"optimizer.{name}", group.state_bytes(split), "optimizer_state", "float32")
        index = name.partition(".")[0]
        layer = int(index) if index.isdigit() else None
        return _State(group, layer, parameters, shard, gradient, gradient_shard, state)

    def _scatter(self, state: _State, name: str, tag: str, *, last: bool) -> None:
        b, group = self._b, state.group
        assert state.gradient is not None and state.gradient_shard is not None
        dtype = self._job.layout.gradient_dtype
        once = self._job.num_microbatches == 1
        pool = f"scattered.{group.name}"
        size = group.shard * ITEMSIZE_BYTES[dtype]
        part = state.gradient_shard if once else b.take(pool, size, "gradient", dtype, spare=1)
        label = b.label("reduce_gradients", state.index)
        uses: list[Use] = [("gradient", state.gradient, "read"), ("shard", part, "write")]
        b.communicate(f"reduce.{name}.{tag}", "reduce_scatter", group.axes, "dp", uses, label)
        b.give_back(f"gradient.{group.name}", state.gradient)
        state.gradient = None
        if not once:
            mode = "update" if state.summed else "write"
            moved = (3 if state.summed else 2) * size
            added = Work(unit="accumulate", shape=(group.shard,), flops=group.shard,
                         hbm_bytes=moved, launches=1, dtype=dtype)  # fmt: skip
            sums: list[Use] = [("part", part, "read"), ("sum", state.gradient_shard, mode)]  # type: ignore[list-item]
            b.compute(f"add.{name}.{tag}", f"add.{group.name}.{mode}", (added,), sums,
                      b.label("accumulate", state.index))  # fmt: skip
            b.give_back(pool, part)
        state.summed = True
        if last and group.outer:
            b.communicate(
                f"reduce_outer.{name}", "all_reduce", group.outer, "dp",
                [("shard", state.gradient_shard, "update")], label,
            )  # fmt: skip

    def _reduce(self, state: _State, name: str) -> None:
        group, b = state.group, self._b
        assert state.gradient is not None
        label = b.label("reduce_gradients", state.index)
        uses: list[Use] = [("gradient", state.gradient, "update")]
        axes = (*group.outer, *group.axes)
        if self._zero == 0 or group.num_shards == 1:
            b.communicate(f"reduce.{name}", "all_reduce", axes, "dp", uses, label)
            return
        if not group.outer:
            b.communicate(f"reduce.{name}", "reduce_scatter", group.axes, "dp", uses, label)
            return
        dtype = self._job.layout.gradient_dtype
        size = group.shard * group.gradient_itemsize
        shard = state.gradient_shard = b.take(f"reduced.{group.name}", size, "gradient", dtype)
        uses = [("gradient", state.gradient, "read"), ("shard", shard, "write")]
        b.communicate(f"reduce.{name}", "reduce_scatter", group.axes, "dp", uses, label)
        summed: list[Use] = [("shard", shard, "update")]
        b.communicate(f"reduce_outer.{name}", "all_reduce", group.outer, "dp", summed, label)

    def _norm(self) -> Held:
        """Over all ranks: clipping needs it, so that no update is before all gradients."""
        b, work = self._b, self._job.work
        norm = b.take("norm", 256, "scratch", "float32", tensor="gradient_norm")
        count = sum(self._owned(state.group) for state in self._states.values())
        uses: list[Use] = [("norm", norm, "write")]
        uses += [(f"gradient.{name}", self._summed(s), "read") for name, s in self._states.items()]
        works = work.gradient_norm(count)
        b.compute("gradient_norm", "gradient_norm", works, uses, b.label("gradient_norm"))
        return norm

    def _owned(self, group: Group) -> int:
        return group.shard if self._zero else group.num_parameters

    def _summed(self, state: _State) -> Held:
        found = state.gradient if state.gradient_shard is None else state.gradient_shard
        assert found is not None
        return found

    def _update(self, state: _State, name: str, norm: Held) -> None:
        b, group = self._b, state.group
        target = state.shard or state.parameters
        assert target is not None
        uses: list[Use] = [
            ("norm", norm, "read"),
            ("gradient", self._summed(state), "read"),
            ("optimizer_state", state.optimizer, "update"),
            ("parameters", target, "update"),
        ]
        count = group.shard if self._zero and group.num_shards > 1 else group.num_parameters
        works = self._job.work.optimizer(count)
        b.compute(f"update.{name}", f"update.{group.name}.{count}", works, uses,
                  b.label("optimizer", state.index))  # fmt: skip
        if self._zero in (1, 2) and group.num_shards > 1:
            b.communicate(
                f"gather.{name}", "all_gather", group.axes, "dp.gather",
                [("parameters", target, "update")], b.label("gather_parameters", state.index),
            )  # fmt: skip
