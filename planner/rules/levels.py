"""Recompute levels: which saved activations of a block are kept, offloaded or recomputed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from twinstream.planner.lifetimes.live_bytes import align_up
from twinstream.planner.lifetimes.uses import UnitMap
from twinstream.schedule.chain import Chain, Recompute, Task


@dataclass(frozen=True)
class Option:
    """One way to save a block: the level, and the units that need not be saved at it."""

    level: str | None
    remade: frozenset[str]


@dataclass(frozen=True)
class SavedBlock:
    """The saved activations of one forward task, the same in every round.

    `groups` are the chain's recompute groups, one per round; `units` what backward reads of it, and
    `unit_bytes` what this block adds to each (of a sequence's K and V, its own chunk's);
    `options` from no recompute to the most. `gap_ns` is the compute time between forward and
    backward, `forward_ns` the forward task's own.
    """

    groups: tuple[str, ...]
    units: tuple[str, ...]
    unit_bytes: tuple[int, ...]
    options: tuple[Option, ...]
    gap_ns: float
    forward_ns: float

    def saved_bytes(self, option: int) -> int:
        """Bytes that must be saved of the block when that option makes the rest again."""
        remade = self.options[option].remade
        sizes = zip(self.units, self.unit_bytes, strict=True)
        return sum(size for name, size in sizes if name not in remade)


def saved_blocks(chain: Chain, units: UnitMap, call_ns: Mapping[str, float]) -> list[SavedBlock]:
    """Return the blocks in forward order, from the recomputes that the chain declares."""
    writer, start_ns = _writers(chain, units, call_ns)
    leaf_bytes = {tensor.tensor_id: tensor.size_bytes for tensor in chain.tensors}
    tasks = {task.task_id: task for task in chain.tasks}
    by_group: dict[str, list[Recompute]] = {}
    for recompute in chain.recomputes:
        by_group.setdefault(recompute.group, []).append(recompute)
    found: dict[tuple[str, ...], SavedBlock] = {}
    for group, recomputes in by_group.items():
        backward = tasks[recomputes[0].before]
        options = [Option(None, frozenset())]
        for recompute in recomputes:
            options.append(
                Option(recompute.task.label.level, frozenset(_made(recompute.task, units)))
            )
        made_again = frozenset().union(*(option.remade for option in options))
        saved = tuple(
            name
            for name in _read(backward, units)
            if units.units[name].tensor.role in ("activation", "context") and name in writer
        )
        if saved in found:
            known = found[saved]
            found[saved] = replace(known, groups=(*known.groups, group))
            continue
        forward = next(writer[name] for name in saved if name in made_again)
        end_ns = start_ns[forward.task_id] + call_ns[forward.call]
        gap_ns = start_ns[backward.task_id] - end_ns
        sizes = tuple(_own_bytes(name, forward, units, leaf_bytes) for name in saved)
        found[saved] = SavedBlock(
            (group,), saved, sizes, tuple(options), gap_ns, call_ns[forward.call]
        )
    return sorted(found.values(), key=lambda block: -block.gap_ns)


def _writers(
    chain: Chain, units: UnitMap, call_ns: Mapping[str, float]
) -> tuple[dict[str, Task], dict[str, float]]:
    """First task that makes each unit, and every task's start when compute never waits."""
    writer: dict[str, Task] = {}
    start_ns: dict[str, float] = {}
    now_ns = 0.0
    for task in chain.tasks:
        start_ns[task.task_id] = now_ns
        now_ns += call_ns[task.call]
        for name in _made(task, units):
            writer.setdefault(name, task)
    return writer, start_ns


def _own_bytes(name: str, forward: Task, units: UnitMap, leaf_bytes: Mapping[str, int]) -> int:
    """Bytes of a unit that saving this block adds: K and V of other chunks are theirs."""
    unit = units.units[name]
    if unit.tensor.role != "context":
        return align_up(unit.tensor.size_bytes)
    written = {
        leaf
        for operand in forward.operands
        if operand.mode == "write"
        for leaf in units.leaves(operand.tensor, operand.num_parts)
    }
    return align_up(sum(leaf_bytes[leaf] for leaf in unit.leaves if leaf in written))


def _made(task: Task, units: UnitMap) -> list[str]:
    """Units that a task writes afresh (an update goes on with what is there)."""
    return [
        units.unit_of_leaf[leaf]
        for operand in task.operands
        if operand.mode == "write"
        for leaf in units.leaves(operand.tensor, operand.num_parts)
    ]


def _read(task: Task, units: UnitMap) -> list[str]:
    names = [
        units.unit_of_leaf[leaf]
        for operand in task.operands
        if operand.mode == "read"
        for leaf in units.leaves(operand.tensor, operand.num_parts)
    ]
    return list(dict.fromkeys(names))


class LevelChoice:
    """A choice for every block: kept on the device, or saved at one of the block's options."""

    def __init__(self, blocks: list[SavedBlock]) -> None:
        self._blocks = blocks
        self._option: list[int | None] = [len(block.options) - 1 for block in blocks]

    @property
    def levels(self) -> dict[str, str]:
        """The level to recompute from, by group; groups that are not recomputed are absent."""
        return {
            group: level
            for block, chosen in zip(self._blocks, self._option, strict=True)
            if chosen is not None and (level := block.options[chosen].level) is not None
            for group in block.groups
        }

    @property
    def kept_units(self) -> set[str]:
        return {
            name
            for block, chosen in zip(self._blocks, self._option, strict=True)
            if chosen is None
            for name in block.units
        }

    def keep(self, rule: Callable[[SavedBlock], bool]) -> None:
        """Keep the blocks that the rule names on the device, whole."""
        for index, block in enumerate(self._blocks):
            if rule(block):
                self._option[index] = None

    def offload_what_hides(self, copy_ns: Callable[[int], float]) -> None:
        """Offload at the first option whose copies take no longer than the block's forward."""
        for index, block in enumerate(self._blocks):
            if self._option[index] is None:
                continue
            for option in range(len(block.options)):
                if copy_ns(block.saved_bytes(option)) <= block.forward_ns:
                    self._option[index] = option
                    break

    def lower_by(self, excess_bytes: int) -> bool:
        """Save less on the host, from the longest-saved block on, until so much is gone.

        One level at a time over all blocks, so that nothing goes to the lowest level while
        another could still give. Returns whether anything could be lowered at all.
        """
        before = list(self._option)
        most = max((len(block.options) for block in self._blocks), default=0)
        for target in range(1, most):
            for index, block in enumerate(self._blocks):
                chosen = self._option[index]
                if excess_bytes <= 0:
                    return self._option != before
                if chosen is not None and chosen < target < len(block.options):
                    excess_bytes -= block.saved_bytes(chosen) - block.saved_bytes(target)
                    self._option[index] = target
        return self._option != before
