"""A planning policy of one's own, without packaging:

twinstream plan --policy examples/greedy_policy.py:POLICY --model 1b --machine h100 ...

What is used again within a few tasks stays on the device, the rest is copied out and back in. The
largest number of tasks for which everything fits the caps is taken.
"""

from collections.abc import Iterator
from functools import partial

from twinstream.toolkit import (
    Caps,
    Chain,
    Emitted,
    Machine,
    Policy,
    RankSchedule,
    RulePlacement,
    UnitMap,
    at_level,
    chosen_residencies,
    emitted,
    first_fitting,
    repeated,
    uses_by_unit,
)


def plan_greedy(chain: Chain, machine: Machine, caps: Caps) -> RankSchedule:
    """Plan a few rounds and repeat them; `repeated` does so for any rule."""
    return repeated(partial(few_rounds, machine=machine, caps=caps), chain)


def few_rounds(chain: Chain, machine: Machine, caps: Caps) -> Emitted:
    placement = first_fitting("greedy", caps, placements(chain))
    return emitted(placement, machine, caps, "greedy")


def placements(chain: Chain) -> Iterator[RulePlacement]:
    units, tasks = UnitMap(chain), at_level(chain, None)  # nothing is recomputed
    uses = uses_by_unit(tasks, units)
    for patience in (len(tasks), 64, 16, 4, 0):
        residencies = chosen_residencies(
            uses, units, lambda unit, before, after, most=patience: 0 <= after - before <= most,
            len(tasks),
        )  # fmt: skip
        yield RulePlacement.of(chain, tasks, units, residencies)


POLICY = Policy.by_chain("greedy", plan_greedy)
