"""Parameters that are kept in shards, gathered whole before each use."""

from collections.abc import Sequence

from twinstream.models.lowering.communication_tasks import CommunicationTasks
from twinstream.models.lowering.sharding import Sharding
from twinstream.models.trained import layer_of
from twinstream.schedule.ops import Label


class ParameterGathers:
    """Each group is gathered when the one used before it begins: one use ahead.

    What is used twice in a row is gathered once. `uses` are all of the step, in order.
    """

    def __init__(
        self, communications: CommunicationTasks, sharding: Sharding, uses: Sequence[str]
    ) -> None:
        self._communications, self._sharding = communications, sharding
        self._uses, self._number = uses, 0

    def use(self, group: str, round_: int) -> None:
        """Comes before the tasks of a use."""
        number, self._number = self._number, self._number + 1
        assert self._uses[number] == group, f"{group} is used out of turn"
        if number == 0:
            self._gather(group, round_)
        if number + 1 < len(self._uses) and self._uses[number + 1] != group:
            self._gather(self._uses[number + 1], round_)

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
