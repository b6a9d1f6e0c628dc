"""The sequence of tasks that runs: the chain's tasks and the chosen recomputes."""

from collections.abc import Mapping

from twinstream.schedule.chain import Chain, Task


def with_recomputes(chain: Chain, levels: Mapping[str, str]) -> list[Task]:
    """Insert, before its task, the recompute of every group that `levels` names a level for."""
    before: dict[str, Task] = {
        r.before: r.task
        for r in chain.recomputes
        if r.group in levels and r.task.label.level == levels[r.group]
    }
    tasks: list[Task] = []
    for task in chain.tasks:
        if task.task_id in before:
            tasks.append(before[task.task_id])
        tasks.append(task)
    return tasks


def at_level(chain: Chain, level: str | None) -> list[Task]:
    """Return levels that recompute all blocks from one level; None: nothing is recomputed."""
    groups = {r.group for r in chain.recomputes} if level else set()
    return with_recomputes(chain, dict.fromkeys(groups, level or ""))


def declared_levels(chain: Chain) -> list[str]:
    """Return the recompute levels as the chain declares them, the cheapest first."""
    names = [r.task.label.level for r in chain.recomputes]
    return list(dict.fromkeys(name for name in names if name is not None))
