"""Tasks by which a rank's chain says that it communicates; they become `Communicate` ops."""

from collections.abc import Sequence

from twinstream.models.lowering.chain_builder import ChainBuilder
from twinstream.schedule.chain import Task
from twinstream.schedule.ops import Attribute, KernelCall, Label, TaskOperand

COMMUNICATE = "communicate"  # the kernel of such tasks


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
        task_id, label = f"send.{tensor}.v{told.version}", Label(kind="send", round=round_)
        self._add(task_id, _message("send", shift), [told], label)

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
        attributes: dict[str, Attribute] = {
            "collective": collective, "axes": " ".join(axes), "queue": queue,
        }  # fmt: skip
        if collective in ("all_reduce", "reduce_scatter"):
            is_librarys = tuple(axes) == self._by_library
            attributes["reduction"] = "library" if is_librarys else "rank_order"
        self._add(task_id, attributes, operands, label)

    def _add(
        self,
        task_id: str,
        attributes: dict[str, Attribute],
        operands: list[TaskOperand],
        label: Label,
    ) -> None:
        call = f"{COMMUNICATE}.{attributes['queue']}.{attributes['collective']}"
        known = KernelCall(kernel=COMMUNICATE, attributes=attributes, cost=())
        assert self.builder.calls.setdefault(call, known) == known, "a queue has one set of axes"
        self.builder.tasks.append(
            Task(task_id=task_id, call=call, operands=tuple(operands), label=label)
        )


def _message(collective: str, shift: int) -> dict[str, Attribute]:
    queue = f"{collective}.{'next' if shift > 0 else 'prev'}"
    return {"collective": collective, "axes": "pp", "shift": shift, "queue": queue}
