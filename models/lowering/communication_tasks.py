"""Tasks by which a rank's chain says that it communicates; they become `Communicate` ops.

Among them are those that gather, before each use, parameters that are kept in shards.
"""

from collections.abc import Sequence

from twinstream.models.layout import layer_of
from twinstream.models.lowering.chain_builder import ChainBuilder
from twinstream.models.lowering.sharding import Sharding
from twinstream.schedule.chain import COMMUNICATE, Task
from twinstream.schedule.ops import Attribute, KernelCall, Label, TaskOperand


def communication_call(
    collective: str, axes: Sequence[str], queue: str, shift: int = 0, reduction: str | None = None
) -> tuple[str, KernelCall]:
    """The id and the call of all tasks that say the same to the same ranks on one queue."""
    attributes: dict[str, Attribute] = {
        "collective": collective, "axes": " ".join(axes), "queue": queue,
    }  # fmt: skip
    if shift:
        attributes["shift"] = shift
    if reduction is not None:
        attributes["reduction"] = reduction
    call_id = ".".join((COMMUNICATE, queue, collective, *axes))
    return call_id, KernelCall(kernel=COMMUNICATE, attributes=attributes, cost=())


class CommunicationTasks:
    """Adds them to a chain. Messages go along axis `pp`.

    Sums over the axes `by_library` are as the library does them, all others in rank order.
    """

    def __init__(self, builder: ChainBuilder, by_library: Sequence[str] = ()) -> None:
        self.builder = builder
        self._by_library = tuple(by_library)

    def send(self, tensor: str, shift: int, round_: int) -> None:
        """The newest version, to the rank `shift` further."""
        told = self.builder.read("hidden", tensor)
        label = Label(kind="send", round=round_)
        self._add(f"send.{tensor}.v{told.version}", _message("send", shift), [told], label)

    def receive(self, tensor: str, version: int, shift: int, round_: int) -> None:
        """That version, from the rank `shift` further."""
        self.builder.begin_at(tensor, version - 1)
        heard = self.builder.write("hidden", tensor)
        label = Label(kind="recv", round=round_)
        self._add(f"recv.{tensor}.v{version}", _message("recv", shift), [heard], label)

    def collective(
        self, task_id: str, collective: str, axes: Sequence[str], queue: str,
        operands: list[TaskOperand], label: Label,
    ) -> None:  # fmt: skip
        """Of all ranks that differ along these axes only."""
        reduction = None
        if collective in ("all_reduce", "reduce_scatter"):
            reduction = "library" if tuple(axes) == self._by_library else "rank_order"
        self._add(
            task_id, communication_call(collective, axes, queue, 0, reduction), operands, label
        )

    def _add(
        self, task_id: str, said: tuple[str, KernelCall], operands: list[TaskOperand], label: Label
    ) -> None:
        call_id, call = said
        assert self.builder.calls.setdefault(call_id, call) == call
        self.builder.tasks.append(
            Task(task_id=task_id, call=call_id, operands=tuple(operands), label=label)
        )


class ParameterGathers:
    """Groups are gathered when the use before theirs begins: one use ahead.

    What is used twice in a row is gathered once. `uses` are all of the step, in order, each of the
    groups that are read together.
    """

    def __init__(
        self,
        communications: CommunicationTasks,
        sharding: Sharding,
        uses: Sequence[tuple[str, ...]],
    ) -> None:
        self._communications, self._sharding = communications, sharding
        self._uses, self._number = uses, 0

    def use(self, groups: tuple[str, ...], round_: int) -> None:
        """Comes before the tasks of a use."""
        number, self._number = self._number, self._number + 1
        assert self._uses[number] == groups, f"{groups} are used out of turn"
        if number == 0:
            self._gather_all(groups, round_)
        if number + 1 < len(self._uses):
            self._gather_all([one for one in self._uses[number + 1] if one not in groups], round_)

    def _gather_all(self, groups: Sequence[str], round_: int) -> None:
        for group in groups:
            self._gather(group, round_)

    def _gather(self, group: str, round_: int) -> None:
        builder = self._communications.builder
        operands = [
            builder.read("shard", f"param.{group}"),
            builder.write("parameters", f"gathered.{group}"),
        ]
        self._communications.collective(
            f"gather.{group}.v{operands[1].version}", "all_gather", self._sharding.axes,
            "dp.gather", operands,
            Label(kind="gather_parameters", layer=layer_of(group), round=round_),
        )  # fmt: skip


def _message(collective: str, shift: int) -> tuple[str, KernelCall]:
    queue = f"{collective}.{'next' if shift > 0 else 'prev'}"
    return communication_call(collective, ("pp",), queue, shift)
