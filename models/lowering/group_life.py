"""The life of a parameter group on a rank: gathered, used, its gradient summed, normed, updated.

It is written once, for all layouts and both forms of blocks. A subclass says in which tensors a
group is, and by what its gradients are squared and its parameters updated.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic

from twinstream.models.lowering.chain_builder import CollectiveCall, OperandT, TaskBuilder, UseMode
from twinstream.schedule.ops import Label, Reduction


class GroupLife(ABC, Generic[OperandT]):
    """What happens to groups in which order, and what replicas exchange of them.

    ZeRO 0 sums a gradient on every replica; otherwise each replica has its shard of the sum, which
    lies where it lay or in a tensor of its own. Where shards are held again by other replicas
    (outer axes), they are summed over those, too. What follows a sum (squares, update) comes after
    the backward pass of `behind` further groups, which so runs beside the sum.

    Fields:
        shared: groups whose gradients another stage has a part of: those of tied embeddings.
        postpones: sums over replicas wait until all gradients are complete.
        reduction: how replicas' gradients are summed, where that is fixed.
    """

    builder: TaskBuilder[OperandT]
    clips: bool
    zero: int = 0
    behind: int = 0
    shared: tuple[str, ...] = ()
    postpones: bool = False
    reduction: Reduction | None = None

    def __init__(self) -> None:
        self._waiting: list[str] = []
        self._postponed: list[str] = []

    def after_backward(self, group: str, tag: str, *, last: bool) -> None:
        """Follow a microbatch's contribution to a gradient; a shared one waits for the other's."""
        if not (last and group in self.shared):
            self._contributed(group, tag, last=last)

    def finish(self) -> None:
        """Follow the whole backward pass: what was left to the end, the norm, updates."""
        for group in self.shared:
            self._sum_over_ends(group)
            self._contributed(group, "tied", last=True)
        self._complete_all()
        while self._waiting:
            self._follow(self._waiting.pop(0))
        if self.clips:
            self._take_norm()
        for group in self._updated_last():
            self._update_group(group)

    def _axes(self, group: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the axes over whose ranks ZeRO shards, and those where shards are held again."""
        return (), ()

    @abstractmethod
    def _gradient(self, group: str, mode: UseMode) -> OperandT:
        """Return the whole gradient as an operand."""

    def _gradient_shard(self, group: str, mode: UseMode) -> OperandT | None:
        """Return the summed shard as an operand; None where it lies in the whole gradient."""
        return None

    @abstractmethod
    def _parameters(self, group: str) -> OperandT:
        """Return whole parameters, of which each replica has updated its shard."""

    @abstractmethod
    def _layer(self, group: str) -> int | None:
        """Return the layer that a group is of."""

    def _sum_over_ends(self, group: str) -> None:
        """Add up a shared gradient with the other stage's part of it."""

    @abstractmethod
    def _follow(self, group: str) -> None:
        """Go on once a gradient is summed."""

    @abstractmethod
    def _take_norm(self) -> None:
        """Take the norm of all gradients, which all stages have."""

    @abstractmethod
    def _updated_last(self) -> Sequence[str]:
        """Return the groups that are updated after the whole backward pass, in order."""

    @abstractmethod
    def _update(self, group: str) -> None:
        """Update parameters and optimizer state, or this rank's shard of them."""

    def _contributed(self, group: str, tag: str, *, last: bool) -> None:
        if last:
            self._complete(group)

    def _complete(self, group: str) -> None:
        """Sum a gradient that has all contributions of its rank."""
        if any(self._axes(group)):
            if self.postpones:
                self._postponed.append(group)
                return
            self._reduce(group)
        self._queue(group)

    def _queue(self, group: str) -> None:
        self._waiting.append(group)
        if len(self._waiting) > self.behind:
            self._follow(self._waiting.pop(0))

    def _complete_all(self) -> None:
        """Sum what was postponed."""
        for group in self._postponed:
            self._reduce(group)
        self._waiting += self._postponed

    def _reduce(self, group: str) -> None:
        axes, outer = self._axes(group)
        is_sharded = bool(self.zero and axes)
        shard = self._gradient_shard(group, "write") if is_sharded else None
        if shard is not None:
            operands = [self._gradient(group, "read"), shard]
            self._sum(f"reduce.{group}", group, "reduce_scatter", axes, operands)
            self._sum_over_outer(group)
            return
        collective, over = ("reduce_scatter", axes) if is_sharded else ("all_reduce", outer + axes)
        self._sum(f"reduce.{group}", group, collective, over, [self._gradient(group, "update")])

    def _sum_over_outer(self, group: str) -> None:
        _, outer = self._axes(group)
        shard = self._gradient_shard(group, "update") if outer else None
        if shard is not None:
            self._sum(f"reduce_outer.{group}", group, "all_reduce", outer, [shard])

    def _sum(
        self, task_id: str, group: str, collective: str, axes: tuple[str, ...],
        operands: Sequence[OperandT],
    ) -> None:  # fmt: skip
        said = CollectiveCall(collective, axes, "dp", reduction=self.reduction)
        self.builder.communicate(task_id, said, operands, self._label("reduce_gradients", group))

    def _gather(self, tag: str, group: str, operands: Sequence[OperandT], label: Label) -> None:
        said = CollectiveCall("all_gather", self._axes(group)[0], "dp.gather")
        self.builder.communicate(f"gather.{tag}", said, operands, label)

    def _update_group(self, group: str) -> None:
        """Update a group; with ZeRO 1 and 2 replicas then gather one another's shards."""
        self._update(group)
        axes, _ = self._axes(group)
        if axes and self.zero in (1, 2):
            label = self._label("gather_parameters", group)
            self._gather(group, group, [self._parameters(group)], label)

    def _label(self, kind: str, group: str) -> Label:
        return self.builder.label(kind, self._layer(group))
