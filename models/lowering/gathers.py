"""Parameters that are kept in shards, gathered whole before each use."""

from collections.abc import Sequence

from twinstream.models.layout import layer_of
from twinstream.models.lowering.communication_tasks import CommunicationTasks
from twinstream.models.lowering.sharding import Sharding
from twinstream.schedule.ops import Label


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
