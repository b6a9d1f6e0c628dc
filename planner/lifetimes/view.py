"""A chain of a few rounds, with what planning looks up in it again and again."""

from functools import cached_property

from twinstream.hardware_profiles.cost import cost_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.lifetimes.rounds import Folding
from twinstream.planner.lifetimes.uses import UnitMap
from twinstream.schedule.chain import Chain


class ChainView:
    """A chain with its units, its rounds and the positions of its tasks."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain

    @cached_property
    def units(self) -> UnitMap:
        return UnitMap(self.chain)

    @cached_property
    def folding(self) -> Folding:
        return Folding.of(self.chain, self.chain.tasks)

    @cached_property
    def begins_with_updates(self) -> bool:
        """Whether a pass begins with updates by gradients that the one before has left."""
        roles = {tensor.tensor_id: tensor.role for tensor in self.chain.tensors}
        return any(roles[name] == "gradient" for name in self.chain.persistent)

    @cached_property
    def position(self) -> dict[str, int]:
        """The position of every task, by its id."""
        return {task.task_id: i for i, task in enumerate(self.chain.tasks)}

    def call_ns(self, machine: Machine) -> dict[str, float]:
        """Return how long each kernel call takes alone."""
        return {name: cost_alone_ns(call.cost, machine) for name, call in self.chain.calls.items()}
