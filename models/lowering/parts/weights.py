"""Parameters of a stage through a step: gathered, their gradients reduced, and updated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinstream.models.layout import EXPERTS
from twinstream.models.layouts.job import Job
from twinstream.models.lowering.chain_builder import CollectiveCall, UseMode
from twinstream.models.lowering.group_life import GroupLife
from twinstream.models.lowering.parts.builder import Buffer, StageBuilder, Use
from twinstream.models.lowering.parts.groups import Group, embedding_group
from twinstream.schedule.cost import Work
from twinstream.schedule.ops import Mode

_PART_BYTES = 2**29  # of optimizer state that are copied and updated together, with offload


@dataclass(eq=False)
class _State:
    """Where a group's tensors are; `parameters` is None while they are not gathered.

    `optimizer` has parts of its state, each with how many parameters it is of.
    """

    group: Group
    parameters: Buffer | None
    shard: Buffer | None
    gradient: Buffer | None
    gradient_shard: Buffer | None
    optimizer: tuple[tuple[Buffer, int], ...]
    begun: bool = False
    summed: bool = False


class StageWeights(GroupLife[Use]):
    """All groups of a stage by name, in the order of the forward pass; their work is priced.

    ZeRO 0 and 1 keep parameters and summed gradients whole, 2 gradients in shards, 3 both; the
    shard of parameters is then the float32 master in the optimizer's state. Without overlap nothing
    is reduced before all gradients are complete.
    """

    def __init__(
        self, builder: StageBuilder, job: Job, groups: Mapping[str, Group],
        shared: tuple[str, ...], everyone: tuple[str, ...],
    ) -> None:  # fmt: skip
        super().__init__()
        self.builder: StageBuilder = builder
        self._job, self._everyone = job, everyone
        self.zero, self.clips, self.shared = job.layout.zero, job.recipe.clips, shared
        self.postpones = not job.layout.dp_overlap
        self.behind = 1  # the newest sum may still be on its way
        self._tied = embedding_group(job)
        self._states = {name: self._declare(name, group) for name, group in groups.items()}
        self._pending: tuple[_State, str, str, Buffer] | None = None
        self._squares: Buffer | None = None
        self._norm: Buffer | None = None

    def of(self, layers: Sequence[int]) -> list[str]:
        """Return the names of layers' groups."""
        names = (f"{layer}{suffix}" for layer in layers for suffix in ("", EXPERTS))
        return [name for name in names if name in self._states]

    def gather(self, names: Sequence[str], tag: str) -> None:
        """Gather the parameters of groups that are in shards."""
        for name in names if self.zero == 3 else ():
            state = self._states[name]
            if not state.group.axes or state.parameters is not None:
                continue
            shard = state.shard or self._cast(state, name, tag)
            pool, size = f"gathered.{state.group.name}", state.group.bytes
            whole = self.builder.allocate(pool, size, "parameter", self._job.dtype, spare=1)
            state.parameters = whole
            uses: list[Use] = [("shard", shard, "read"), ("parameters", whole, "write")]
            self._gather(f"{name}.{tag}", name, uses, self._label("gather_parameters", name))
            if state.shard is None:
                self.builder.free(shard)

    def _cast(self, state: _State, name: str, tag: str) -> Buffer:
        """A shard in the model's dtype, made of its float32 master for each gathering."""
        group, dtype = state.group, self._job.dtype
        size = group.shard * group.itemsize
        shard = self.builder.allocate(f"cast.{group.name}", size, "parameter", dtype, spare=1)
        cast = Work(unit="cast", shape=(group.shard,), flops=0, hbm_bytes=3 * size, launches=1,
                    dtype=dtype)  # fmt: skip
        master: Use = ("optimizer_state", state.optimizer[0][0], "read")
        uses: list[Use] = [master, ("shard", shard, "write")]
        label = self._label("cast", name)
        self.builder.compute(f"cast.{name}.{tag}", f"cast.{group.name}", (cast,), uses, label)
        return shard

    def drop(self, names: Sequence[str]) -> None:
        """Give back gathered parameters, which are not needed any more."""
        for name in names if self.zero == 3 else ():
            state = self._states[name]
            if state.group.axes and state.parameters is not None:
                self.builder.free(state.parameters)
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
            state.gradient = self.builder.allocate(
                f"gradient.{state.group.name}", state.group.gradient_bytes, "gradient",
                self._job.gradient_dtype, spare=1,
            )  # fmt: skip
            state.begun = False
        mode: Mode = "update" if state.begun else "write"
        state.begun = True
        return (f"gradient.{name}", state.gradient, mode)

    def finish(self) -> None:
        """Follow the backward pass; without overlap the next step begins with all parameters."""
        super().finish()
        layout = self._job.layout
        if not layout.dp_overlap and self.zero in (1, 2) and not layout.offload:
            uses: list[Use] = [
                (f"parameters.{name}", state.parameters, "read")
                for name, state in self._states.items()
                if state.parameters is not None
            ]
            label = self.builder.label("gathered")
            self.builder.compute("gathered", "gathered", (), uses, label)

    def _axes(self, group: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self._states[group].group.axes, self._states[group].group.outer

    def _layer(self, group: str) -> int | None:
        return self._states[group].group.layer

    def _gradient(self, group: str, mode: UseMode) -> Use:
        held = self._states[group].gradient
        assert held is not None
        return ("gradient", held, mode)

    def _gradient_shard(self, group: str, mode: UseMode) -> Use | None:
        state = self._states[group]
        if state.gradient_shard is None and state.group.outer:
            size, dtype = state.group.gradient_shard_bytes, self._job.gradient_dtype
            pool = f"reduced.{state.group.name}"
            state.gradient_shard = self.builder.allocate(pool, size, "gradient", dtype)
        return None if state.gradient_shard is None else ("shard", state.gradient_shard, mode)

    def _parameters(self, group: str) -> Use:
        held = self._states[group].parameters
        assert held is not None
        return ("parameters", held, "update")

    def _contributed(self, group: str, tag: str, *, last: bool) -> None:
        if not self._scattered(self._states[group].group):
            super()._contributed(group, tag, last=last)
            return
        self._scatter(self._states[group], group, tag, last=last)
        if last:
            self._queue(group)

    def _complete_all(self) -> None:
        self._add_pending()
        uses = [self.gradient(name) for name in self._postponed]
        if uses:
            label = self.builder.label("gradients_complete")
            self.builder.compute("gradients_complete", "gradients_complete", (), uses, label)
        super()._complete_all()
        if self.clips:
            self._norm = self.builder.exchanged("norm", 256, "scratch", "float32", "gradient_norm")

    def _follow(self, group: str) -> None:
        """With offload squares are added up while a gradient is on the device."""
        if self._job.layout.offload and self.clips:
            self._square(group)

    def _updated_last(self) -> Sequence[str]:
        return tuple(self._states)

    def _sum_over_ends(self, group: str) -> None:
        """First and last stage send one another copies of their gradients of the tied embedding."""
        b, first = self.builder, group == "embedding"
        count, size = self._tied.num_parameters, self._tied.gradient_bytes
        dtype, stages = self._job.gradient_dtype, (0, self._job.layout.pp - 1)
        own, other = stages if first else stages[::-1]
        sent = b.exchanged("tied_told", size, "gradient", dtype, f"tied.{own}")
        heard = b.exchanged("tied_heard", size, "gradient", dtype, f"tied.{other}")
        label = b.label("tied_gradients")
        name, held, _ = self.gradient(group)
        copied = Work(unit="copy", shape=(count,), flops=0, hbm_bytes=2 * size, launches=1,
                      dtype=dtype)  # fmt: skip
        uses: list[Use] = [(name, held, "read"), ("told", sent, "write")]
        b.compute("tied_copy", label.kind, (copied,), uses, label)
        shift, end = (-1, "prev") if first else (1, "next")  # around the ends of the pipeline
        sides: list[tuple[str, Use]] = [
            ("send", ("told", sent, "read")), ("recv", ("heard", heard, "write"))
        ]  # fmt: skip
        for collective, use in sides:
            said = CollectiveCall(collective, ("pp",), f"{collective}.{end}", shift)
            b.communicate(f"tied_{collective}", said, [use], label)
        summed = copied.model_copy(update={"unit": "accumulate", "hbm_bytes": 3 * size})
        uses = [("heard", heard, "read"), (name, held, "update")]
        b.compute("tied_add", label.kind, (summed,), uses, label)

    def _scattered(self, group: Group) -> bool:
        return self.zero >= 2 and group.num_shards > 1 and not self._job.is_own

    def _declare(self, name: str, group: Group) -> _State:
        b, dtype, gradient_dtype = self.builder, self._job.dtype, self._job.gradient_dtype
        split = self.zero >= 1 and group.num_shards > 1
        parameters = shard = gradient = gradient_shard = None
        if self.zero < 3 or not split:
            parameters = b.persist(f"parameter.{name}", group.bytes, "parameter", dtype)
        elif self._job.layout.offload or not group.has_master:  # a master may be on the host
            size = group.shard * group.itemsize
            shard = b.persist(f"parameter.{name}.shard", size, "parameter", dtype)
        pool = f"gradient.{name}"
        if self._scattered(group):
            size = group.gradient_shard_bytes
            gradient_shard = b.allocate(pool, size, "gradient", gradient_dtype)
        else:
            gradient = b.allocate(pool, group.gradient_bytes, "gradient", gradient_dtype)
        state = []
        for part, n in _parts(
            group, group.trained_shard if split else group.num_trained, self._job
        ):
            tensor, size = f"optimizer.{name}{part}", group.state_of(n)
            state.append((b.persist(tensor, size, "optimizer_state", "float32"), n))
        return _State(group, parameters, shard, gradient, gradient_shard, tuple(state))

    def _scatter(self, state: _State, name: str, tag: str, *, last: bool) -> None:
        b, group = self.builder, state.group
        assert state.gradient is not None and state.gradient_shard is not None
        dtype = self._job.gradient_dtype
        once = self._job.num_microbatches == 1
        pool = f"scattered.{group.name}"
        size = group.gradient_shard_bytes
        part = state.gradient_shard if once else b.allocate(pool, size, "gradient", dtype, spare=1)
        uses: list[Use] = [self._gradient(name, "read"), ("shard", part, "write")]
        self._sum(f"reduce.{name}.{tag}", name, "reduce_scatter", group.axes, uses)
        b.free(state.gradient)
        state.gradient = None
        self._add_pending()
        if not once:
            self._pending = (state, name, tag, part)
        if last and group.outer:
            self._add_pending()
            self._sum_over_outer(name)

    def _add_pending(self) -> None:
        """Add the shard that was reduced last to its sum: by now the next layer's backward has
        been issued, and ran beside the reduction."""
        if self._pending is None:
            return
        b, (state, name, tag, part) = self.builder, self._pending
        self._pending = None
        assert state.gradient_shard is not None
        group, dtype = state.group, self._job.gradient_dtype
        mode: Mode = "update" if state.summed else "write"
        moved = (3 if state.summed else 2) * part.size_bytes
        added = Work(unit="accumulate", shape=(group.trained_shard,), flops=group.trained_shard,
                     hbm_bytes=moved, launches=1, dtype=dtype)  # fmt: skip
        sums: list[Use] = [("part", part, "read"), ("sum", state.gradient_shard, mode)]
        b.compute(f"add.{name}.{tag}", f"add.{group.name}.{mode}", (added,), sums,
                  self._label("accumulate", name))  # fmt: skip
        b.free(part)
        state.summed = True

    def _take_norm(self) -> None:
        """Clipping needs it over all ranks, so that no update is before all gradients."""
        b, work, norm = self.builder, self._job.work, self._norm
        assert norm is not None
        uses: list[Use] = [("norm", norm, "write")]
        works: tuple[Work, ...] = ()
        if self._job.layout.offload:
            uses += [] if self._squares is None else [("squares", self._squares, "read")]
        else:
            works = work.gradient_norm(sum(self._owned(s.group) for s in self._states.values()))
            uses += [(f"gradient.{n}", self._summed(s), "read") for n, s in self._states.items()]
        b.compute("gradient_norm", "gradient_norm", works, uses, b.label("gradient_norm"))
        if self._everyone:
            said = CollectiveCall("all_reduce", self._everyone, "norm")
            b.communicate("reduce_norm", said, [("norm", norm, "update")], b.label("reduce_norm"))

    def _square(self, name: str) -> None:
        """Add up a group's squares while its gradient is on the device."""
        b, state = self.builder, self._states[name]
        mode: Mode = "write" if self._squares is None else "update"
        if self._squares is None:
            self._squares = b.exchanged("squares", 256, "scratch", "float32", "squares")
        count = self._owned(state.group)
        works = self._job.work.gradient_norm(count)
        uses: list[Use] = [
            ("squares", self._squares, mode),
            ("gradient", self._summed(state), "read"),
        ]
        b.compute(f"squares.{name}", f"squares.{count}", works, uses, self._label("squares", name))

    def _owned(self, group: Group) -> int:
        return group.trained_shard if self.zero else group.num_trained

    def _summed(self, state: _State) -> Buffer:
        found = state.gradient if state.gradient_shard is None else state.gradient_shard
        assert found is not None
        return found

    def _update(self, group: str) -> None:
        b, state = self.builder, self._states[group]
        target = state.shard or state.parameters  # or the master alone, which is in the state
        for number, (held, count) in enumerate(state.optimizer):
            uses: list[Use] = [] if self._norm is None else [("norm", self._norm, "read")]
            uses += [
                ("gradient", self._summed(state), "read"),
                ("optimizer_state", held, "update"),
            ]
            if target is not None:
                uses.append(("parameters", target, "update"))
            tag = f"{group}.part{number}" if len(state.optimizer) > 1 else group
            call, works = f"update.{state.group.name}.{count}", self._job.work.optimizer(count)
            b.compute(f"update.{tag}", call, works, uses, self._label("optimizer", group))


def _parts(group: Group, count: int, job: Job) -> list[tuple[str, int]]:
    """Name and number of parameters of each part of a group's optimizer state.

    It is one part, or with offload several: so that one is updated while others are copied.
    """
    num_parts = -(-group.state_of(count) // _PART_BYTES) if job.layout.offload else 1
    if num_parts <= 1:
        return [("", count)]
    each, more = divmod(count, num_parts)
    return [(f".part{part}", each + (part < more)) for part in range(num_parts)]
