"""A chain of a few rounds, with what planning looks up in it again and again."""

from functools import cached_property

from twinstream.hardware_profiles.cost import cost_alone_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.lifetimes.host_tasks import host_tasks
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
    def made_on_host(self) -> dict[str, int]:
        """By leaf of which the host makes the content that a pass ends with: where it does so."""
        found: dict[str, int] = {}
        for task in host_tasks(self.chain):
            for unit, uses in self.units.touched(task).items():
                made = [use.leaf for use in uses if use.makes]
                if self.units.units[unit].persistent:
                    found |= dict.fromkeys(made, self.position[task.task_id])
        return found

    @cached_property
    def position(self) -> dict[str, int]:
        """The position of every task, by its id."""
        return {task.task_id: i for i, task in enumerate(self.chain.tasks)}

    def call_ns(self, machine: Machine) -> dict[str, float]:
        """Return how long each kernel call takes the device alone: none that the host makes."""
        return {
            name: cost_alone_ns(call.cost, machine) if call.processor == "device" else 0.0
            for name, call in self.chain.calls.items()
        }
