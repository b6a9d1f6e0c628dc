"""Tasks that the host CPU runs (an offloaded optimizer): their operands lie in host memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from twinstream.planner.lifetimes.uses import UnitMap, Use, uses_by_unit
from twinstream.schedule.chain import Chain, Task


def host_tasks(chain: Chain) -> list[Task]:
    """Return the tasks on the host, in chain order."""
    calls = {name for name, call in chain.calls.items() if call.processor == "host"}
    return [task for task in chain.tasks if task.call in calls] if calls else []


def device_uses(chain: Chain, tasks: Sequence[Task], units: UnitMap) -> dict[str, list[Use]]:
    """Return the uses by the device's tasks alone; positions are those of the whole sequence."""
    on_device = [chain.calls[task.call].processor == "device" for task in tasks]
    found = {
        name: [use for use in used if on_device[use.position]]
        for name, used in uses_by_unit(tasks, units).items()
    }
    return {name: used for name, used in found.items() if used}


def without_host_tasks(chain: Chain) -> Chain:
    """Return the chain of the device's tasks alone; what the host makes is simply there."""
    dropped = {task.task_id for task in host_tasks(chain)}
    kept_before = [0]
    for task in chain.tasks:
        kept_before.append(kept_before[-1] + (task.task_id not in dropped))
    return chain.model_copy(
        update={
            "tasks": tuple(task for task in chain.tasks if task.task_id not in dropped),
            "calls": {name: c for name, c in chain.calls.items() if c.processor == "device"},
            "round_starts": tuple(kept_before[start] for start in chain.round_starts),
        }
    )


@dataclass(frozen=True)
class HostContent:
    """Leaf versions that the host's tasks read and make (with the last maker), and their units."""

    reads: set[tuple[str, int]] = field(default_factory=set)
    makes: dict[tuple[str, int], str] = field(default_factory=dict)
    units: set[str] = field(default_factory=set)

    @staticmethod
    def of(chain: Chain, units: UnitMap) -> "HostContent":
        found = HostContent()
        for task in host_tasks(chain):
            for name, leaves in units.touched(task).items():
                found.units.add(name)
                for use in leaves:
                    if use.reads is not None:
                        found.reads.add((use.leaf, use.reads))
                    if use.makes is not None:
                        found.makes[use.leaf, use.makes] = task.task_id
        return found
