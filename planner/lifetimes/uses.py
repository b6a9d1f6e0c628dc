"""Units, which are placed and moved as one, and the tasks that use them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from twinstream.schedule.chain import Chain, Task
from twinstream.schedule.tensors import Tensor


class LeafUse(NamedTuple):
    """What one task does to one leaf (a tensor without parts, or one part) of a unit."""

    leaf: str
    reads: int | None
    makes: int | None


class Use(NamedTuple):
    """One task's use of one unit; `position` is the task's place in the sequence."""

    position: int
    leaves: tuple[LeafUse, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """Bytes that are placed and moved as one: a tensor, a parent with its parts, or one part."""

    unit_id: str
    tensor: Tensor
    leaves: tuple[str, ...]
    persistent: bool


class UnitMap:
    """Groups the tensors of a chain into units.

    Parts of a parent form one unit when some task names the parent or uses two of its parts;
    otherwise (optimizer state updated part by part) each part is a unit of its own.
    """

    def __init__(self, chain: Chain) -> None:
        tensors = {t.tensor_id: t for t in chain.tensors}
        self.parts: dict[str, list[str]] = {}
        for tensor in chain.tensors:
            if tensor.parent is not None:
                self.parts.setdefault(tensor.parent, []).append(tensor.tensor_id)
        together = self._used_together(chain, tensors)
        self.units: dict[str, Unit] = {}
        self.unit_of_leaf: dict[str, str] = {}
        self._touched: dict[str, dict[str, tuple[LeafUse, ...]]] = {}
        self._alike: dict[tuple[str, int | None, int | None], dict[str, tuple[LeafUse, ...]]] = {}
        persistent = set(chain.persistent)
        for tensor in chain.tensors:
            name = tensor.tensor_id
            root = tensor.parent or name
            is_unit = (tensor.parent is None) if root in together else name not in self.parts
            if is_unit:
                leaves = tuple(self.parts.get(name, [name]))
                self.units[name] = Unit(name, tensor, leaves, root in persistent)
                self.unit_of_leaf.update(dict.fromkeys(leaves, name))

    def leaves(self, tensor: str, num_parts: int | None) -> list[str]:
        return self.parts.get(tensor, [tensor])[:num_parts]

    def touched(self, task: Task) -> dict[str, tuple[LeafUse, ...]]:
        """Return what a task does to each unit that it uses."""
        if task.task_id not in self._touched:
            found: dict[str, tuple[LeafUse, ...]] = {}
            for operand in task.operands:
                reads = operand.version if operand.mode in ("read", "update") else None
                makes = {"write": operand.version, "update": operand.version + 1}.get(operand.mode)
                for unit, uses in self._uses_of(operand.tensor, reads, makes).items():
                    found[unit] = found.get(unit, ()) + uses[: operand.num_parts]
            self._touched[task.task_id] = found
        return self._touched[task.task_id]

    def _uses_of(
        self, tensor: str, reads: int | None, makes: int | None
    ) -> dict[str, tuple[LeafUse, ...]]:
        """What is done to all leaves of a tensor, by unit; made once for all tasks alike.

        A tensor of several units has no operand of its first few parts alone.
        """
        key = tensor, reads, makes
        if key not in self._alike:
            found: dict[str, list[LeafUse]] = {}
            for leaf in self.leaves(tensor, None):
                found.setdefault(self.unit_of_leaf[leaf], []).append(LeafUse(leaf, reads, makes))
            self._alike[key] = {unit: tuple(uses) for unit, uses in found.items()}
        return self._alike[key]

    def _used_together(self, chain: Chain, tensors: dict[str, Tensor]) -> set[str]:
        together: set[str] = set()
        for task in [*chain.tasks, *(r.task for r in chain.recomputes)]:
            seen: set[str] = set()
            for operand in task.operands:
                root = tensors[operand.tensor].parent or operand.tensor
                if operand.tensor == root or root in seen:
                    together.add(root)
                seen.add(root)
        return together


def read_only_leaves(chain: Chain, units: UnitMap) -> frozenset[str]:
    """Return the leaves of parameters that no task changes: files may hold them all the time."""
    made = {
        leaf
        for task in [*chain.tasks, *(r.task for r in chain.recomputes)]
        for operand in task.operands
        if operand.mode != "read"
        for leaf in units.leaves(operand.tensor, operand.num_parts)
    }
    return frozenset(
        leaf
        for unit in units.units.values()
        if unit.persistent and unit.tensor.role == "parameter"
        for leaf in unit.leaves
        if leaf not in made
    )


def uses_by_unit(tasks: Sequence[Task], units: UnitMap) -> dict[str, list[Use]]:
    """Return the uses of every unit, in task order."""
    found: dict[str, list[Use]] = {}
    for position, task in enumerate(tasks):
        for unit, leaves in units.touched(task).items():
            found.setdefault(unit, []).append(Use(position, leaves))
    return found
