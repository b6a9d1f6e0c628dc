"""What planning makes again and again, kept from plan to plan.

Chains, their units, and the programs of their bounds (`bound_kept.py`), do not depend on caps. A
page that is played with, a sweep, and a search over caps ask for the same ones many times.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

from twinstream.models.lowering.lower import lower
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.planner.lifetimes.uses import UnitMap
from twinstream.schedule.chain import Chain
from twinstream.schedule.workload import Workload

MOST_TASKS = 20_000

_KeptT = TypeVar("_KeptT")


class Kept(Generic[_KeptT]):
    """The values last asked for, by key, as many as come to no more than a weight in all."""

    def __init__(self, most_weight: int) -> None:
        self._most_weight = most_weight
        self._found: OrderedDict[Hashable, tuple[_KeptT, int]] = OrderedDict()
        self._lock = Lock()

    def get(
        self, key: Hashable, make: Callable[[], _KeptT], weigh: Callable[[_KeptT], int]
    ) -> _KeptT:
        """The value of a key, made if it is not there; too heavy a one is not kept."""
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key][0]
        value = make()
        if (weight := weigh(value)) > self._most_weight:
            return value
        with self._lock:
            self._found[key] = value, weight
            while sum(weight for _, weight in self._found.values()) > self._most_weight:
                self._found.popitem(last=False)
        return value


_chains: Kept[Chain] = Kept(MOST_TASKS)
_units: Kept[tuple[Chain, UnitMap]] = Kept(MOST_TASKS)


def kept_chain(spec: ModelSpec, workload: Workload, recipe: Recipe) -> Chain:
    """As `lower`."""
    return _chains.get(
        (spec, workload, recipe),
        lambda: lower(spec, workload, recipe),
        lambda chain: len(chain.tasks),
    )


def kept_units(chain: Chain) -> UnitMap:
    """As `UnitMap`."""
    # What is kept holds its chain, whose identity is therefore no other chain's meanwhile.
    _, units = _units.get(
        id(chain), lambda: (chain, UnitMap(chain)), lambda found: len(found[0].tasks)
    )
    return units
