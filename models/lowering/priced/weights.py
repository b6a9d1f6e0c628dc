"""Parameters of a stage through a step: gathered, their gradients reduced, and updated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from twinstream.models.lowering.priced.builder import Buffer, StageBuilder, Use
from twinstream.models.lowering.priced.groups import Group
from twinstream.models.parallel.job import Job
from twinstream.models.spec import ITEMSIZE_BYTES
from twinstream.schedule.cost import Work
from twinstream.schedule.ops import Mode

_PART_BYTES = 2**29  # of optimizer state that are copied and updated together, with offload


@dataclass(eq=False)
class _State:
    """Where a group's tensors are; `parameters` is None while they are not gathered.

    `optimizer` has parts of its state, each with how many parameters it is of.
    """

    group: Group
    index: int | None
    parameters: Buffer | None
    shard: Buffer | None
    gradient: Buffer | None
    gradient_shard: Buffer | None
    optimizer: tuple[tuple[Buffer, int], ...]
    begun: bool = False
    summed: bool = False


class StageWeights:
    """All groups of a stage by name, in the order of the forward pass.

    ZeRO 0 and 1 keep parameters and summed gradients whole, 2 gradients in shards, 3 both; the
    shard of parameters is then the float32 master in the optimizer's state.
    """

    def __init__(self, builder: StageBuilder, job: Job, groups: Mapping[str, Group]) -> None:
        self._b, self._job = builder, job
        self._zero = job.layout.zero
        self._experts = job.shape.experts is not None
        self._states = {name: self._declare(name, group) for name, group in groups.items()}
        self._reduced_last: list[str] = []
        self._pending: tuple[_State, str, str, Buffer] | None = None
        self._unsquared: list[str] = []
        self._squares: Buffer | None = None

    def sharded(self, name: str) -> bool:
        """Whether a group's parameters are gathered for every use."""
        state = self._states[name]
        return self._zero == 3 and state.group.num_shards > 1

    def gather(self, name: str, tag: str) -> None:
        """Gather a group's parameters, if they are in shards."""
        state = self._states[name]
        if not self.sharded(name) or state.parameters is not None:
            return
        shard = state.shard or self._cast(state, name, tag)
        state.parameters = self._b.allocate(
            f"gathered.{state.group.name}", state.group.bytes, "parameter", self._job.dtype, spare=1
        )
        uses: list[Use] = [
            ("shard", shard, "read"),
            ("parameters", state.parameters, "write"),
        ]
        label = self._b.label("gather_parameters", state.index)
        self._b.communicate(
            f"gather.{name}.{tag}", "all_gather", (state.group.axes, "dp.gather"), uses, label
        )
        if state.shard is None:
            self._b.free(shard)

    def _cast(self, state: _State, name: str, tag: str) -> Buffer:
        """A shard in the model's dtype, made of its float32 master for each gathering."""
        group, dtype = state.group, self._job.dtype
        size = group.shard * group.itemsize
        shard = self._b.allocate(f"cast.{group.name}", size, "parameter", dtype, spare=1)
        cast = Work(unit="cast", shape=(group.shard,), flops=0, hbm_bytes=3 * size, launches=1,
                    dtype=dtype)  # fmt: skip
        master: Use = ("optimizer_state", state.optimizer[0][0], "read")
        uses: list[Use] = [master, ("shard", shard, "write")]
        label = self._b.label("cast", state.index)
        self._b.compute(f"cast.{name}.{tag}", f"cast.{group.name}", (cast,), uses, label)
        return shard

    def drop(self, name: str) -> None:
        """Gathered parameters are not needed any more."""
        state = self._states[name]
        if self.sharded(name) and state.parameters is not None:
            self._b.free(state.parameters)
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
            state.gradient = self._b.allocate(
                f"gradient.{state.group.name}", state.group.gradient_bytes, "gradient",
                self._job.gradient_dtype, spare=1,
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
                self._reduced_last.append(name)
                return
        if last and self._job.layout.offload and self._job.recipe.clips:
            self._unsquared.append(name)
            if len(self._unsquared) > 1:  # the newest may still be on its way
                self._square(self._unsquared.pop(0))

    def read_layer(self, layer: int) -> list[Use]:
        """All parameters of a layer."""
        return [self.read(name) for name in self._names(layer)]

    def read_of_layer(self, layer: int, group: Literal["layer", "experts"]) -> Use:
        """The parameters of one group of a layer."""
        return self.read(self._name(layer, group))

    def layer_gradients(self, layer: int) -> list[Use]:
        """All gradients of a layer."""
        return [self.gradient(name) for name in self._names(layer)]

    def gradient_of_layer(self, layer: int, group: Literal["layer", "experts"]) -> Use:
        """The gradient of one group of a layer."""
        return self.gradient(self._name(layer, group))

    def gather_layers(self, layers: Sequence[int], tag: str) -> None:
        """Gather what is in shards."""
        for layer in layers if self._zero == 3 else ():
            for name in self._names(layer):
                self.gather(name, tag)

    def drop_layers(self, layers: Sequence[int]) -> None:
        """What was gathered is not needed any more."""
        for layer in layers if self._zero == 3 else ():
            for name in self._names(layer):
                self.drop(name)

    def after_backward_of_layers(self, layers: Sequence[int], tag: str, *, last: bool) -> None:
        """Reduce gradients, or note that they are complete."""
        for layer in reversed(layers):
            for name in self._names(layer):
                self.after_backward(name, tag, last=last)

    def _names(self, layer: int) -> list[str]:
        return [str(layer), *([f"{layer}.experts"] if self._experts else [])]

    def _name(self, layer: int, group: Literal["layer", "experts"]) -> str:
        return f"{layer}.experts" if group == "experts" else str(layer)

    def finish(self, everyone: tuple[str, ...]) -> None:
        """What was left to the end, the norm of all gradients over all axes, the updates."""
        self._add_pending()
        self._reduce_late()
        clips = self._job.recipe.clips
        norm = self._norm() if clips else None
        if norm is not None and everyone:
            self._b.communicate(
                "reduce_norm", "all_reduce", (everyone, "norm"), [("norm", norm, "update")],
                self._b.label("reduce_norm"),
            )  # fmt: skip
        for name, state in self._states.items():
            self._update(state, name, norm)
        layout = self._job.layout
        if not layout.dp_overlap and self._zero in (1, 2) and not layout.offload:
            self._all_gathered()

    def _reduce_late(self) -> None:
        """No gradient before all of them are complete."""
        uses = [self.gradient(name) for name in self._reduced_last]
        if uses:
            label = self._b.label("gradients_complete")
            self._b.compute("gradients_complete", "gradients_complete", (), uses, label)
        for name in self._reduced_last:
            self._reduce(self._states[name], name)

    def _all_gathered(self) -> None:
        """Nothing of the next step begins before all parameters are there."""
        uses: list[Use] = [
            (f"parameters.{name}", state.parameters, "read")
            for name, state in self._states.items()
            if state.parameters is not None
        ]
        self._b.compute("gathered", "gathered", (), uses, self._b.label("gathered"))

    def _scattered(self, group: Group) -> bool:
        return self._zero >= 2 and group.num_shards > 1 and not self._job.is_own

    def _declare(self, name: str, group: Group) -> _State:
        b, dtype = self._b, self._job.dtype
        gradient_dtype = self._job.gradient_dtype
        split = self._zero >= 1 and group.num_shards > 1
        parameters = shard = gradient = gradient_shard = None
        if self._zero == 3 and split:
            if self._job.layout.offload or not group.has_master:  # or it may be on the host
                size = group.shard * group.itemsize
                shard = b.persist(f"parameter.{name}.shard", size, "parameter", dtype)
        else:
            parameters = b.persist(f"parameter.{name}", group.bytes, "parameter", dtype)
        if self._scattered(group):
            size = group.trained_shard * ITEMSIZE_BYTES[gradient_dtype]
            gradient_shard = b.allocate(f"gradient.{name}", size, "gradient", gradient_dtype)
        else:
            gradient = b.allocate(
                f"gradient.{name}", group.gradient_bytes, "gradient", gradient_dtype
            )
        state = tuple(
            (
                b.persist(
                    f"optimizer.{name}{part}", group.state_of(n), "optimizer_state", "float32"
                ),
                n,
            )
            for part, n in _parts(
                group, group.trained_shard if split else group.num_trained, self._job
            )
        )
        return _State(group, group.layer, parameters, shard, gradient, gradient_shard, state)

    def _scatter(self, state: _State, name: str, tag: str, *, last: bool) -> None:
        b, group = self._b, state.group
        assert state.gradient is not None and state.gradient_shard is not None
        dtype = self._job.gradient_dtype
        once = self._job.num_microbatches == 1
        pool = f"scattered.{group.name}"
        size = group.trained_shard * ITEMSIZE_BYTES[dtype]
        part = state.gradient_shard if once else b.allocate(pool, size, "gradient", dtype, spare=1)
        label = b.label("reduce_gradients", state.index)
        uses: list[Use] = [("gradient", state.gradient, "read"), ("shard", part, "write")]
        b.communicate(f"reduce.{name}.{tag}", "reduce_scatter", (group.axes, "dp"), uses, label)
        b.free(state.gradient)
        state.gradient = None
        self._add_pending()
        if not once:
            self._pending = (state, name, tag, part)
        if last and group.outer:
            self._add_pending()
            b.communicate(
                f"reduce_outer.{name}", "all_reduce", (group.outer, "dp"),
                [("shard", state.gradient_shard, "update")], label,
            )  # fmt: skip

    def _add_pending(self) -> None:
        """Add the shard that was reduced last to its sum: by now the next layer's backward has
        been issued, and ran beside the reduction."""
        if self._pending is None:
            return
        b, (state, name, tag, part) = self._b, self._pending
        self._pending = None
        assert state.gradient_shard is not None
        group, dtype = state.group, self._job.gradient_dtype
        mode: Mode = "update" if state.summed else "write"
        moved = (3 if state.summed else 2) * part.size_bytes
        added = Work(unit="accumulate", shape=(group.trained_shard,), flops=group.trained_shard,
                     hbm_bytes=moved, launches=1, dtype=dtype)  # fmt: skip
        sums: list[Use] = [("part", part, "read"), ("sum", state.gradient_shard, mode)]
        b.compute(f"add.{name}.{tag}", f"add.{group.name}.{mode}", (added,), sums,
                  b.label("accumulate", state.index))  # fmt: skip
        b.free(part)
        state.summed = True

    def _reduce(self, state: _State, name: str) -> None:
        group, b = state.group, self._b
        assert state.gradient is not None
        label = b.label("reduce_gradients", state.index)
        uses: list[Use] = [("gradient", state.gradient, "update")]
        axes = (*group.outer, *group.axes)
        if self._zero == 0 or group.num_shards == 1:
            b.communicate(f"reduce.{name}", "all_reduce", (axes, "dp"), uses, label)
            return
        if not group.outer:
            b.communicate(f"reduce.{name}", "reduce_scatter", (group.axes, "dp"), uses, label)
            return
        dtype = self._job.gradient_dtype
        size = group.trained_shard * group.gradient_itemsize
        shard = state.gradient_shard = b.allocate(f"reduced.{group.name}", size, "gradient", dtype)
        uses = [("gradient", state.gradient, "read"), ("shard", shard, "write")]
        b.communicate(f"reduce.{name}", "reduce_scatter", (group.axes, "dp"), uses, label)
        summed: list[Use] = [("shard", shard, "update")]
        b.communicate(f"reduce_outer.{name}", "all_reduce", (group.outer, "dp"), summed, label)

    def _norm(self) -> Buffer:
        """Over all ranks: clipping needs it, so that no update is before all gradients."""
        b, work = self._b, self._job.work
        norm = b.exchanged("norm", 256, "scratch", "float32", "gradient_norm")
        uses: list[Use] = [("norm", norm, "write")]
        if self._job.layout.offload:
            for name in (*self._unsquared, *self._reduced_last):
                self._square(name)
            works: tuple[Work, ...] = ()
            uses += [] if self._squares is None else [("squares", self._squares, "read")]
        else:
            works = work.gradient_norm(sum(self._owned(s.group) for s in self._states.values()))
            uses += [(f"gradient.{n}", self._summed(s), "read") for n, s in self._states.items()]
        b.compute("gradient_norm", "gradient_norm", works, uses, b.label("gradient_norm"))
        return norm

    def _square(self, name: str) -> None:
        """Add up a group's squares while its gradient is on the device."""
        b, state = self._b, self._states[name]
        mode: Mode = "write" if self._squares is None else "update"
        if self._squares is None:
            self._squares = b.exchanged("squares", 256, "scratch", "float32", "squares")
        count = self._owned(state.group)
        works = self._job.work.gradient_norm(count)
        uses: list[Use] = [
            ("squares", self._squares, mode),
            ("gradient", self._summed(state), "read"),
        ]
        b.compute(
            f"squares.{name}", f"squares.{count}", works, uses, b.label("squares", state.index)
        )

    def _owned(self, group: Group) -> int:
        return group.trained_shard if self._zero else group.num_trained

    def _summed(self, state: _State) -> Buffer:
        found = state.gradient if state.gradient_shard is None else state.gradient_shard
        assert found is not None
        return found

    def _update(self, state: _State, name: str, norm: Buffer | None) -> None:
        b, group = self._b, state.group
        target = state.shard or state.parameters  # or the master alone, which is in the state
        for number, (held, count) in enumerate(state.optimizer):
            uses: list[Use] = [] if norm is None else [("norm", norm, "read")]
            uses += [
                ("gradient", self._summed(state), "read"),
                ("optimizer_state", held, "update"),
            ]
            if target is not None:
                uses.append(("parameters", target, "update"))
            tag = f"{name}.part{number}" if len(state.optimizer) > 1 else name
            works, label = self._job.work.optimizer(count), b.label("optimizer", state.index)
            b.compute(f"update.{tag}", f"update.{group.name}.{count}", works, uses, label)
        if self._zero in (1, 2) and group.num_shards > 1 and target is not None:
            b.communicate(
                f"gather.{name}", "all_gather", (group.axes, "dp.gather"),
                [("parameters", target, "update")], b.label("gather_parameters", state.index),
            )  # fmt: skip


def _parts(group: Group, count: int, job: Job) -> list[tuple[str, int]]:
    """Name and number of parameters of each part of a group's optimizer state.

    It is one part, or with offload several: so that one is updated while others are copied.
    """
    num_parts = -(-group.state_of(count) // _PART_BYTES) if job.layout.offload else 1
    if num_parts <= 1:
        return [("", count)]
    each, more = divmod(count, num_parts)
    return [(f".part{part}", each + (part < more)) for part in range(num_parts)]
