"""What plans have in common and reuse: chains and bound programs do not depend on caps.

A page that is played with, a sweep, and a search over caps ask for the same ones many times.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import TypeVar, cast

from twinstream.hardware_profiles.schema import Machine
from twinstream.models.lowering.lower import lower
from twinstream.models.providers.model import AnyModel
from twinstream.models.recipes.recipe import Recipe
from twinstream.planner.bound.lower_bound import BoundProgram, ProgramKind
from twinstream.planner.lifetimes.rounds import PROGRAM_ROUNDS
from twinstream.planner.lifetimes.view import ChainView
from twinstream.schedule.workload import Workload

_MOST_TASKS = 20_000  # of all chains, and again of all programs: a few hundred MB

_KeptT = TypeVar("_KeptT")


class Reuse:
    """The chains and programs used last; several threads may ask for them."""

    def __init__(self) -> None:
        self._views, self._programs = _Kept(), _Kept()

    def view(
        self, spec: AnyModel, workload: Workload, recipe: Recipe, most_rounds: int
    ) -> ChainView:
        """Return the chain of a step, of no more than so many rounds."""
        rounds = min(workload.rounds_per_step, most_rounds)
        few = workload.model_copy(update={"rounds_per_step": rounds})

        def made() -> ChainView:
            return ChainView(lower(spec, few, recipe))

        return self._views.get((spec, few, recipe), made, lambda view: len(view.chain.tasks))

    def program(
        self,
        spec: AnyModel,
        workload: Workload,
        recipe: Recipe,
        machine: Machine,
        kind: ProgramKind,
    ) -> BoundProgram:
        """Return the program of a step's bound, or one that guides its plans."""

        def made() -> BoundProgram:
            view = self.view(spec, workload, recipe, PROGRAM_ROUNDS)
            on_host = None
            if kind.any_updates:
                other = recipe.model_copy(update={"optimizer": "host"})
                on_host = self.view(spec, workload, other, PROGRAM_ROUNDS).chain
            return BoundProgram(view, machine, workload.rounds_per_step, kind, on_host)

        key = (spec, workload, recipe, machine.content_hash, kind)
        return self._programs.get(key, made, lambda program: len(program.chain.tasks))


class _Kept:
    """The values used last, by key, as many as weigh no more than the limit in all."""

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, tuple[object, int]] = OrderedDict()
        self._lock = Lock()

    def get(
        self, key: Hashable, make: Callable[[], _KeptT], weigh: Callable[[_KeptT], int]
    ) -> _KeptT:
        """Return the value of a key, made if it is not there; one that is too heavy is not kept."""
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return cast("_KeptT", self._found[key][0])
        value = make()
        if (weight := weigh(value)) > _MOST_TASKS:
            return value
        with self._lock:
            self._found[key] = value, weight
            while sum(weight for _, weight in self._found.values()) > _MOST_TASKS:
                self._found.popitem(last=False)
        return value
